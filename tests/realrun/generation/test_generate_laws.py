"""Laws 10 and 11 of generations, on drawn worlds too: spans, log and trace agree with the simulator, results with the
library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from policies.parts.routers import combine_weights, routing_of_tokens
from policies.protocols import Needs
from policies.registry import SYSTEMS
from realrun.execution.call_log import LoggedSession, replay
from realrun.execution.routed_tokens import own_routing, scale_of, scaled_by, weighed_like
from realrun.generation.generate import Generated, generate_hosted
from realrun.generation.hosted_model import look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from realrun.smoke.generation_checks import ModelOutput, output_of_executor, output_of_library
from sim.runs.prepare import Prepared, prepare
from sim.simulate import play
from tests.kit.broken import routings_of
from tests.kit.depth import thinned
from tests.kit.generating import (
    CPU,
    MINI,
    MINI_VECTORS,
    PROMPTS,
    assert_says_the_same,
    every_slot,
    expected,
    flips_against_library,
    following,
    hosted,
    library,
    request,
)
from tests.kit.tiny_models import VOCAB, build
from traces.capture.capture import CaptureSettings, capture_loaded
from traces.capture.layers import find_moe_layers
from traces.capture.load import load
from traces.capture.prompts import read_prompts
from traces.file import read_trace
from traces.layout import ForecastKey
from traces.trace import Trace
from trilane.study.validation.parity import answers_of, plans_changed
from trilane.testing.laws import (
    law_1_conservation,
    law_2_causality,
    law_3_exclusivity,
    law_4_capacity,
    law_12_accounting,
)

BY_ITSELF = [
    name for name, entry in SYSTEMS.items()
    if not (entry.needs.changes_routing or entry.needs.future or entry.needs.calibration)
    and all(kind == "gate" for kind, _ in entry.needs.forecasts)
]
COUNT_NAMES = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A family and sizes of its own."""
    family = draw(st.sampled_from(sorted(COUNT_NAMES)))
    experts = draw(st.sampled_from([4, 6, 8, 12]))
    changes = {COUNT_NAMES[family]: experts, "num_hidden_layers": draw(st.integers(2, 4))}
    return family, changes | {"num_experts_per_tok": draw(st.integers(1, experts // 2))}


@settings(max_examples=25)
@given(drawn=models(), data=st.data())
def test_law_11_whatever_is_drawn(
    inline_lanes: HostLanes, drawn: tuple[str, dict[str, int]], data: st.DataObject
) -> None:
    family, changes = drawn
    batch, length = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 9), "prompt tokens")
    token = st.integers(0, VOCAB - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=batch, max_size=batch))
    model = look_at(*taken_apart(build(family, **changes), CPU, plain))
    slots = data.draw(st.integers(0, every_slot(model)), "slots")
    policy = data.draw(st.sampled_from(BY_ITSELF), "policy")
    said = output_of_library(build(family, **changes).model, torch.tensor(prompts), 2)
    asked = request(policy, slots, prompts=tuple(map(tuple, prompts)), generated=2)
    ours = output_of_executor(model, asked, inline_lanes, following(said.tokens))
    torch.testing.assert_close(ours.logits, said.logits, rtol=0, atol=1e-5)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------

HALF = torch.bfloat16


FOUR = (("num_experts_per_tok", 4),)
LEARNT = {"calibration": "mini-moe-calibration", "vectors": MINI_VECTORS}


@cache
def all_resident(family: str, lanes: HostLanes) -> ModelOutput:
    """Output of a family with all experts on the GPU."""
    model = hosted(family, () if family == "mini-moe" else FOUR, HALF)
    return output_of_executor(model, request("llama.cpp", every_slot(model)), lanes)


@pytest.mark.parametrize(("family", "policy"), [
    *product(["deepseek_v3", "gpt_oss"], ["on-demand", "naive-cpu", "hybrimoe", "mix"]),
    *product(["mini-moe"], ["on-demand", "fiddler", "hybrimoe", "dali", "best-exact", "mixtral-offloading"]),
])
def test_bit_by_bit_what_the_run_with_all_experts_resident_says(
    family: str, policy: str, inline_lanes: HostLanes
) -> None:
    """On host lanes GPU and CPU compute an expert alike, and sums do not depend on the order."""
    bundled = family == "mini-moe"
    model = hosted(family, () if bundled else FOUR, HALF)
    resident = all_resident(family, inline_lanes)
    asked = request(policy, every_slot(model) // 4, **(LEARNT if bundled else {}))  # type: ignore[arg-type]
    said = output_of_executor(model, asked, inline_lanes, following(resident.tokens))
    assert said.logits.dtype == HALF
    assert torch.equal(said.logits, resident.logits)


def test_how_often_half_precision_flips_a_token_is_counted(inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe", (), HALF)
    found = flips_against_library(
        library("mini-moe", (), HALF), model, request("on-demand", 16, generated=8), inline_lanes
    )
    assert found.compared == 2 * 9
    assert 0 <= found.flipped_share <= 0.2
    assert found.largest_difference < 1
    same = flips_against_library(library("mini-moe"), hosted("mini-moe"), request("on-demand", 16), inline_lanes)
    assert same.flipped_share == 0


LIVE = [name for name, entry in SYSTEMS.items() if entry.needs.live]


def made(policy: str, trace: Path, lanes: HostLanes) -> Generated:
    """A run of two sequences with a quarter of the experts cached, and its trace."""
    model = hosted("mini-moe")
    asked = request(
        policy, every_slot(model) // 4, calibration="mini-moe-calibration", vectors=MINI_VECTORS, trace=trace
    )
    return generate_hosted(model, asked, lanes)


def as_scenario(run: Generated) -> Prepared:
    """The scenario that a run says it was, about to be simulated on the trace that it left."""
    return prepare(run.run.scenario)


@thinned(5)
@pytest.mark.parametrize("policy", LIVE)
def test_its_spans_obey_the_laws_and_its_log_can_be_replayed(
    policy: str, tmp_path: Path, inline_lanes: HostLanes
) -> None:
    generated = made(policy, tmp_path / "trace.safetensors", inline_lanes)
    run = generated.run
    law_2_causality(run.spans)
    law_3_exclusivity(run.spans)
    law_4_capacity(run.spans, run.memory["cache_bytes"] + run.memory["staging_bytes"])
    law_12_accounting(run.spans, batch=2)
    if not SYSTEMS[policy].needs.changes_routing:
        law_1_conservation(run.spans, routings_of(as_scenario(generated).demand))
    assert replay(generated.session.log, as_scenario(generated).session()) is None  # law 10, the same answers
    simulated = as_scenario(generated).session_of(LoggedSession)
    play(as_scenario(generated), simulated)
    changed = plans_changed(answers_of(generated.session), answers_of(simulated))
    ahead = {"prefetch", "swap"} & set(run.spans.kind)
    assert changed == 0 or ahead  # law 10, the same plans where nothing depends on when a copy arrives
    if not ahead:
        assert generated.session.plans() == simulated.plans()
        assert generated.session.copies() == simulated.copies()


def test_the_trace_is_that_of_the_models_own_routers(tmp_path: Path, inline_lanes: HostLanes) -> None:
    kept, none = (made(name, tmp_path / name, inline_lanes).trace for name in ("naive-cpu", "on-demand"))
    assert (kept.topk_ids == none.topk_ids).all()
    assert (kept.topk_weights == none.topk_weights).all()
    assert kept.scores is not None
    assert not kept.forecasts
    assert {str(key) for key in made("hybrimoe", tmp_path / "hybrimoe", inline_lanes).trace.forecasts} == {
        "gate@1", "gate@2", "gate@3"
    }


class Numbers:
    """A tokenizer for text that is token numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def captured_beside(folder: Path) -> Trace:
    """The trace that capture makes of the bundled model and the prompts."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(" ".join(map(str, prompt)) for prompt in PROMPTS))
    settings = CaptureSettings(
        prompt_tokens=8, generated_tokens=3, temperature=0, forecasts=("gate@1", "gate@2", "gate@3", "quasi_hidden@1")
    )
    loaded = with_fields(load(MINI, "float32"), tokenizer=Numbers())
    capture_loaded(loaded, read_prompts(prompts), folder / "captured", settings, vectors=MINI_VECTORS)
    return read_trace(folder / "captured")


@pytest.mark.parametrize("policy", ["best-exact", "hybrimoe"])
def test_routing_and_forecasts_are_those_that_capture_sees(
    policy: str, tmp_path: Path, inline_lanes: HostLanes
) -> None:
    generated = made(policy, tmp_path / "trace.safetensors", inline_lanes)
    captured = captured_beside(tmp_path)
    for key, forecast in generated.trace.forecasts.items():
        assert (forecast.ids == captured.forecasts[key].ids).all(), key
    assert (generated.trace.topk_ids == captured.topk_ids).all()


def test_a_partial_forecast_is_the_truth_where_all_experts_are_on_the_gpu(inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe")
    trace = generate_hosted(model, request("smoe", every_slot(model)), inline_lanes).trace
    top_k = model.shape.top_k
    forecast = trace.forecasts[ForecastKey("partial", 1)].ids[:, :-1, :top_k]
    assert (np.sort(forecast) == np.sort(trace.topk_ids[:, 1:])).all()


# --- policies that change the routing, or defer experts ---------------------------------------------------------------


CHANGING = [name for name, entry in SYSTEMS.items() if entry.needs.changes_routing and entry.needs.narrow_share is None]


@thinned(2)
@pytest.mark.parametrize("policy", CHANGING)
def test_it_generates_and_says_how_far_it_strays(policy: str, inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe")
    prompts = PROMPTS[: SYSTEMS[policy].needs.max_batch]
    low = {"tail_rank": 1} if policy == "strata@tail-skip" else {}  # the default skips none of two experts
    asked = request(policy, every_slot(model) // 4, parameters=low, prompts=prompts, **LEARNT)  # type: ignore[arg-type]
    assert torch.isfinite(output_of_executor(model, asked, inline_lanes).logits).all()
    run = generate_hosted(model, asked, inline_lanes).run
    assert "changes routing" in run.labels
    assert run.routing_errors is not None
    assert list(run.routing_errors.phase.unique()) == ["prefill", "decode"]
    assert 0 < run.to_dict()["approximated_weight_share"] < 1


@pytest.mark.parametrize(("policy", "parameters", "share"), [
    ("smoe", {"alpha": 0.0}, 0.25),
    ("smoe", {}, 1.0),
    ("best-approx", {}, 1.0),
    ("adapmoe", {"drop_below": 0.0}, 0.25),
])
def test_it_says_the_same_where_it_keeps_the_routing(
    policy: str, parameters: dict[str, object], share: float, inline_lanes: HostLanes
) -> None:
    model = hosted("mini-moe")
    asked = request(policy, round(share * every_slot(model)), parameters=parameters, **LEARNT)  # type: ignore[arg-type]
    assert_says_the_same(model, asked, inline_lanes, expected("mini-moe"))


def test_dropped_experts_leave_fewer_choices_a_token(inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe")
    asked = request("adapmoe", 32, parameters={"drop_below": 0.45}, **LEARNT)  # type: ignore[arg-type]
    shares = generate_hosted(model, asked, inline_lanes).run.to_dict()
    assert shares["dropped_weight_share"] > 0.1
    assert shares["substituted_weight_share"] == 0


# --- weights ----------------------------------------------------------------------------------------------------------

SCORES = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.3, 0.2]], dtype=torch.float16)
IDS = torch.tensor([[3, 1], [2, 0]])
SEEN = Needs(scores=True, tokens=True)


def of_model(factor: float, norm_topk: bool) -> torch.Tensor:
    """Weights of a router that multiplies its scores, or its shares, by a factor."""
    chosen = SCORES.float().gather(1, IDS)
    return factor * (chosen / chosen.sum(1, keepdim=True) if norm_topk else chosen)


@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_a_substitute_gets_the_weight_that_the_model_would_give_it(factor: float, norm_topk: bool) -> None:
    own = own_routing(IDS, of_model(factor, norm_topk), SCORES, SEEN)
    scores = SCORES.tolist()
    made_up = [[1, 2], [2, 0]]  # 2 runs instead of 3 for the first token; the second keeps its experts
    shares = [combine_weights(row, ids, norm_topk) for row, ids in zip(scores, made_up, strict=True)]
    first, second = weighed_like(own, norm_topk)(routing_of_tokens(made_up, shares)).token_weights
    chosen = [scores[0][1], scores[0][2]]
    wanted = [factor * score / (sum(chosen) if norm_topk else 1) for score in chosen]
    assert first == pytest.approx(wanted, rel=1e-3)
    assert second == of_model(factor, norm_topk)[1].tolist()  # bit by bit


def test_weights_made_from_the_routers_weights_have_the_models_scale_already() -> None:
    own = own_routing(IDS, of_model(2.5, True), None, Needs(tokens=True))
    dropped = routing_of_tokens([[1], [2, 0]], [[2.5], [1.3, 1.2]])
    assert weighed_like(own, True)(dropped).token_weights[0] == [2.5]


def test_committed_routing_has_the_scale_that_its_layer_was_seen_to_have() -> None:
    assert hosted("deepseek_v3", (("num_experts_per_tok", 4),)).facts.scales == pytest.approx([2.5] * 3)
    committed = routing_of_tokens([[1, 2]], [[0.75, 0.25]])
    assert scaled_by(2.5)(committed).token_weights == [[1.875, 0.625]]
    assert scale_of([1.0, 0.5], [0.4, 0.2, 0.4], [0, 1], norm_topk=False) == pytest.approx(2.5)


MODEL = "mini-moe"  # 8 layers of 16 experts, top 2
GENERATED = 4


def ffn(experts: Any, expert: int, x: Tensor) -> Tensor:
    """One expert [H] -> [H]."""
    gate, up = functional.linear(x, experts.gate_up_proj[expert]).chunk(2)
    return functional.linear(functional.silu(gate) * up, experts.down_proj[expert])


class DeferringLoop:
    """The routed experts of every layer, token by token. In decode, experts from ``resident`` on that are not among the
    first ``immediate`` of any token are added to the next layer's output; the last layer has none."""

    def __init__(self, experts: Sequence[Any], resident: int, immediate: int) -> None:
        self.experts, self.resident, self.immediate = experts, resident, immediate
        self.late = torch.zeros(())

    def __call__(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        before, now, late = self.late, torch.zeros_like(hidden), torch.zeros_like(hidden)
        joins = self._deferred(layer, ids, weights)
        for token, x in enumerate(hidden):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                (late if expert in joins else now)[token] += weight * ffn(self.experts[layer], expert, x)
        self.late = late
        return now + before if layer else now

    def _deferred(self, layer: int, ids: Tensor, weights: Tensor) -> set[int]:
        if layer == len(self.experts) - 1 or len(ids) > len(PROMPTS):
            return set()
        ranked = ids.gather(1, weights.half().argsort(dim=1, descending=True, stable=True))
        first = set(ranked[:, : self.immediate].flatten().tolist())
        return {expert for expert in ids.flatten().tolist() if expert >= self.resident} - first


@pytest.mark.parametrize(("deferred", "resident"), [(1, 0), (1, 4), (2, 0), (0, 4)])
def test_deferred_experts_are_added_to_the_next_layers_output(
    deferred: int, resident: int, inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = hosted(MODEL), library(MODEL)
    parameters = {"deferred": deferred, "strategy": "uniform"}
    slots = resident * model.shape.moe_layers
    said = output_of_executor(
        model, request("kt-deferral", slots, parameters=parameters, generated=GENERATED), inline_lanes
    )
    exact = expected(MODEL, generated=GENERATED).logits
    layers = [layer.experts for layer in find_moe_layers(plain)]
    loop = DeferringLoop(layers, resident, model.shape.top_k - deferred)
    for number, experts in enumerate(layers):
        monkeypatch.setattr(experts, "forward", partial(loop, number))
    wanted = output_of_library(plain, torch.tensor(PROMPTS), GENERATED)
    assert said.tokens.tolist() == wanted.tokens.tolist()
    torch.testing.assert_close(said.logits, wanted.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(said.logits[0], exact[0], rtol=0, atol=1e-5)  # the prompt's
    assert bool((said.logits[1] - exact[1]).abs().max() > 1e-3) == bool(deferred)
