"""Strata: which missed experts are copied, the share that a start-up finds, swaps of the cache, the tail skip."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from policies.mechanism.views import INFINITE_NS, ExpertId, LayerView, Routing, Swap
from policies.papers.strata import TailSkip, share_of_link
from policies.parts.adaptive_tier import AdaptiveTier
from policies.parts.miss_share import MissShare, SettledShare, SoonerShare, copied, layer_ns
from policies.registry import BuildContext, ChoiceError, compose, system
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.views import costs, view, views
from trilane.testing.worlds import toy_calibration

# --- which misses are copied ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missed", "share", "count"), [
    (1, 0.55, 0), (2, 0.55, 1), (3, 0.55, 1), (4, 0.55, 2), (10, 0.2, 1), (10, 0.0, 0), (10, 1.0, 10),
])
def test_a_share_is_rounded_down_in_256ths(missed: int, share: float, count: int) -> None:
    """0.55 is 141 of 256; 0.2 is 51, so that 10 misses give 1.99."""
    assert copied(missed, share) == count


COSTS = costs((5,) * 4, (30, 40, 50, 60), first_cpu_ns=10, copy_ns=20)
WORKLOAD = {0: 1, 1: 2, 2: 3, 3: 1, 4: 1, 5: 1}
READY = {0: 0, 1: 0}


def test_the_missed_experts_with_the_fewest_tokens_are_copied() -> None:
    chosen = MissShare(0.5, most=16).assign(view(WORKLOAD, COSTS, ready=READY))
    assert (chosen.gpu, chosen.cpu, chosen.loads) == ((1, 0, 4, 5), (2, 3), (4, 5))
    assert MissShare(1.0, most=1).assign(view(WORKLOAD, COSTS, ready=READY)).loads == (5,)


def test_an_expert_whose_copy_is_in_flight_is_missed_and_not_copied_again() -> None:
    chosen = MissShare(0.5, most=16).assign(view(WORKLOAD, COSTS, ready={**READY, 5: 7}))
    assert (chosen.cpu, chosen.loads) == ((2, 5), (3, 4)), "two of the four missed ones, of the three that are absent"


def test_a_layer_is_as_long_as_the_longer_of_the_cpu_and_of_what_the_gpu_does_in_turn() -> None:
    cost = COSTS._replace(first_gpu_ns=3)
    assert layer_ns(cost, 13, (3, 1, 1, 1), 0) == 10 + 50 + 30 + 30 + 30
    assert layer_ns(cost, 13, (3, 1, 1, 1), 2) == max(10 + 50 + 30, 13 + 2 * 20 + 3 + 2 * 5)
    assert layer_ns(cost, 13, (3, 1, 1, 1), 4) == 13 + 4 * 20 + 3 + 4 * 5
    assert layer_ns(cost, 0, (), 0) == 0


@given(views())
def test_sooner_is_no_later_than_any_share(given_view: LayerView) -> None:
    cost = given_view.costs[0]
    chosen = SoonerShare(most=64).assign(given_view)
    absent = [e for e, ready in given_view.ready_ns.items() if ready == INFINITE_NS]
    assert set(chosen.loads) <= set(absent)
    if len(absent) == sum(ready > 0 for ready in given_view.ready_ns.values()):  # none is in flight
        workload = given_view.routing.workload()
        tokens = sorted((workload[e] for e in absent), reverse=True)
        hits = [cost.gpu_ns[workload[e]] for e in workload if e not in absent]
        hits_ns = cost.first_gpu_ns + sum(hits) if hits else 0
        best = min(layer_ns(cost, hits_ns, tokens, count) for count in range(len(tokens) + 1))
        assert layer_ns(cost, hits_ns, tokens, len(chosen.loads)) == best


# --- the share of a machine -------------------------------------------------------------------------------------------


def settled(copy_ns: int, cpu_ns: int) -> float | None:
    """The share after 2 steps of 2 layers with 10 misses each, which it has before every step after these."""
    cost = costs((1,), (cpu_ns,), copy_ns=copy_ns)
    assigner = SettledShare(0.4, most=16, probed=2)
    for step in range(3):
        for _ in range(2):
            loads = len(assigner.assign(view(dict.fromkeys(range(10), 1), cost, step=step)).loads)
            assert loads == copied(10, 0.4 if step < 2 else assigner.share or -1)
    return assigner.share


def test_the_share_balances_the_pool_and_the_link() -> None:
    """CPU (10 - m) c, GPU m (copy + 1)."""
    assert settled(copy_ns=9, cpu_ns=10) == pytest.approx(0.5)  # 5 each: 50, 50
    assert settled(copy_ns=39, cpu_ns=10) == pytest.approx(0.25)  # 2 and 8: 80, 80; 0.2 gives 1 of 10
    assert settled(copy_ns=1000, cpu_ns=10) == 0.1, "the least that a start-up tries"
    assert settled(copy_ns=1, cpu_ns=1000) == 0.6, "the most"


def test_prompts_do_not_count_as_the_first_steps() -> None:
    assigner = SettledShare(0.4, most=16, probed=1)
    for step in range(3):
        assigner.assign(view({0: 1}, COSTS, step=step, phase="prefill"))
    assert assigner.share is None


def test_the_share_before_is_less_on_slow_links() -> None:
    """0.55 from 20 GB/s on."""
    fast, slow = (COSTS._replace(expert_bytes=size, copy_ns=100) for size in (3000, 1000))
    assert share_of_link([fast] * 2) == 0.55
    assert share_of_link([slow] * 2) == pytest.approx(0.275)
    assert share_of_link([]) == 0.55


# --- swaps ------------------------------------------------------------------------------------------------------------


def after(tier: AdaptiveTier, resident: list[list[int]], *steps: list[dict[int, int]]) -> list[list[Swap]]:
    """The swaps that are asked for after each of some steps, of the workloads of each layer."""
    asked = []
    for number, layers in enumerate(steps):
        for layer, workload in enumerate(layers):
            seen = view(workload, COSTS, layer=layer, step=number, resident=resident)
            tier.observe(seen)
            assert not tier.swaps(seen, "routed")
            assert not tier.swaps(seen, "layer_end")
        asked.append([*tier.swaps(seen, "step_end")])
    return asked


def swap(layer: int, new: int, old: int) -> Swap:
    return Swap(ExpertId(layer, new), ExpertId(layer, old))


def tier(every: int = 1, most: int = 9, decay: float = 1.0) -> AdaptiveTier:
    return AdaptiveTier(every, most, decay, least=2, margin=1.5)


def test_the_most_used_absent_experts_take_the_places_of_the_least_used_residents() -> None:
    """Uses 0: 1, 1: 0; absent 2: 4, 3: 3, 4: 1. The third is below the least use, and there is no third resident."""
    assert after(tier(), [[0, 1]], [{0: 1, 2: 4, 3: 3, 4: 1}]) == [[swap(0, 2, 1), swap(0, 3, 0)]]


def test_a_swap_needs_two_uses_and_a_margin() -> None:
    assert after(tier(), [[0]], [{0: 1, 2: 2}]) == [[]], "2 is not 1.5 more than 1"
    assert after(tier(), [[0]], [{2: 1}]) == [[]], "one use"
    assert after(tier(), [[0]], [{2: 2}]) == [[swap(0, 2, 0)]]


def test_the_best_swaps_of_all_layers_are_made() -> None:
    asked = after(tier(most=2), [[0], [0], [0]], [{1: 2}, {1: 5}, {1: 4}])
    assert asked == [[swap(1, 1, 0), swap(2, 1, 0)]]


def test_a_round_comes_after_some_steps_and_lets_counts_fade() -> None:
    asked = after(tier(every=2, decay=0.5), [[0]], [{1: 1}], [{1: 1}], [{2: 1}], [{2: 1}])
    assert asked == [[], [swap(0, 1, 0)], [], [swap(0, 2, 0)]], "expert 1 has 1 use left, expert 2 has 2"


def test_prompts_are_no_uses() -> None:
    cache, seen = tier(), view({1: 9}, COSTS, phase="prefill", resident=[[0]])
    cache.observe(seen)
    assert not cache.swaps(seen, "step_end")
    assert after(cache, [[0]], [{2: 1}]) == [[]]


def test_a_layer_without_slots_has_no_swaps() -> None:
    assert after(tier(), [[]], [{1: 9}]) == [[]]


# --- the tail skip ----------------------------------------------------------------------------------------------------


def skipped(rank: int, *tokens: list[int], ready: dict[int, int], phase: Any = "decode") -> Routing:
    workload: dict[int, int] = {}
    for ids in tokens:
        for expert in ids:
            workload[expert] = workload.get(expert, 0) + 1
    plain = view(workload, COSTS, ready=ready, phase=phase)
    weights = [[0.5, 0.25, 0.15, 0.1][: len(ids)] for ids in tokens]
    return TailSkip(rank).route(
        plain._replace(routing=plain.routing._replace(token_ids=tokens, token_weights=weights))
    )


def test_missed_experts_that_every_token_ranks_low_are_left_out_with_the_other_weights_as_they_are() -> None:
    routing = skipped(2, [0, 1, 2, 3], [2, 0, 4, 1], ready={1: 0})
    assert routing.token_ids == [[0, 1, 2], [2, 0, 1]], "3 and 4 go; the second token ranks 2 first"
    assert routing.token_weights == [[0.5, 0.25, 0.15], [0.5, 0.25, 0.1]]
    assert (routing.active, routing.tokens) == ((0, 1, 2), (2, 2, 2))


def test_experts_on_the_gpu_stay_and_those_in_flight_are_missed() -> None:
    assert skipped(1, [0, 1, 2], ready={1: 0, 2: 9}).active == (0, 1)


def test_prompts_are_not_skipped() -> None:
    assert skipped(1, [0, 1, 2], ready={}, phase="prefill").active == (0, 1, 2)


def test_what_is_skipped_is_stated_as_dropped_weight() -> None:
    scenario = Scenario(
        trace="mini-deepseek", policy="strata@tail-skip", parameters={"tail_rank": 3}, cached_share=0.4, engine="graphs"
    )
    run, plain = simulate(scenario), simulate(scenario.with_(policy="strata", parameters={}))
    assert 0.05 < run.to_dict()["dropped_weight_share"] < 0.3
    assert (run.metrics.tpot_ms or 0) < (plain.metrics.tpot_ms or 0)


# --- the policy -------------------------------------------------------------------------------------------------------


def composed(**parameters: object) -> Any:
    context = BuildContext("toy", 8, 2, top_k=2, calibration=toy_calibration(2, 8, 2), costs=[COSTS] * 2)
    return compose("strata", parameters, context=context)


def test_long_steps_copy_all_that_misses() -> None:
    assigner = composed(pcie_share=0.0, stream_from_tokens=4).assigner
    assert assigner.assign(view({0: 4, 1: 3}, COSTS)).loads == ()
    assert assigner.assign(view({0: 4, 1: 4}, COSTS)).loads == (0, 1)


@pytest.mark.parametrize(("share", "kind"), [(0.3, MissShare), ("auto", SettledShare), ("sooner", SoonerShare)])
def test_a_share_is_a_number_or_found(share: object, kind: type) -> None:
    assert isinstance(composed(pcie_share=share).assigner.small, kind)


@pytest.mark.parametrize("share", [-0.1, 1.1, "never"])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(ChoiceError, match="pcie_share: expected"):
        composed(pcie_share=share)


def test_staging_has_as_many_slots_as_a_layer_may_copy() -> None:
    assert composed(most_copies=5).demand_slots == 5
    assert replace(system("strata").parameters(), most_copies=5).most_copies == 5  # type: ignore[call-arg]
