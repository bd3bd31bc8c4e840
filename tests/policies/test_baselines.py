"""Baselines that never change their mind: who is resident, and what becomes of an expert that is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, Forecast, LayerView, Phase, ResidencyView, Swap
from policies.papers.mixtral_offloading import LastExperts, SpeculativeLruCache
from policies.parts.caches import StaticCache
from policies.parts.placements import RandomPlacement
from policies.protocols import Budget, Cache, Composition, InitialPlacement
from policies.registry import BuildContext, ChoiceError, compose
from policies.testing.cache_laws import CacheLaws, CacheScenario
from tests.kit.depth import examples
from tests.kit.hand_worked import lane, lines, registered, step, told
from tests.kit.hand_worked import play as play_by_hand
from tests.kit.views import costs, view
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import worlds
from trilane.testing.worlds import World, play, toy_calibration

LAYERS, EXPERTS, TOP_K = 3, 4, 2
POPULARITY = np.array([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
FULL = (0, 1, 2, 3)
TOKENS = tuple(range(1, 101))
COST = costs(gpu_ns=(10,) * 100, cpu_ns=[40 * w for w in TOKENS], copy_ns=70)  # two tokens tie: 80 and 80


def policy(name: str, run_seed: int = 0, **parameters: object) -> Composition:
    calibration = toy_calibration(LAYERS, EXPERTS, TOP_K)
    context = BuildContext("toy", EXPERTS, LAYERS, TOP_K, seed=run_seed, calibration=calibration)
    return compose(name, parameters, context=context)


def placed(name: str, cache_bytes: int, **parameters: object) -> InitialPlacement:
    return policy(name, **parameters).placement.place(Budget(EXPERTS, (10, 10, 10), cache_bytes, POPULARITY))


def decided(name: str, layer: LayerView, **parameters: object) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """(gpu, cpu, loads)."""
    found: Assignment = policy(name, **parameters).assigner.assign(layer)
    assert found.streamed == ()
    return found.gpu, found.cpu, found.loads


def layer(workload: dict[int, int], phase: Phase = "decode") -> LayerView:
    """Expert 1 is resident."""
    return view(workload, COST, ready={1: 0}, phase=phase)


def test_naive_cpu_leaves_the_memory_empty_and_has_the_cpu_do_it_all() -> None:
    assert placed("naive-cpu", 120).residents == ((), (), ())
    assert decided("naive-cpu", view({0: 1, 3: 9}, COST, phase="prefill")) == ((), (3, 0), ())
    assert policy("naive-cpu").demand_slots == 0


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp@impl", "ktransformers@layer-wise", "layer-wise"])
def test_layers_are_whole_and_the_first_are_the_cpus(name: str) -> None:
    assert placed(name, 119) == InitialPlacement((0, 4, 4), ((), FULL, FULL))
    assert placed(name, 39).residents == ((), (), ())


@pytest.mark.parametrize("name", ["llama.cpp", "ktransformers@layer-wise", "layer-wise"])
def test_who_decides_the_same_is_charged_the_same(name: str) -> None:
    assert policy(name).decision_cost == "layer-wise"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_llama_cpp_runs_everything_where_it_lies(phase: Phase) -> None:
    assert decided("llama.cpp", layer({0: 64, 1: 1}, phase)) == ((1,), (0,), ())
    assert policy("llama.cpp").demand_slots == 0


@pytest.mark.parametrize(("pairs", "least", "on_gpu"), [
    ((31, 31), 32, False), ((32, 32), 32, True), ((1, 63), 32, True), ((1, 62), 32, False), ((1, 1), 1, True),
])
def test_llama_cpp_as_released_copies_what_a_large_step_uses(pairs: tuple[int, int], least: int, on_gpu: bool) -> None:
    """A token makes two pairs: 32 tokens are 64."""
    got = decided("llama.cpp@impl", view(dict(enumerate(pairs)), COST), offload_min_tokens=least)
    busiest = (0, 1) if pairs[0] >= pairs[1] else (1, 0)
    assert got == ((busiest, (), busiest) if on_gpu else ((), busiest, ()))


@pytest.mark.parametrize("name", ["llama.cpp@impl", "fiddler@impl"])
def test_released_code_copies_into_one_slot(name: str) -> None:
    assert (policy(name).demand_slots, policy(name).cache.admits) == (1, False)


def test_ktransformers_keeps_the_most_frequent_of_the_model() -> None:
    assert placed("ktransformers", 50).residents == ((1, 2), (0,), (0, 1))


@pytest.mark.parametrize(("strategy", "residents"), [
    ("uniform", ((0, 1), (0, 1), (0,))), ("front-loading", (FULL, (0,), ())),
])
def test_ktransformers_without_statistics(strategy: str, residents: object) -> None:
    assert placed("ktransformers", 50, strategy=strategy).residents == residents
    assert not policy("ktransformers", strategy=strategy).needs.calibration


def test_ktransformers_random_is_the_same_whatever_the_seed_of_the_run() -> None:
    several = (policy("ktransformers", seed, strategy="random").placement for seed in (0, 1))
    one, two = (placement.place(Budget(EXPERTS, (10,) * LAYERS, 60)) for placement in several)
    assert one == two
    assert [len(residents) for residents in one.residents] == [2, 2, 2]
    assert one == RandomPlacement(42).place(Budget(EXPERTS, (10,) * LAYERS, 60)), "the seed of the released code"


def test_front_loading_goes_on_where_a_larger_expert_does_not_fit() -> None:
    placement = policy("ktransformers", strategy="front-loading").placement
    assert placement.place(Budget(EXPERTS, (10, 30, 5), 58)).slots == (4, 0, 3)


@pytest.mark.parametrize(("name", "given", "prefill_on_gpu", "demand_slots"), [
    ("ktransformers", {}, True, 2),
    ("ktransformers", {"demand_slots": 64}, True, 64),
    ("ktransformers", {"prefill": "cpu"}, False, 0),
    ("ktransformers@layer-wise", {}, False, 0),
    ("ktransformers@layer-wise", {"prefill": "gpu"}, True, 2),
])
def test_ktransformers_uses_the_cpu_in_decode_and_in_prefill_by_choice(
    name: str, given: dict[str, object], prefill_on_gpu: bool, demand_slots: int
) -> None:
    on_cpu = ((1,), (2, 0), ())
    assert decided(name, layer({0: 1, 1: 1, 2: 5}), **given) == on_cpu
    expected = ((1, 2, 0), (), (2, 0)) if prefill_on_gpu else on_cpu
    assert decided(name, layer({0: 1, 1: 1, 2: 5}, "prefill"), **given) == expected
    assert policy(name, **given).demand_slots == demand_slots


@pytest.mark.parametrize(("which", "workload", "loaded"), [
    ("planner", 2, False), ("planner", 3, True), ("constants", 9, False), ("constants", 10, True),
])
def test_fiddler_as_released_takes_the_cheaper_device_for_each_expert(which: str, workload: int, loaded: bool) -> None:
    """7 ms a token against 70 ms: ten tokens cost 70 on the CPU, which is not less. That is what it compares."""
    assert policy("fiddler@impl").parameters == {"costs": "constants"}
    expected = ((1, 0), (), (0,)) if loaded else ((1,), (0,), ())
    assert decided("fiddler@impl", layer({0: workload, 1: 1}), costs=which) == expected
    assert placed("fiddler@impl", 50) == placed("fiddler", 50)


def test_fiddlers_least_sum_of_all_configurations_is_the_cheaper_device_of_each() -> None:
    """The released code tries them all; a sum leaves each expert to itself."""
    workload = {0: 12, 1: 3, 2: 9, 3: 10}
    cheapest = min(range(16), key=lambda on_gpu: sum(_ms(e, w, on_gpu >> e & 1) for e, w in workload.items()))
    gpu, _, loads = decided("fiddler@impl", layer(workload), costs="constants")
    on_gpu = {e for e in workload if cheapest >> e & 1}
    assert on_gpu <= set(gpu) == {0, 1, 3}  # 3 costs the same on both
    assert set(gpu) - on_gpu <= {3}
    assert loads == (0, 3)


def _ms(expert: int, workload: int, on_gpu: int) -> int:
    """The released constants; expert 1 is resident."""
    return (0 if expert == 1 else 70) if on_gpu else 7 * workload


# --- On-demand loading with and without a cache, Mixtral-Offloading as published and as implemented -------------------


ONE_TOKEN = costs((10,), (30,), copy_ns=100)
CONTEXT = BuildContext("toy", 8, 3, 2, calibration=toy_calibration(3, 8, 2))


# --- on demand --------------------------------------------------------------------------------------------------------


def test_on_demand_without_a_cache_keeps_nothing() -> None:
    policy = registered("on-demand", cache="none")
    twice = (step({0: 1, 1: 1}, {0: 1, 1: 1}), step({0: 1, 1: 1}, {0: 1, 1: 1}, index=1))
    copies = [span for span in play_by_hand(policy, *twice, cache_bytes=600) if span.kind == "demand"]
    assert [(span.step, span.layer, span.expert) for span in copies] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]
    assert isinstance(policy.cache, StaticCache)


def test_on_demand_may_start_with_the_calibrated_experts() -> None:
    policy = compose("on-demand", {"start": "popular"}, context=CONTEXT)
    assert policy.needs.calibration
    assert CONTEXT.calibration is not None
    popularity = CONTEXT.calibration.popularity
    placed = policy.placement.place(Budget(8, (1,) * 3, 6, popularity))
    best = [set(sorted(range(8), key=lambda e, row=row: -row[e])[:2]) for row in popularity]  # type: ignore[misc]
    assert [set(layer) for layer in placed.residents] == best


@pytest.mark.parametrize("other", [{"pool": True}, {"cache": "none"}])
def test_a_calibrated_start_needs_slots_by_layer_and_a_cache(other: dict[str, object]) -> None:
    with pytest.raises(ChoiceError, match="'popular' fills slots by layer of an LRU"):
        compose("on-demand", {"start": "popular", **other}, context=CONTEXT)


def test_a_calibrated_start_without_calibration_is_refused() -> None:
    with pytest.raises(ChoiceError, match="needs calibration"):
        compose("on-demand", {"start": "popular"}, context=BuildContext("toy", 8, 3))


# --- Mixtral-Offloading -----------------------------------------------------------------------------------------------


class TestSpeculativeLruLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return SpeculativeLruCache()


def test_every_layer_starts_with_its_last_experts() -> None:
    placed = LastExperts().place(Budget(8, (10, 10, 10), 115))
    assert placed.slots == (4, 4, 3)
    assert placed.residents == ((4, 5, 6, 7), (4, 5, 6, 7), (5, 6, 7))


def layer_with(cache: SpeculativeLruCache, ready: dict[int, int], resident: set[int]) -> list[Swap]:
    """Layer 1 uses 3, 4, 5; what the cache asks for at its end."""
    here = view({3: 1, 4: 1, 5: 1}, ONE_TOKEN, layer=1, ready=ready)
    here = here._replace(residency=ResidencyView([(), resident], [(), ()]))
    cache.observe(here)
    assert cache.swaps(here, "routed") == ()
    return list(cache.swaps(here, "layer_end"))


def test_a_speculated_expert_comes_in_once_it_is_used_for_the_least_recent_that_was_not() -> None:
    cache = SpeculativeLruCache()
    for expert in (0, 3, 1):
        cache.admitted(ExpertId(1, expert), 1)
    # 3 is resident, 4 staged, 5 still loading: 0 is the least recent, then 1; 3 is in use
    swaps = layer_with(cache, {3: 0, 4: 0, 5: 40}, {0, 1, 3})
    assert swaps == [Swap(ExpertId(1, 4), ExpertId(1, 0)), Swap(ExpertId(1, 5), ExpertId(1, 1))]


def test_a_demand_load_is_no_guest_and_guests_find_no_room_among_experts_in_use() -> None:
    cache = SpeculativeLruCache()
    cache.admitted(ExpertId(1, 3), 1)
    assert layer_with(cache, {3: 0, 4: INFINITE_NS, 5: 0}, {3}) == []


def test_a_demand_load_does_not_come_in_where_there_is_room_either() -> None:
    cache = SpeculativeLruCache()
    for expert in (0, 1):
        cache.admitted(ExpertId(1, expert), 1)
    assert layer_with(cache, {3: INFINITE_NS, 4: INFINITE_NS, 5: 0}, {0, 1}) == [Swap(ExpertId(1, 5), ExpertId(1, 0))]


SPECULATED = """
h2d, step -1:
  0-0    place L0 E1
  0-0    place L0 E2
  0-0    place L1 E1
  0-0    place L1 E2
h2d:
  20-40  prefetch L1 E0 ready=20   # layer 0 planned at 16, launches until 19, foresees until 20
  49-49  release L1 E0        # computed 44-49
  55-55  evict L1 E1          # layer 1 combined at 55: 0 was used, 1 is the least recent that was not
  55-55  place L1 E0          # it still lies in its staging slot: no copy
"""


def test_mixtral_offloading_by_hand() -> None:
    # Layer 0 runs 1 and 2 (resident) until 27, combines until 28; attention 38, gate 40, routing 41, wait 42, plan 43;
    # launches 44, 45, 46; expert 0 44-49, expert 2 49-54, combine 55.
    gate = Forecast(1, "gate", (0, 2), (1, 1), [[2, 0, 1]])  # 2 is likelier and resident
    demand = step({1: 1, 2: 1}, {0: 1, 2: 1}, forecast=gate)
    spans = play_by_hand(registered("mixtral-offloading", speculate=1), demand, cache_bytes=400)
    assert told(lane(spans, "h2d"), SPECULATED) == lines(SPECULATED)
    assert max(span.end_ns for span in spans) == 61  # head 59, routing 60, wait


some = settings(max_examples=examples(30), derandomize=True, suppress_health_check=list(HealthCheck))


@some
@given(worlds(["mixtral-offloading"], min_decode=2))
def test_taking_in_a_used_guest_never_needs_a_copy(world: World) -> None:
    assert "swap" not in set(play(world).spans.kind)


@some
@given(worlds(["mixtral-offloading"]))
def test_speculation_is_made_and_paid_for_in_decode_only(world: World) -> None:
    played = play(world)
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
    speculated = played.spans[played.spans.kind == "speculate"]
    assert set(speculated.phase) <= {"decode"}
    assert not len(played.spans[(played.spans.kind == "prefetch") & (played.spans.phase == "prefill")])


def test_variants() -> None:
    published, code = (compose(name, context=CONTEXT) for name in ("mixtral-offloading", "mixtral-offloading@impl"))
    assert (published.prefetch_slots, published.writes_back) == (4, "never")
    assert (code.prefetcher, code.prefetch_slots, code.demand_slots, code.writes_back) == (None, 0, 4, "in turn")
    plain = compose("mixtral-offloading", {"speculate": 0}, context=CONTEXT)
    assert (plain.prefetcher, plain.prefetch_slots, plain.needs.forecasts) == (None, 0, ())
