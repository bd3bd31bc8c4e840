"""Generation on several GPUs of host lanes, each with a block of layers: law 11, and the counts of the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from policies.mechanism.session import Session
from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.call_log import replay as play_log
from realrun.execution.cards import Boundary
from realrun.generation import divided_model, live_cards
from realrun.generation.divided_model import Division, division_of, on_devices
from realrun.generation.generate import Generated, GenerateRequest, generate_hosted
from realrun.generation.live_cards import LiveCards
from realrun.machine.host_lanes import HostLanes
from sim.runs.cards import LayerBlock
from sim.runs.prepare import Prepared, prepare
from sim.simulate import play
from tests.invariants.test_laws_of_cards import hand_overs
from tests.kit.counted_cards import check_counts
from tests.kit.depth import thinned
from tests.kit.generating import MINI_VECTORS, assert_says_the_same, every_slot, expected, hosted, request
from tests.kit.tiny_models import build
from trilane.testing.laws import law_3_exclusivity
from trilane.testing.log import log_of

pytestmark = pytest.mark.timeout(120)
POLICIES = ("on-demand", "naive-cpu", "fiddler", "mixtral-offloading", "hybrimoe", "dali", "best-exact")
ON_TIME = ("on-demand", "naive-cpu", "fiddler")  # they copy nothing ahead, so that no answer depends on time
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe")


def on_cards(asked: GenerateRequest, gpus: int = 2, **changes: Any) -> GenerateRequest:
    return replace(asked, scenario=asked.scenario.with_(gpus=gpus, **changes))


def of_mini_moe(policy: str, gpus: int = 2, **changes: Any) -> GenerateRequest:
    """A quarter of the experts cached."""
    learnt: dict[str, Any] = {"calibration": "mini-moe-calibration", "vectors": MINI_VECTORS}
    slots = every_slot(hosted("mini-moe")) // 4
    return on_cards(request(policy, slots, generated=2, **learnt), gpus, **changes)


@thinned(2)
@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_the_unmodified_model(policy: str, gpus: int, inline_lanes: HostLanes) -> None:
    assert_says_the_same(
        hosted("mini-moe"), of_mini_moe(policy, gpus), inline_lanes, expected("mini-moe", generated=2)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_other_families(family: str, inline_lanes: HostLanes) -> None:
    model = hosted(family)
    asked = on_cards(request("hybrimoe", every_slot(model) // 4, generated=2))
    assert_says_the_same(model, asked, inline_lanes, expected(family, generated=2))


@pytest.mark.parametrize("split", [None, (3.0, 1.0)])
@pytest.mark.parametrize("policy", ON_TIME)
def test_hits_loads_and_experts_of_the_cpu_are_those_of_the_simulator(
    policy: str, split: tuple[float, ...] | None, inline_lanes: HostLanes
) -> None:
    generated = generate_hosted(hosted("mini-moe"), of_mini_moe(policy, layer_split=split), inline_lanes)
    setting = prepare(generated.run.scenario, generated.trace)
    simulated = setting.sessions_of(LoggedSession)
    run = play(setting, *simulated)
    check_counts(generated.sessions, generated.run, simulated, run)


@pytest.mark.parametrize("policy", ["fiddler", "hybrimoe"])
def test_its_spans_obey_the_laws_and_its_logs_can_be_replayed(policy: str, inline_lanes: HostLanes) -> None:
    generated = generate_hosted(hosted("mini-moe"), of_mini_moe(policy), inline_lanes)
    setting = prepare(generated.run.scenario, generated.trace)
    check_spans(generated, setting)
    fresh = setting.sessions_of(Session)
    assert [play_log(each.log, own) for each, own in zip(generated.sessions, fresh, strict=True)] == [None, None]


def check_spans(generated: Generated, setting: Prepared) -> None:
    """One GPU at a time, which begins when the hidden states are there."""
    log = log_of(generated.run.spans)
    law_3_exclusivity([span for span in log.spans if span.kind != "writeback"])
    hand_overs(log, [card.block for card in setting.cards])


def test_each_gpu_is_the_host_threads_while_its_layers_run(
    inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected: list[HostLanes] = []
    monkeypatch.setattr(HostLanes, "select", lambda self: selected.append(self))
    generated = generate_hosted(hosted("mini-moe"), of_mini_moe("on-demand"), inline_lanes)
    passes = generated.run.spans.step.nunique()
    assert selected == [inline_lanes, inline_lanes.card(1)] * passes


# --- broken twin ------------------------------------------------------------------------------------------------------


def test_hidden_states_that_are_not_handed_over_are_caught(
    inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Boundary.cross

    def forgets(self: Boundary, *given: Any) -> Any:
        crossed = sound(self, *given)
        crossed.wait()
        self.arrived.zero_()
        return crossed

    monkeypatch.setattr(Boundary, "cross", forgets)
    with pytest.raises(AssertionError):
        assert_says_the_same(
            hosted("mini-moe"), of_mini_moe("on-demand"), inline_lanes, expected("mini-moe", generated=2)
        )


# --- which GPU has which module ---------------------------------------------------------------------------------------


def divided(family: str = "deepseek_v3", **changes: Any) -> tuple[Any, Division]:
    loaded = build(family, **changes)
    middle = len(loaded.layers) // 2
    blocks = [LayerBlock(0, middle), LayerBlock(middle, len(loaded.layers))]
    return loaded, division_of(loaded.model, loaded.layers, blocks)


def test_dense_layers_are_on_the_first_gpu_and_norm_and_head_on_the_last() -> None:
    loaded, division = divided()
    first, second = division.decoders
    stack = list(loaded.model.model.layers)
    assert first + second == stack
    assert any(loaded.layers[len(loaded.layers) // 2].block is part for part in second[0].modules())
    assert division.after == [loaded.model.lm_head, loaded.model.model.norm]


def test_modules_are_on_their_devices_in_the_block_and_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, division = divided()
    moved: list[tuple[Any, str]] = []
    monkeypatch.setattr(divided_model, "move", lambda module, device: moved.append((module, str(device))))
    with on_devices(division, [torch.device("cuda", 0), torch.device("cuda", 1)]):
        there = [*division.decoders[1], *division.after]
        assert moved == [(module, "cuda:1") for module in there]
        moved.clear()
    assert moved == [(module, "cuda:0") for module in reversed(there)]
    with on_devices(division, [torch.device("cpu")] * 2):
        assert len(moved) == len(there), "lanes of the host have one memory"


def test_a_head_that_shares_the_embedding_has_a_copy_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, division = divided(tie_word_embeddings=True)
    monkeypatch.setattr(divided_model, "move", lambda module, device: None)
    embedding = loaded.model.get_input_embeddings().weight
    assert loaded.model.lm_head.weight is embedding
    with on_devices(division, [torch.device("cuda", 0), torch.device("cuda", 1)]):
        assert loaded.model.lm_head.weight is not embedding
        assert torch.equal(loaded.model.lm_head.weight, embedding)
    assert loaded.model.lm_head.weight is embedding


def test_what_else_a_decoder_layer_is_given_is_copied_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask, and rotations in a tuple, to a device that is not the first's; hidden states are where they belong."""
    monkeypatch.setattr(live_cards, "Boundary", lambda *given: None)
    cards: Any = [card_on("cpu"), card_on("meta")]
    unused: Any = None
    live = LiveCards(cards, unused, unused, unused)
    hidden, mask, rotations = torch.zeros(1, 2, 4), torch.ones(2), (torch.ones(3), torch.ones(3))
    entering = partial(live._entering, 1, False, nn.Identity())
    (same, there), kept = entering((hidden, mask), {"rotations": rotations, "past": None, "mask": mask})
    assert (same is hidden, kept["mask"] is there, kept["past"]) == (True, True, None)
    assert {str(part.device) for part in (there, *kept["rotations"])} == {"meta"}
    live.end_pass(torch.zeros(1, 1))
    (_, anew), _ = entering((hidden, mask), {})
    assert anew is not there, "what the first GPU has made since is another"


def card_on(device: str) -> SimpleNamespace:
    machine = SimpleNamespace(device=torch.device(device))
    executor = SimpleNamespace(machine=machine, end_step=lambda: None)
    return SimpleNamespace(executor=executor, block=LayerBlock(0, 1), bring_chosen=lambda chosen: chosen)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def left(inline_lanes: HostLanes) -> Iterator[None]:
    """What is refused leaves a model that runs."""
    yield
    assert_says_the_same(hosted("mixtral"), request("on-demand", 4), inline_lanes, expected("mixtral"))


def test_forecasts_across_gpus_are_in_no_file(tmp_path: Path, inline_lanes: HostLanes) -> None:
    asked = replace(of_mini_moe("hybrimoe"), trace=tmp_path / "trace.safetensors")
    with pytest.raises(RefusedError, match=r"'hybrimoe' on 2 GPUs: expected no trace to write"):
        generate_hosted(hosted("mini-moe"), asked, inline_lanes)
    assert generate_hosted(hosted("mini-moe"), replace(asked, scenario=asked.scenario.with_(policy="fiddler")),
                           inline_lanes).trace.forecasts == {}
    assert (tmp_path / "trace.safetensors").exists()


def test_gpus_that_share_a_disk(inline_lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match="simulated, not run, as GPUs above a disk"):
        generate_hosted(hosted("mini-moe"), of_mini_moe("on-demand", host_expert_gb=0.003, disk="nvme-4x4"),
                        inline_lanes)


@pytest.mark.usefixtures("left")
def test_hidden_states_of_another_form(inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hosted("mixtral")
    layer = model.loaded.model.model.layers[2]
    handle = layer.register_forward_pre_hook(lambda _, args: (args[0].double(), *args[1:]))
    try:
        with pytest.raises(RefusedError, match=r"hidden states in torch.float32.*got torch.float64"):
            generate_hosted(model, on_cards(request("on-demand", 4)), inline_lanes)
    finally:
        handle.remove()


def test_gpus_that_compute_a_layer_together(inline_lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match="simulated, not run, as GPUs that compute a layer together"):
        generate_hosted(hosted("mini-moe"), of_mini_moe("on-demand", split_mode="expert"), inline_lanes)
