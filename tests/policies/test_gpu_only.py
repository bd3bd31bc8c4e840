"""On-demand loading with and without a cache, Mixtral-Offloading as published and as implemented."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from policies.mechanism.views import INFINITE_NS, ExpertId, Forecast, ResidencyView, Swap
from policies.papers.mixtral_offloading import LastExperts, SpeculativeLruCache
from policies.parts.caches import StaticCache
from policies.protocols import Budget, Cache
from policies.registry import BuildContext, ChoiceError, compose
from policies.testing.cache_laws import CacheLaws, CacheScenario
from tests.kit.depth import examples
from tests.kit.hand_worked import lane, lines, registered, step, told
from tests.kit.hand_worked import play as play_by_hand
from tests.kit.views import costs, view
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import worlds
from trilane.testing.worlds import World, play, toy_calibration

COST = costs((10,), (30,), copy_ns=100)
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
    here = view({3: 1, 4: 1, 5: 1}, COST, layer=1, ready=ready)
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
    assert (published.prefetch_slots, published.writes_back) == (4, False)
    assert (code.prefetcher, code.prefetch_slots, code.demand_slots, code.writes_back) == (None, 0, 4, True)
    plain = compose("mixtral-offloading", {"speculate": 0}, context=CONTEXT)
    assert (plain.prefetcher, plain.prefetch_slots, plain.needs.forecasts) == (None, 0, ())
