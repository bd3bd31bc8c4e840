"""Experts that are divided among several GPUs: owners, memory, what is refused, and what peers are good for."""

from __future__ import annotations

import numpy as np
import pytest

from policies.calibration import Calibration
from policies.mechanism.views import Forecast, Routing
from sim.runs.demand import StepDemand
from sim.runs.expert_shares import calibration_of_share, counts_of, dealt, demand_of_share
from sim.runs.memory import BudgetError
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate

SHORT = Scenario(policy="best-exact", gpu_memory_gb=8, prompt_tokens=8, generated_tokens=8)
TWO = SHORT.with_(gpus=2, split_mode="expert")
PAIR = "2x-rtx-3090+ddr4-3200"


@pytest.mark.parametrize(("experts", "parts", "counts"), [
    (64, (1.0, 1.0), [32, 32]), (64, (1.0, 2.0), [21, 43]), (3, (9.0, 1.0), [2, 1]), (4, (100.0, 1.0, 1.0), [2, 1, 1]),
    (8, (1.0,), [8]), (2, (1.0, 1e6), [1, 1]),
])
def test_every_gpu_has_one_expert_at_least_and_all_are_given(
    experts: int, parts: tuple[float, ...], counts: list[int]
) -> None:
    assert counts_of(experts, parts) == counts


def test_experts_are_dealt_out_evenly_in_an_order_and_each_has_one_owner() -> None:
    """By number, and by heat: the most used to the first GPU, the next one to the second, and so on."""
    striped = dealt([3, 3], np.arange(6)[None])
    assert [share.own.tolist() for share in striped] == [[[0, 2, 4]], [[1, 3, 5]]]
    by_heat = dealt([2, 4], np.array([[5, 4, 3, 2, 1, 0]]))
    assert [share.own.tolist() for share in by_heat] == [[[1, 4]], [[0, 2, 3, 5]]]


def test_a_gpu_sees_its_own_experts_under_numbers_of_its_own() -> None:
    forecast = Forecast(0, "gate", (3, 2, 1), (3, 2, 1))
    scores = np.arange(4.0).reshape(1, 1, 4)
    demand = StepDemand(0, "decode", 3, (3,), (Routing((0, 1, 3), (1, 2, 3)),), ((forecast,),), scores)
    [step] = demand_of_share([demand], dealt([2, 2], np.arange(4)[None])[1])  # experts 1 and 3
    assert step.routings == (Routing((0, 1), (2, 3)),)
    assert step.forecasts == ((Forecast(0, "gate", (1, 0), (3, 1)),),)
    assert step.scores is not None
    assert step.scores.tolist() == [[[1.0, 3.0]]]


def test_the_counts_of_a_calibration_are_those_of_its_own_experts() -> None:
    counts = np.arange(16).reshape(2, 2, 4)
    whole = Calibration("toy", counts, counts * 10, np.zeros((3, 2, 1), np.int16), {})
    own = calibration_of_share(whole, dealt([2, 2], np.array([[0, 1, 2, 3], [3, 2, 0, 1]]))[1])  # 1, 3; and 1, 2
    assert own.activations.tolist() == [[[1, 3], [5, 6]], [[9, 11], [13, 14]]]
    assert own.decode_activations.tolist() == [[[10, 30], [50, 60]], [[90, 110], [130, 140]]]
    assert len(own.decode_ids) == 0


def test_peers_copy_ahead_and_swap_as_the_first_gpu_does() -> None:
    spans = simulate(TWO.with_(policy="dali")).spans
    for link in ("h2d", "h2d1"):
        assert {"demand", "prefetch", "swap"} <= set(spans[spans.lane == link].kind), link


def test_a_step_waits_for_swaps_to_every_gpu() -> None:
    spans = simulate(TWO.with_(policy="strata")).spans
    swaps = spans[(spans.kind == "swap") & (spans.lane == "h2d1")]
    assert len(swaps)
    for begun_ns in spans[(spans.kind == "launch") & (spans.layer == 0)].groupby("step").start_ns.min():
        assert not ((swaps.start_ns <= begun_ns) & (begun_ns < swaps.end_ns)).any()


def test_the_first_gpu_has_all_else_and_fewer_experts() -> None:
    prepared = prepare(TWO)
    first, peer = prepared.card_memory
    assert (peer.non_expert_bytes, peer.kv_bytes) == (0, 0) < (first.non_expert_bytes, first.kv_bytes)
    experts = [card.experts_of(prepared.shape) for card in prepared.cards]
    assert experts == counts_of(64, [8e9 - plan.fixed_bytes for plan in (first, peer)])
    assert experts[0] < experts[1]
    assert all(plan.fixed_bytes + plan.cache_bytes <= 8e9 for plan in (first, peer))
    assert [card.experts_of(prepared.shape) for card in prepare(TWO.with_(layer_split=(1, 1))).cards] == [32, 32]


def test_the_most_used_experts_are_dealt_out_first() -> None:
    prepared = prepare(TWO.with_(expert_owners="heat", layer_split=(1, 1)))
    counts = prepared.calibrated()._calibration
    assert counts is not None
    for card in prepared.cards:
        assert card.share is not None
        held = np.take_along_axis(counts.popularity, card.share.own, axis=1).sum(axis=1)
        assert abs(held - 0.5).max() < 0.12  # of each layer's tokens
    both = [card.share.own for card in prepared.cards if card.share]
    assert np.array_equal(np.sort(np.concatenate(both, axis=1)), np.tile(np.arange(64), (26, 1)))


@pytest.mark.parametrize("policy", ["llama.cpp", "on-demand", "dali", "best-exact", "oracle"])
def test_peers_hold_more_experts_and_steps_are_quicker(policy: str) -> None:
    one, two, three = (
        simulate(SHORT.with_(policy=policy, gpus=gpus, split_mode="expert")) for gpus in (None, 2, 3)
    )
    times = [run.metrics.tpot_ms or 0.0 for run in (one, two, three)]
    assert times == sorted(times, reverse=True)
    assert one.spans.equals(simulate(SHORT.with_(policy=policy)).spans)
    assert set(two.spans[two.spans.kind == "partial_sum"].lane) == {"gpu1"}
    assert {"gpu1", "h2d1", "d2h1"} <= two.metrics.busy_share.keys()
    row = two.to_dict()
    assert row["lower_bound_tpot_ms"] <= row["tpot_ms"]
    assert row["stall_host_share"] < 0.05  # waits for hidden states are those of the link


def test_a_link_between_them_spares_the_way_over_the_host() -> None:
    by_host, p2p, nvlink = (
        simulate(TWO.with_(hardware=f"{PAIR}{link}", gpus=None, policy="llama.cpp")) for link in ("", "+p2p", "+nvlink")
    )
    lanes = [set(run.spans[run.spans.kind == "hand_over"].lane) for run in (by_host, p2p, nvlink)]
    assert lanes == [{"h2d", "h2d1", "d2h1"}, {"h2d", "h2d1"}, {"peer1"}]
    assert (nvlink.metrics.tpot_ms or 0.0) < (by_host.metrics.tpot_ms or 0.0)


@pytest.mark.parametrize(("changes", "message"), [
    ({"policy": "moe-infinity"}, "split_mode expert is not simulated with policy 'moe-infinity', which looks"),
    ({"policy": "adapmoe"}, "policy 'adapmoe', which looks at single tokens; split_mode layer is"),
    ({"disk": "nvme-4x4", "host_expert_gb": 8}, "a disk: expected host_expert_gb null"),
    ({"engine": "strata"}, "engine 'strata', which does a layer's work in turns"),
    ({"policy": "daop"}, "not simulated with daop, which changes the routing"),
    ({"draft_tokens": 2, "draft_acceptance": 0.8}, "not simulated with drafts"),
    ({"layer_split": (1, 2, 3)}, "layer_split: expected 2 proportions"),
    ({"split_mode": "tensor"}, "split_mode: expected"),
    ({"expert_owners": "hottest"}, "expert_owners: expected"),
])
def test_what_is_not_simulated_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        simulate(TWO.with_(**changes))


def test_a_share_or_a_model_that_a_gpu_has_no_room_for_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"GPU 0: a cached share of 0.9 takes"):
        simulate(TWO.with_(cached_share=0.9, gpu_memory_gb=None, layer_split=(50, 1), hardware_overrides={
            "gpu.memory_bytes": 20e9}))
    with pytest.raises(BudgetError, match="GPU 0 lacks"):
        simulate(TWO.with_(gpu_memory_gb=3))
