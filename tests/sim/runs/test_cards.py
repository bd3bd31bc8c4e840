"""Scenarios with several GPUs: blocks of layers, memory, what is refused, and what more GPUs are good for."""

from __future__ import annotations

import pytest

from sim.machine.plausibility import HardwareError
from sim.runs.cards import blocks_of
from sim.runs.memory import BudgetError
from sim.runs.prepare import prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate

HOST = "ddr4-3200+ryzen-9-5950x"
PAIRS = ("2x-rtx-3090", "rtx-3090+rtx-3060")
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
    ({"gpus": 2, "draft_tokens": 2, "draft_acceptance": 0.8}, "not simulated with drafts"),
    ({"gpus": 2, "policy": "daop"}, "not simulated with daop, which changes the routing"),
])
def test_what_is_not_simulated_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        simulate(SHORT.with_(**changes))


@pytest.mark.parametrize("policy", ["best-exact", "llama.cpp", "moe-infinity"])
def test_gpus_share_the_hosts_memory_and_the_disk_under_it(policy: str) -> None:
    """Two GPUs have more room, so that less is read; two drives read what is read in less time."""
    above = SHORT.with_(policy=policy, disk="nvme-4x4", host_expert_gb=8)
    one, two, striped = (
        simulate(above.with_(**more)) for more in ({}, {"gpus": 2}, {"gpus": 2, "disk": "2x-nvme-4x4"})
    )
    read = [run.metrics.disk["disk_bytes_per_token"] or 0.0 for run in (one, two)]
    assert 0 < read[1] < read[0]
    assert (striped.metrics.tpot_ms or 0.0) < (two.metrics.tpot_ms or 0.0) < (one.metrics.tpot_ms or 0.0)
    assert {layer // 13 for layer in two.spans[two.spans.lane == "disk"].layer} == {0, 1}
    for run in (one, two, striped):
        assert run.to_dict()["lower_bound_tpot_ms"] <= (run.metrics.tpot_ms or 0.0)


def test_a_single_session_is_of_one_gpu() -> None:
    with pytest.raises(ScenarioError, match="gpus 2: expected 1 here; several are for simulations and for replays"):
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


def test_a_machine_named_with_two_equal_cards_is_one_with_gpus_2() -> None:
    named = simulate(SHORT.with_(hardware=f"2x-rtx-3090+{HOST}"))
    counted = simulate(SHORT.with_(hardware=f"rtx-3090+{HOST}", gpus=2))
    assert named.scenario.gpus == 2
    assert prepare(SHORT.with_(hardware=f"2x-rtx-3090+{HOST}", layer_split=(1, 2))).cards[0].block.layers == 9
    assert named.spans.equals(counted.spans)
    assert named.to_dict() == counted.to_dict()


def test_unequal_cards_have_memory_rates_and_slots_of_their_own() -> None:
    """The quicker card is the first one, and layers are divided by what memory is not kept free."""
    scenario = SHORT.with_(gpu_memory_gb=None, hardware=f"rtx-3060+2x-rtx-3090+{HOST}+pcie-3x4+pcie-4x8+pcie-4x16")
    first, second, third = prepare(scenario).cards
    assert [card.block.layers for card in (first, second, third)] == [11, 10, 5]
    assert third.hardware.gpu.name == "RTX 3060 12GB"
    assert first.costs.experts[0].copy_ns * 3 < third.costs.experts[0].copy_ns
    assert first.costs.experts[0].gpu_ns[8] < third.costs.experts[0].gpu_ns[8]
    assert first.costs.experts[0].cpu_ns == third.costs.experts[0].cpu_ns
    own = [plan.gpu_memory_bytes for plan in prepare(scenario).card_memory]
    assert own == [card.hardware.gpu.memory_bytes for card in (first, second, third)]


def expert_ns(run: Run, lane: str) -> int:
    spans = run.spans[(run.spans.lane == lane) & (run.spans.kind == "expert")]
    return int((spans.end_ns - spans.start_ns).sum())


def test_a_slower_card_is_slower_in_its_own_layers_alone() -> None:
    shared = SHORT.with_(gpu_memory_gb=None, cached_share=0.25, layer_split=(1, 1), gpus=2, policy="on-demand")
    equal, slower = (simulate(shared.with_(hardware=f"{cards}+{HOST}")) for cards in PAIRS)
    assert expert_ns(slower, "gpu") == expert_ns(equal, "gpu")
    assert expert_ns(slower, "gpu1") > 1.5 * expert_ns(equal, "gpu1")
    bounds = [run.to_dict()["lower_bound_tpot_ms"] for run in (equal, slower)]
    assert bounds[0] <= bounds[1] <= (slower.metrics.tpot_ms or 0.0)


@pytest.mark.parametrize(("changes", "message"), [
    ({"gpus": 3}, r"gpus: expected 2, as rtx-3090\+rtx-3060.* has, or null, got 3"),
    ({"gpus": 1}, "gpus: expected 2, .*, got 1"),
    ({"hardware": f"5x-rtx-3090+{HOST}"}, r"hardware 5x-rtx-3090\+.*: expected at most 4 GPUs, got 5"),
    ({"layer_split": (1, 1, 1)}, "layer_split: expected 2 proportions, one for each of gpus, got 3"),
    ({"hardware": f"rtx-3090+rtx-3060+{HOST}+pcie-9x99"}, "hardware 'rtx-3090.rtx-3060.*': PCIe slot '9x99'"),
    ({"hardware": f"rtx-3090+gb10+{HOST}"}, "has no memory of its own|comes with its memory"),
])
def test_other_numbers_of_cards_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises((ScenarioError, HardwareError), match=message):
        simulate(SHORT.with_(**{"hardware": f"rtx-3090+rtx-3060+{HOST}", **changes}))


def test_numbers_that_replace_the_machines_are_those_of_each_card() -> None:
    cards = prepare(SHORT.with_(hardware=f"rtx-3090+rtx-3060+{HOST}", hardware_overrides={"gpu.kernel_ns": 9000})).cards
    assert [card.hardware.gpu.kernel_ns for card in cards] == [9000, 9000]
    assert [card.hardware.gpu.memory_bytes for card in cards] == [8 * 10**9] * 2


@pytest.mark.parametrize("policy", ["llama.cpp", "on-demand", "dali", "moe-infinity", "oracle"])
def test_policies_run_on_three_gpus_without_change(policy: str) -> None:
    run = simulate(SHORT.with_(policy=policy, gpus=3))
    layers = {lane: set(run.spans[run.spans.lane == lane].layer) for lane in ("gpu", "gpu1", "gpu2")}
    assert layers == {"gpu": set(range(9)), "gpu1": set(range(9, 17)), "gpu2": {-1, *range(17, 26)}}


@pytest.mark.parametrize(("slots", "word", "rate", "lane"), [
    ("", "+p2p", 25e9, "h2d1"), ("+pcie-4x8", "+p2p", 12.5e9, "h2d1"),
    ("+pcie-4x16+pcie-3x4", "+p2p", 3.275e9, "h2d1"), ("", "+nvlink", 56.25e9, "peer1"),
])
def test_a_link_between_gpus_spares_the_way_over_the_host(slots: str, word: str, rate: float, lane: str) -> None:
    """Over PCIe it has the rate of the slower slot; in decode it is a matter of microseconds."""
    linked, unlinked = (SHORT.with_(hardware=f"2x-rtx-3090+{HOST}{slots}{link}") for link in (word, ""))
    peer = prepare(linked).cards[1].costs.peer
    assert peer is not None
    assert (peer.bytes_per_s, peer.ns(0)) == (rate, 5000)
    one, by_host = simulate(linked), simulate(unlinked)
    assert set(one.spans[one.spans.kind == "hand_over"].lane) == {lane}
    assert set(by_host.spans[by_host.spans.kind == "hand_over"].lane) == {"d2h", "h2d1"}
    assert 0.99 < (one.metrics.tpot_ms or 0.0) / (by_host.metrics.tpot_ms or 0.0) < 1.01


@pytest.mark.parametrize(("name", "message"), [
    (f"3x-rtx-3090+{HOST}+nvlink", "nvlink is between two equal cards"),
    (f"rtx-3090+rtx-3060+{HOST}+nvlink", "nvlink is between two equal cards"),
    (f"2x-rtx-3090+{HOST}+p2p+nvlink", "expected one of p2p, nvlink"),
    (f"rtx-3090+{HOST}+p2p", "expected several GPUs with p2p, such as 2x-rtx-3090"),
])
def test_links_that_are_not_are_refused(name: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        prepare(SHORT.with_(hardware=name))


def test_the_score_of_experts_in_use_does_not_make_them_leave_the_memory_that_gpus_share() -> None:
    made = simulate(Scenario(
        policy="best-exact", gpu_memory_gb=8, gpus=2, disk="nvme-4x4", host_expert_gb=12, generated_tokens=8
    ))
    assert {"read", "read_ahead"} <= set(made.spans["kind"])
