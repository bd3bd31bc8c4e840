"""The cache with uploads: what is in service when, and whose slot is free when, in sessions of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import ExpertCosts, ExpertId, LayerInput, Phase, Plan, Routing
from policies.parts.admission import Admission, SecondMiss
from policies.parts.caches import LfuCache, LruCache
from policies.parts.placements import NoPlacement, PoolPlacement
from policies.parts.upload_cache import CountedSlots, Frees, InService, UploadCache
from policies.protocols import Budget, Cache, Composition, Placement
from policies.testing.cache_laws import CacheLaws, CacheScenario

COST = ExpertCosts((0, 10), (0, 40), 0, 70, 1)


def session_of(cache: UploadCache, placement: Placement, slots: int, experts: int = 8) -> Session:
    """A session of one layer around a cache."""
    policy = Composition(placement=placement, assigner=InService(cache), cache=cache, demand_slots=0, name="test")
    return Session(policy, Budget(experts, (1,), slots), [COST])


class Play:
    """Steps of one layer; between two steps the link carries as many uploads as it is told."""

    def __init__(
        self, slots: int, *, inserts: int = 1, frees: Frees = "copy", dwell: int = 0,
        admission: Admission | None = None, order: Cache | None = None, placement: Placement | None = None,
    ) -> None:
        counted = CountedSlots(placement or NoPlacement())
        cache = UploadCache(order or LruCache(), admission or Admission(), counted, inserts, frees=frees, dwell=dwell)
        self.session = session_of(cache, counted, slots)
        self.steps = 0

    def step(self, *active: int, carried: int = 9, phase: Phase = "decode") -> tuple[int, ...]:
        """Play a step, then carry so many uploads; returns what ran on the GPU."""
        plan = self.begin(active, phase)
        self.end(carried)
        return plan.gpu

    def begin(self, active: Sequence[int], phase: Phase = "decode") -> Plan:
        routing = Routing(tuple(sorted(active)), (1,) * len(active))
        self.session.begin_step(self.steps)
        return self.session.plan_layer(LayerInput(self.steps, 0, phase, routing))

    def end(self, carried: int) -> None:
        self.session.end_layer()
        self.carry(carried)
        self.session.end_step()
        self.steps += 1

    def carry(self, most: int) -> list[int]:
        """What the link carries now, if it is free so often."""
        copied = []
        while len(copied) < most and (copy := self.session.next_copy()) is not None:
            self.session.copied(copy)
            copied.append(copy.key.expert)
        return copied

    @property
    def resident(self) -> set[int]:
        return set(self.session.residency.resident[0])


def test_a_miss_runs_on_the_cpu_and_hits_from_the_next_step_on() -> None:
    play = Play(slots=2)
    assert play.step(0) == ()
    assert play.step(0) == (0,)


def test_an_upload_that_ends_within_a_step_counts_from_the_one_after() -> None:
    play = Play(slots=2)
    play.step(0, carried=0)
    assert play.carry(1) == [0]  # the next step has begun for the link, not for the table
    assert play.step(0) == ()
    assert play.step(0) == (0,)


@pytest.mark.parametrize(("inserts", "expected"), [(1, {1}), (2, {1, 3}), (3, {1, 3, 5})])
def test_at_most_so_many_uploads_a_layer_and_step_lower_ids_first(inserts: int, expected: set[int]) -> None:
    play = Play(slots=8, inserts=inserts)
    play.step(5, 3, 1)
    assert play.resident == expected


def test_a_prompt_uploads_nothing() -> None:
    play = Play(slots=2)
    play.step(0, 1, phase="prefill")
    assert play.resident == set()


def test_what_missed_twice_is_requested_once() -> None:
    play = Play(slots=4, frees="ahead")
    play.step(0, carried=0)
    play.step(0, carried=0)
    assert play.carry(9) == [0]


# --- when an expert leaves its slot -----------------------------------------------------------------------------------


def filled(frees: Frees, **more: int) -> Play:
    """Two slots, and as many more as the cache keeps free; 0 and then 1 were used."""
    play = Play(slots=3 if frees == "ahead" else 2, frees=frees, **more)
    play.step(0)
    play.step(1)
    return play


def test_copy_a_victim_stays_in_service_until_the_copy_starts() -> None:
    play = filled("copy")
    play.step(2, carried=0)
    assert play.step(0, carried=0) == (0,), "the upload of 2 still waits"
    assert play.carry(9) == [2]
    assert play.resident == {0, 2}, "1 is the least recent by now"


def test_ahead_a_slot_is_free_for_the_next_steps_upload() -> None:
    play = filled("ahead")
    assert play.resident == {0, 1}
    play.step(2)
    assert play.resident == {1, 2}, "0 has left at the end of the step, so that a slot is free again"
    assert play.step(0, 1) == (1,)


def test_ahead_an_upload_that_waits_keeps_its_slot() -> None:
    play = filled("ahead")
    play.step(2, carried=0)
    assert play.resident == {1}, "one slot for 2, and a free one"
    play.step(3, carried=0)
    assert play.resident == set(), "one slot for 2, one for 3, and a free one"
    assert play.carry(9) == [2, 3]


def test_request_the_slot_is_out_of_service_while_the_upload_waits() -> None:
    play = filled("request")
    assert play.carry(9) == [1], "requested at the end of the step"
    play.step(2, carried=0)
    assert play.resident == {1}
    play.step(3, carried=0)
    assert play.resident == set()
    play.step(4, carried=0)
    assert play.carry(9) == [2, 3], "without a slot to be had, 4 was not requested"


def test_request_only_the_latest_misses_are_asked_about() -> None:
    play = Play(slots=8, inserts=2, frees="request")
    play.step(0, 1, 2, carried=0)
    play.step(0, 1, 2, carried=0)
    assert play.carry(9) == [2, 1], "0 is the third: the two that wait are not replaced by it"


def test_dwell_an_upload_stays_for_so_many_steps() -> None:
    play = filled("copy", dwell=3)  # 0 came in step 0, 1 in step 1
    play.step(2)
    assert play.resident == {0, 1}
    play.step(2)
    assert play.resident == {1, 2}


def test_the_admission_is_asked() -> None:
    play = Play(slots=1, admission=SecondMiss(8))
    play.step(0)
    play.step(1)
    assert play.resident == {0}
    play.step(1)
    assert play.resident == {1}


def test_an_order_by_frequency() -> None:
    play = Play(slots=2, order=LfuCache())
    for active in ((0,), (0,), (1,), (2,)):
        play.step(*active)
    assert play.resident == {0, 2}


def test_a_pool_is_full_when_its_bytes_are() -> None:
    play = Play(slots=2, placement=PoolPlacement())
    for active in ((0,), (1,), (2,), (3,)):
        play.step(*active)
    assert play.resident == {2, 3}


# --- laws -------------------------------------------------------------------------------------------------------------


class UploadLaws(CacheLaws):
    declines = True
    frees: Frees = "copy"

    def fresh(self, scenario: CacheScenario) -> Cache:
        slots = CountedSlots(NoPlacement())
        pooled = scenario.group(1) == 0
        slots.slots = None if pooled else tuple(scenario.slots)
        frees = "copy" if pooled else self.frees
        return UploadCache(LruCache(), Admission(), slots, 2, frees=frees)


class TestUploadsWithTheCopy(UploadLaws):
    pass


class TestUploadsAhead(UploadLaws):
    frees: Frees = "ahead"


class TestUploadsByRequest(UploadLaws):
    frees: Frees = "request"


def test_the_counted_slots_are_those_of_the_placement() -> None:
    slots = CountedSlots(NoPlacement())
    assert slots.place(Budget(8, (1, 1), 5)) == NoPlacement().place(Budget(8, (1, 1), 5))
    assert slots.slots == (3, 2)


def test_at_the_start_residents_are_in_service() -> None:
    cache = UploadCache(LruCache(), Admission(), CountedSlots(NoPlacement()), 1)
    cache.admitted(ExpertId(1, 4), 1)
    assert [set(cache.in_service(layer)) for layer in (0, 1)] == [set(), {4}]
