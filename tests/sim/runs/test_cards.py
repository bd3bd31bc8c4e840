"""Scenarios with several GPUs: blocks of layers, memory, what is refused, and what more GPUs are good for."""

from __future__ import annotations

import pytest

from sim.runs.cards import blocks_of
from sim.runs.memory import BudgetError
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate

SHORT = Scenario(policy="best-exact", gpu_memory_gb=8, prompt_tokens=8, generated_tokens=8)


@pytest.mark.parametrize(("gpus", "split", "layers", "ends"), [
    (1, None, 26, [26]), (2, None, 26, [13, 26]), (3, None, 26, [9, 17, 26]), (2, (1.0, 2.0), 26, [9, 26]),
    (3, (100.0, 1.0, 1.0), 5, [3, 4, 5]), (4, (1.0, 1.0, 1.0, 900.0), 4, [1, 2, 3, 4]),
])
def test_blocks_are_contiguous_in_proportion_and_never_empty(
    gpus: int, split: tuple[float, ...] | None, layers: int, ends: list[int]
) -> None:
    blocks = blocks_of(Scenario(gpus=gpus, layer_split=split), layers)
    assert [block.end for block in blocks] == ends
    assert [block.first for block in blocks] == [0, *ends[:-1]]


def test_more_gpus_than_layers_are_refused() -> None:
    with pytest.raises(ScenarioError, match="gpus 3: expected at most 2, the model's MoE layers"):
        blocks_of(Scenario(gpus=3), 2)


@pytest.mark.parametrize(("changes", "message"), [
    ({"gpus": 5}, "gpus"), ({"gpus": 2, "layer_split": (1, 2, 3)}, "layer_split: expected 2 proportions"),
    ({"gpus": 2, "layer_split": (1e308, 1e308)}, r"layer_split\[0\]: expected a number above 0 and <= 1e"),
    ({"gpus": 2, "hardware": "m4-max"}, "not simulated with m4-max: expected GPUs that have their own memory"),
    ({"gpus": 2, "disk": "nvme-4x4", "host_expert_gb": 8}, "not simulated with experts on a disk"),
    ({"gpus": 2, "draft_tokens": 2, "draft_acceptance": 0.8}, "not simulated with drafts"),
    ({"gpus": 2, "policy": "daop"}, "not simulated with daop, which changes the routing"),
])
def test_what_is_not_simulated_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        simulate(SHORT.with_(**changes))


def test_several_gpus_are_not_measured() -> None:
    with pytest.raises(ScenarioError, match="several GPUs are simulated, not measured"):
        prepare(SHORT.with_(gpus=2)).session()


def test_each_gpu_has_memory_of_its_own() -> None:
    one, two = (prepare(SHORT.with_(gpus=gpus)).memory for gpus in (1, 2))
    assert two.gpu_memory_bytes == 2 * one.gpu_memory_bytes
    assert two.non_expert_bytes == pytest.approx(one.non_expert_bytes, abs=2)
    assert two.slots > 2 * one.slots  # the weights that every token needs are divided
    shared = prepare(SHORT.with_(gpus=2, cached_share=0.25, gpu_memory_gb=None)).memory
    assert shared.slots == 2 * 208  # a quarter of 13 layers of 64


def test_a_share_that_one_of_the_gpus_has_no_room_for_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"the GPU of layers 0 to 22: a cached share of 0.95 takes"):
        simulate(SHORT.with_(gpus=2, layer_split=(8, 1), cached_share=0.95, gpu_memory_gb=None))


def test_a_second_gpu_is_room_and_a_link_and_its_lanes_are_in_the_metrics() -> None:
    one, two = (simulate(SHORT.with_(gpus=gpus)) for gpus in (1, 2))
    assert (two.metrics.tpot_ms or 0.0) < (one.metrics.tpot_ms or 0.0)
    assert (two.metrics.decode_resident_hit_rate or 0.0) > (one.metrics.decode_resident_hit_rate or 0.0)
    assert {"gpu1", "h2d1", "d2h1"} <= two.metrics.busy_share.keys()
    assert "gpu1" not in one.metrics.busy_share
    row = two.to_dict()
    assert row["lower_bound_tpot_ms"] <= row["tpot_ms"]
    assert row["energy_j_per_token"] > 0


@pytest.mark.parametrize("policy", ["llama.cpp", "on-demand", "dali", "moe-infinity", "oracle"])
def test_policies_run_on_three_gpus_without_change(policy: str) -> None:
    run = simulate(SHORT.with_(policy=policy, gpus=3))
    layers = {lane: set(run.spans[run.spans.lane == lane].layer) for lane in ("gpu", "gpu1", "gpu2")}
    assert layers == {"gpu": set(range(9)), "gpu1": set(range(9, 17)), "gpu2": {-1, *range(17, 26)}}
