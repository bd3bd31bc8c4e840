"""DAOP: who changes places for a prompt, what is predicted, what degrades gracefully; by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from policies.calibration import Calibration
from policies.mechanism.session import Session
from policies.mechanism.views import (
    Commitment,
    ExpertId,
    Forecast,
    LayerInput,
    LayerView,
    Phase,
    ResidencyView,
    Routing,
    Swap,
)
from policies.papers.daop import NEEDS, AfterSwaps, PredictingRouter, PromptSwapCache
from policies.parts.assigners import ResidentOrCpu
from policies.protocols import Budget
from policies.registry import BuildContext, compose
from policies.testing.cache_laws import EXPERTS, CacheLaws, CacheScenario
from tests.kit.depth import examples
from tests.kit.views import Placed, costs, pass_through, view
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import worlds
from trilane.testing.work_conservation import law_5_background_copies
from trilane.testing.worlds import World, play, toy_calibration

COST = costs((5,) * 40, range(10, 410, 10), copy_ns=100)
PRINTED, CODED = {"rule": "printed"}, {"rule": "coded"}


class TestPromptSwapCacheLaws(CacheLaws):
    declines = True

    def fresh(self, scenario: CacheScenario) -> PromptSwapCache:
        return PromptSwapCache(EXPERTS, 3, retry=True)


# --- the initial placement --------------------------------------------------------------------------------------------


def test_who_is_used_in_decode_is_placed_not_who_is_used_in_prompts() -> None:
    """Two layers of three experts, two slots each; a fifth for the best runner-up (2 of layer 1: 1/5 against none)."""
    decode = np.array([[[1, 0, 9], [5, 3, 2]]])
    prompt = np.array([[[0, 90, 0], [0, 0, 90]]])
    calibration = Calibration("toy", decode + prompt, decode, np.zeros((0, 2, 1), np.int16))
    context = BuildContext("toy", 3, 2, calibration=calibration)
    for name in ("daop", "daop@impl"):
        placement = compose(name, context=context).placement
        for room, residents in ((40, ((0, 2), (0, 1))), (50, ((0, 2), (0, 1, 2)))):
            assert placement.place(Budget(3, (10, 10), room, calibration.popularity)).residents == residents


# --- swaps for the prompt ---------------------------------------------------------------------------------------------


def swaps(
    workload: Mapping[int, int], resident: Sequence[int], *, most: int = 4, phase: Phase = "prefill", **rule: Any
) -> list[tuple[int, int]]:
    """(incoming, outgoing) of a layer of eight experts."""
    cache = PromptSwapCache(8, most, **rule)
    for expert in resident:
        cache.admitted(ExpertId(0, expert), 0)
    asked = cache.swaps(view(workload, COST, phase=phase, resident=(resident,)), "routed")
    return [(new.expert, old.expert) for new, old in asked]


def test_the_busiest_on_the_cpu_for_the_idlest_on_the_gpu() -> None:
    # On the CPU by tokens 5 (9), 4 (7), 6 (2), 7 (0); on the GPU from the idlest 3 (0), 1 (1), 0 (3), 2 (8).
    workload = {0: 3, 1: 1, 2: 8, 4: 7, 5: 9, 6: 2}
    assert swaps(workload, (0, 1, 2, 3)) == [(5, 3), (4, 1)], "2 < 1.05 x 3, 0 < 1.05 x 8"
    assert swaps(workload, (0, 1, 2, 3), most=1) == [(5, 3)]
    assert swaps(workload, (0, 1, 2, 3), phase="decode") == []


def test_a_shorter_side_ends_the_pairs_and_ties_go_to_the_lower_id() -> None:
    assert swaps({4: 5, 6: 5, 7: 5}, (0,)) == [(4, 0)]
    assert swaps({4: 5, 6: 5, 7: 5}, (1, 0)) == [(4, 0), (6, 1)]
    assert swaps({4: 5}, ()) == []


@pytest.mark.parametrize(("rule", "hot", "cold", "swapped"), [
    ({}, 21, 20, True), (PRINTED, 21, 20, True), (CODED, 21, 20, False),  # exactly 1.05
    ({}, 22, 20, True), (PRINTED, 22, 20, True), (CODED, 22, 20, True),
    ({}, 20, 20, False), (PRINTED, 20, 20, False), (CODED, 20, 20, False),
    ({}, 1, 0, True), (PRINTED, 1, 0, True), (CODED, 1, 0, True),
    ({}, 0, 0, False), (PRINTED, 0, 0, True), (CODED, 0, 0, False),  # nobody uses either of them
])
def test_the_threshold(rule: dict[str, Any], hot: int, cold: int, swapped: bool) -> None:
    workload = {e: tokens for e, tokens in ((0, cold), (1, hot)) if tokens}
    assert swaps(workload, (0,), most=1, **rule) == ([(1, 0)] if swapped else [])


def test_as_printed_unused_experts_move_too() -> None:
    assert swaps({4: 5}, (0, 1, 2), **PRINTED) == [(4, 0), (3, 1), (5, 2)]
    assert swaps({4: 5}, (0, 1, 2)) == [(4, 0)]


def test_what_is_on_its_way_is_not_asked_for_again() -> None:
    cache = PromptSwapCache(4, 2)
    for expert in (0, 1, 3):  # 3 has been promised the slot of somebody who has left
        cache.admitted(ExpertId(0, expert), 0)
    asked = cache.swaps(view({2: 4, 3: 9}, COST, phase="prefill", resident=((0, 1),)), "routed")
    assert [(new.expert, old.expert) for new, old in asked] == [(2, 0)]


def test_a_dropped_swap_is_asked_for_again_only_if_wanted() -> None:
    prompt = view({1: 4, 0: 2}, COST, phase="prefill", resident=((0,),))
    for wish, retry in (({}, False), ({"retry": True}, True)):
        cache = PromptSwapCache(4, 2, **wish)
        cache.admitted(ExpertId(0, 0), 0)
        asked = cache.swaps(prompt, "routed")
        assert len(asked) == 1
        assert list(cache.swaps(prompt, "layer_end")) == (list(asked) if retry else [])
        assert cache.swaps(prompt, "step_end") == ()
        cache.evicted(ExpertId(0, 0), 0)
        cache.admitted(ExpertId(0, 1), 0)
        assert list(cache.swaps(prompt, "layer_end")) == [], "it has begun"


# --- where experts run ------------------------------------------------------------------------------------------------


def test_an_expert_on_its_way_runs_on_the_cpu() -> None:
    given_view = view({0: 1, 1: 2, 2: 3}, COST, ready={0: 0, 1: 30})
    assignment = ResidentOrCpu(awaits=False).assign(given_view)
    assert (assignment.gpu, assignment.cpu, assignment.loads) == ((0,), (2, 1), ())


def test_the_released_code_loads_for_a_prompt_and_not_in_decode() -> None:
    """A copy and the GPU take 105: more than 10 tokens on the CPU."""
    context = BuildContext("toy", 3, 1, calibration=toy_calibration(1, 3, 1))
    assigner = compose("daop@impl", context=context).assigner
    workload = {0: 12, 1: 10, 2: 11}
    prompt = assigner.assign(view(workload, COST, phase="prefill", ready={0: 0}))
    assert (prompt.gpu, prompt.cpu, prompt.loads) == ((0, 2), (1,), (2,))
    decode = assigner.assign(view(workload, COST, ready={0: 0}))
    assert (decode.gpu, decode.cpu, decode.loads) == ((0,), (2, 1), ())


def test_the_released_code_has_the_break_even_typed_in() -> None:
    context = BuildContext("toy", 3, 1, calibration=toy_calibration(1, 3, 1))
    assigner = compose("daop@impl", {"cpu_tokens": 2}, context=context).assigner
    prompt = assigner.assign(view({0: 1, 1: 2, 2: 3}, COST, phase="prefill", ready={0: 0}))
    assert (prompt.gpu, prompt.cpu, prompt.loads) == ((0, 2), (1,), (2,))


def test_the_released_code_runs_who_is_swapped_in_on_the_gpu_and_loads_it_last() -> None:
    """4 and 3 (5 and 4 tokens, too few to be loaded for themselves) come for 0 and 1; 2 is worth its load."""
    cache = PromptSwapCache(6, 2, rule="coded", retry=True)
    for expert in (0, 1):
        cache.admitted(ExpertId(0, expert), 0)
    prompt = view({0: 1, 2: 12, 3: 4, 4: 5, 5: 3}, COST, phase="prefill", ready={0: 0}, resident=((0, 1),))
    cache.requested = [Swap(ExpertId(0, 4), ExpertId(0, 1)), Swap(ExpertId(0, 3), ExpertId(0, 0))]
    plan = AfterSwaps(cache).assign(prompt)
    assert (plan.gpu, plan.cpu, plan.loads) == ((0, 2, 4, 3), (5,), (2, 4, 3))


@pytest.mark.parametrize(("most_swaps", "experts", "slots"), [(8, 64, 8), (8, 8, 4), (0, 8, 1), (8, 1, 1)])
def test_the_released_code_has_a_staging_slot_for_every_swap(most_swaps: int, experts: int, slots: int) -> None:
    context = BuildContext("toy", experts, 1, calibration=toy_calibration(1, experts, 1))
    built = compose("daop@impl", {"most_swaps": most_swaps}, context=context)
    assert (built.demand_slots, built.parameters["demand_slots"]) == (slots, slots)
    assert compose("daop@impl", {"demand_slots": 3}, context=context).demand_slots == 3


def test_who_is_swapped_in_is_copied_once() -> None:
    """Of eight experts 0 to 3 are resident, and used: their slots are taken over when the layer ends."""
    context = BuildContext("toy", 8, 1, calibration=toy_calibration(1, 8, 1))
    policy = replace(compose("daop@impl", context=context), placement=Placed((0, 1, 2, 3)))
    it = Session(policy, Budget(8, (10,), 40), [COST])
    it.begin_step(0)
    routing = Routing(tuple(range(8)), (1, 2, 1, 1, 9, 8, 3, 2), [(0,)] * 27, [(1.0,)] * 27)
    plan = it.plan_layer(LayerInput(0, 0, "prefill", routing))
    assert [(new.expert, old.expert) for new, old in plan.swaps] == [(4, 0), (5, 2), (6, 3)], "2 < 1.05 x 2"
    assert (plan.loads, plan.cpu) == ((4, 5, 6), (7,))
    assert [pass_through(it).expert for _ in plan.loads] == [4, 5, 6]
    updates = it.end_layer()
    assert (updates.queued, len(updates.adopted)) == ((), 3)
    assert it.next_copy() is None
    assert it.residency.resident[0] == {1, 4, 5, 6}


# --- prediction and graceful degradation ------------------------------------------------------------------------------


def at_layer_0(tokens: int, k: int, resident: Sequence[int], phase: Phase = "decode") -> LayerView:
    """What a router sees of layer 0; ``resident`` in layer 1."""
    routing = Routing(tuple(range(k)), (tokens,) * k, [tuple(range(k))] * tokens, [(1 / k,) * k] * tokens)
    seen = view(dict.fromkeys(range(k), tokens), COST, phase=phase)
    return seen._replace(routing=routing, residency=ResidencyView([(), resident, ()], [()] * 3))


def committed(
    *ranked: Sequence[int],
    k: int,
    resident: Sequence[int],
    scores: Sequence[Sequence[float]] = (),
    degrade: bool = True,
) -> Commitment:
    forecast = Forecast(1, "gate", (), (), ranked, scores)
    commit = PredictingRouter(degrade).commit(at_layer_0(len(ranked), k, resident), [forecast])
    assert commit is not None
    return commit


@pytest.mark.parametrize(("resident", "selected", "ahead"), [
    ((3, 1), [3, 1], ()),
    ((3, 0), [3, 1], (1,)),  # one on the CPU stays
    ((1, 0), [3, 1], (3,)),
    ((0, 2), [3, 0], (3,)),  # both: the lower-scored 1 gives way to the next best on the GPU
    ((2,), [3, 2], (3,)),
    ((), [3, 1], (3, 1)),  # nobody to take
    ((4,), [3, 1], (3, 1)),  # the forecast does not name 4
])
def test_two_predicted_experts_on_the_cpu(resident: Sequence[int], selected: list[int], ahead: tuple[int, ...]) -> None:
    commit = committed((3, 1, 0, 2), k=2, resident=resident)
    assert list(commit.routing.token_ids[0]) == selected
    assert commit.routing.token_weights == [[0.5, 0.5]]
    assert commit.routing.active == tuple(sorted(selected))
    assert sorted(commit.precompute) == sorted(ahead)


def test_more_than_two_keep_the_best_of_those_on_the_cpu() -> None:
    ranked = (5, 4, 3, 2, 1, 0)
    assert list(committed(ranked, k=4, resident=(4, 1, 0)).routing.token_ids[0]) == [5, 4, 1, 0]
    assert list(committed(ranked, k=4, resident=(4, 0)).routing.token_ids[0]) == [5, 4, 3, 0], "2 before 3"
    assert list(committed(ranked, k=4, resident=(4, 0), degrade=False).routing.token_ids[0]) == [5, 4, 3, 2]


def test_residents_that_the_forecast_does_not_name_follow_the_most_popular_first() -> None:
    """With the least score that is known."""
    router = PredictingRouter(popularity=[(), (0, 7, 3, 4, 6, 5, 2, 1)])
    forecast = Forecast(1, "gate", (), (), [(5, 4, 3, 2, 1, 0)], [(0.3, 0.2, 0.2, 0.1, 0.1, 0.1)])
    commit = router.commit(at_layer_0(1, 4, (6, 7, 1)), [forecast])
    assert commit is not None
    assert list(commit.routing.token_ids[0]) == [5, 1, 7, 6]
    assert commit.routing.token_weights == [pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6])]
    assert commit.precompute == (5,)


def test_the_policy_degrades_to_any_expert_on_the_gpu() -> None:
    activations = np.ones((1, 8, 4), np.int64) * (1, 4, 2, 3)
    calibration = Calibration("toy", activations, activations, np.zeros((0, 8, 2), np.int16))
    router = compose("daop", context=BuildContext("toy", 4, 8, calibration=calibration)).router
    assert isinstance(router, PredictingRouter)
    assert router.popularity == [[1, 3, 2, 0]] * 8


def test_weights_are_the_scores_of_the_final_selection() -> None:
    commit = committed((3, 1, 0, 2), k=2, resident=(0,), scores=[(0.5, 0.25, 0.125, 0.125)])
    assert list(commit.routing.token_ids[0]) == [3, 0]
    assert commit.routing.token_weights == [[0.8, 0.2]]


def test_a_batch_degrades_token_by_token_and_computes_its_union_ahead() -> None:
    commit = committed((3, 1, 0, 2), (1, 0, 2, 3), (2, 3, 0, 1), k=2, resident=(0,))
    assert commit.routing == Routing(
        (0, 1, 2, 3), (3, 1, 1, 1), [[3, 0], (1, 0), [2, 0]], [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    )
    assert commit.precompute == (1, 2, 3)


def test_nothing_is_predicted_for_a_prompt_or_without_a_forecast() -> None:
    forecast = Forecast(1, "gate", (), (), [(1, 0, 2)])
    assert PredictingRouter().commit(at_layer_0(1, 2, (), "prefill"), [forecast]) is None
    assert PredictingRouter().commit(at_layer_0(1, 2, ()), []) is None


@pytest.mark.parametrize(("name", "predicted"), [("daop", {4, 5, 6, 7}), ("daop@impl", {5, 6, 7})])
def test_blocks_1_to_4_route_themselves(name: str, predicted: set[int]) -> None:
    """Counted from 0, layers 4 on are predicted; the released code begins one layer later."""
    activations = np.ones((1, 8, 4), np.int64)
    calibration = Calibration("toy", activations, activations, np.zeros((0, 8, 2), np.int16))
    needs = compose(name, context=BuildContext("toy", 4, 8, calibration=calibration)).needs
    assert (needs.forecasts, needs.forecast_layers, needs.forecast_phases) == (
        (("gate", 1),), {"gate": predicted}, ("decode",),
    )


# --- laws, where every layer but the first is predicted ---------------------------------------------------------------


@settings(max_examples=examples(50), derandomize=True, suppress_health_check=list(HealthCheck))
@given(worlds(["daop", "daop@impl"], min_decode=1))
def test_laws_1_to_5_and_12_hold_under_prediction(world: World) -> None:
    """The registry's worlds have fewer layers than DAOP leaves to their own gates."""
    for degrade in (True, False):
        played = play(world, {"router": PredictingRouter(degrade), "needs": replace(NEEDS, forecast_layers={})})
        check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
        law_5_background_copies(played.spans, played.session)
        decode = [(step, layer) for step, layer in played.session.plans if played.demand[step].phase == "decode"]
        gated = set(zip(played.spans.step, played.spans.layer, played.spans.kind, strict=True))
        assert all(((*place, "gate") in gated) == (place[1] == 0) for place in decode), "only layer 0 is routed"
