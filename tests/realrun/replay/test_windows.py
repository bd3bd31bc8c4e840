"""Windows of several rows on host lanes: every row's experts, rejected ones too, and the work of the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from realrun.execution.call_log import replay as play_log
from realrun.experts import ffn
from realrun.experts.ffn import BlockSwiGlu, ExpertShape
from realrun.replay.replay import room_for
from sim.costs.engine_costs import costs_on
from sim.runs.prepare import Prepared
from tests.kit.tiny_bench import Played, WatchedBench, bench_for, check_outputs, choices_of, machine
from tests.realrun.machine.test_native_ffn import needs_compiler
from tests.realrun.machine.test_native_ffn_results import variant
from tests.realrun.machine.test_weight_formats import in_blocks as in_blocks_of_32
from tests.realrun.replay.test_replay import drafted, on_lanes_and_simulated

pytestmark = pytest.mark.timeout(120)
SERIES = ((2, 1), (1, 1), (0, 0), (2, 0))  # drafts, and how many of them are accepted
WORK = ("step", "layer", "lane", "kind", "expert", "tokens")


def windows(policy: str = "strata", rejected: str = "drawn", **parameters: Any) -> Prepared:
    return drafted(policy, parameters=parameters, draft_windows=SERIES, rejected_drafts=rejected)


def work_of(spans: Any) -> Counter[tuple[Any, ...]]:
    """Experts computed and copied, in which step and layer, on which lane, with how many rows."""
    of_experts = spans[(spans.expert >= 0) & (spans.step >= 0)]
    return Counter(of_experts[list(WORK)].astype({"lane": str, "kind": str}).itertuples(index=False, name=None))


def at_the_end(spans: Any) -> Iterator[tuple[Any, ...]]:
    """As ``work_of``, one by one, the kind at the end."""
    return ((step, layer, lane, *rest, kind) for step, layer, lane, kind, *rest in work_of(spans).elements())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_the_lanes_do_the_work_of_the_timeline(share: float) -> None:
    """With a stated share and without swaps no decision depends on timing: which expert, where, with how many rows."""
    measured, _, run = on_lanes_and_simulated(windows(pcie_share=share, swaps=0))
    assert work_of(measured.run.spans) == work_of(run.spans)
    decode = [work for work in work_of(run.spans) if work[0] > 0]
    assert {tokens for *_, kind, _, tokens in decode if kind == "expert"} >= {1, 2}
    assert any(work[2] == "cpu" for work in decode) == (share < 1)
    assert any(work[3] == "demand" for work in decode) == (share > 0)


def test_swaps_that_are_waited_for_are_those_of_the_timeline() -> None:
    """With them in every window, still no decision depends on timing; only whether a swap begins before or after the
    next window is counted."""
    measured, _, run = on_lanes_and_simulated(windows(pcie_share=0.3, every=1, decay=1.0))
    on_lanes, simulated = (
        Counter((step * (kind not in ("swap", "evict")), *rest, kind) for step, *rest, kind in at_the_end(spans))
        for spans in (measured.run.spans, run.spans)
    )
    assert on_lanes == simulated
    assert any(kind == "swap" for *_, kind in simulated)


def test_other_work_would_be_seen() -> None:
    measured, _, run = on_lanes_and_simulated(windows(pcie_share=0.6, swaps=0))
    spans = run.spans.copy()
    last = spans.index[(spans.lane == "cpu") & (spans.kind == "expert")][-1]
    spans.loc[last, "tokens"] += 1
    assert work_of(measured.run.spans) != work_of(spans)


@pytest.mark.parametrize("parameters", [{}, {"tail_rank": 1, "pcie_share": 0.3}], ids=["auto", "tail skip"])
def test_every_row_is_computed_where_the_share_is_found_or_experts_are_left_out(parameters: dict[str, Any]) -> None:
    """``on_lanes_and_simulated`` compares every row of every layer with plain arithmetic."""
    policy = "strata@tail-skip" if parameters else "strata"
    setting = windows(policy, **parameters)
    measured, _, _ = on_lanes_and_simulated(setting)
    assert play_log(measured.session.log, setting.session()) is None
    left_out = [plan for plan in measured.session.plans().values() if sum(plan.routing.workload().values()) % 2]
    assert bool(left_out) == bool(parameters)


# --- rejected rows ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> Iterator[tuple[Prepared, WatchedBench]]:
    setting = windows(pcie_share=0.6)
    with machine() as lanes:
        bench = bench_for(lanes, [setting])
        bench.measure(setting)
        yield setting, bench


def rejected_rows(setting: Prepared) -> list[tuple[int, int]]:
    """Step, and place in it, of the rows that are computed for nothing."""
    decode = [step for step in setting.steps if step.phase == "decode"]
    return [(step.index, place) for step in decode for place in range(step.generated, len(step.rows))]


def test_rejected_rows_have_experts_of_their_own(drawn: tuple[Prepared, WatchedBench]) -> None:
    """The rows of other tokens of the answer, in the workload and in the outputs."""
    setting, bench = drawn
    check_outputs(bench)
    recorded = windows(rejected="recorded", pcie_share=0.6)
    others = {step.index: step.rows for step in recorded.steps}
    rejected = rejected_rows(setting)
    assert len(rejected) > 2
    assert all(others[step][place] != setting.steps[step].rows[place] for step, place in rejected)
    for played in bench.played:
        chosen = Counter(expert for ids in played.ids.tolist() for expert in ids)
        assert played.plan.routing.workload() == chosen
        assert len(played.hidden) == len(setting.steps[played.step].rows)


def test_rejected_rows_with_the_recorded_tokens_experts_would_be_seen(drawn: tuple[Prepared, WatchedBench]) -> None:
    setting, bench = drawn
    trace, recorded = setting.trace, windows(rejected="recorded", pcie_share=0.6)
    kept = list(bench.played)

    def with_others(played: Played) -> Played:
        rows, layer = recorded.steps[played.step].rows, played.plan.layer
        ids, weights = (np.array(array[rows][:, layer]) for array in (trace.topk_ids, trace.topk_weights))
        return replace(played, ids=torch.from_numpy(ids), weights=torch.from_numpy(weights))

    bench.played[:] = map(with_others, kept)
    with pytest.raises(AssertionError, match="not close"):
        check_outputs(bench)
    bench.played[:] = kept


# --- experts in blocks ------------------------------------------------------------------------------------------------


def in_blocks(bits: float, **parameters: Any) -> Prepared:
    """Experts of 64 x 32 with weights of so many bits."""
    setting = windows(**parameters)
    shape = replace(setting.shape, weight_bits=bits, hidden=64, dense_bits=16.0)
    costs = costs_on(setting.hardware, shape, setting.costs.max_tokens)
    return replace(
        setting, shape=replace(shape, expert_width=32), costs=replace(costs, draft=setting.costs.draft)
    )


@needs_compiler
@pytest.mark.parametrize("bits", [8.5, 4.5])
def test_windows_of_experts_in_blocks(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to three rows on either lane: as with unpacked weights, and activations rounded as in a GGUF file's q8_0."""
    monkeypatch.setattr(ffn, "native_ffn", lambda: variant("this processor"))
    setting = in_blocks(bits, pcie_share=0.5, swaps=0)
    kernel = ExpertShape.of(setting.shape).kernel
    assert isinstance(kernel, BlockSwiGlu)
    with machine() as lanes:
        bench = WatchedBench(lanes, setting.shape, room_for([setting]))
        random = torch.Generator().manual_seed(1)
        for layer in range(setting.shape.moe_layers):
            for expert in range(setting.shape.experts):
                for view in views_of(bench, layer, expert).values():
                    view.copy_(kernel.blocks.random(len(view), kernel.blocks.weights_of(view.shape[1]), random))
        measured = bench.measure(setting)
        assert {"cpu", "gpu"} <= set(measured.run.spans[measured.run.spans.kind == "expert"].lane)
        for played in bench.played:
            expected = unpacked_output(bench, kernel, played)
            off = (played.parts.sum(1) - expected).abs().max() / expected.abs().max()
            assert off < 2**-6, float(off)  # unpacked weights are rounded to 8 bits too
            assert (played.parts.sum(1).flip(1) - expected).abs().max() > 0.5 * expected.abs().max()


def views_of(bench: WatchedBench, layer: int, expert: int) -> dict[str, Tensor]:
    return bench.store.layouts[layer].views(bench.store.buffer(layer, expert))


def unpacked_output(bench: WatchedBench, kernel: BlockSwiGlu, played: Played) -> Tensor:
    """The layer's routed output, token by token, choice by choice."""
    output = torch.zeros(played.hidden.shape)
    for token, choices in enumerate(choices_of(played)):
        for expert, weight in choices:
            views = views_of(bench, played.plan.layer, expert)
            first, down = (kernel.blocks.unpacked(views[name]).double() for name in ("gate_up_proj", "down_proj"))
            gate, up = (in_blocks_of_32(played.hidden[token : token + 1]) @ first.T).chunk(2, 1)
            output[token] += weight * (in_blocks_of_32(functional.silu(gate) * up) @ down.T)[0]
    return output
