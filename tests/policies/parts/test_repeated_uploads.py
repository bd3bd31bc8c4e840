"""Uploads that are requested again: against the bookkeeping of the code itself, and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from policies.mechanism.views import LayerInput, Routing
from policies.parts.admission import Admission, SecondMiss
from policies.parts.caches import LruCache
from policies.parts.placements import NoPlacement
from policies.parts.repeated_uploads import RepeatedUploads
from policies.parts.upload_cache import CountedSlots, UploadCache
from policies.protocols import Cache
from policies.testing.cache_laws import EXPERTS, CacheLaws, CacheScenario
from tests.policies.parts.test_upload_cache import session_of

ROUTED, ALL = 8, 64  # experts that are routed to, and those of the layer


class Code:
    """One layer of ``llama_moe_cache_step`` of llama.cpp PR #27861: its slots, its table, and the worker's queue."""

    def __init__(self, slots: int, inserts: int) -> None:
        self.inserts, self.clock = inserts, 0
        self.held: list[int | None] = [None] * slots  # slot_expert
        self.used = [0] * slots  # slot_last_use
        self.waits = [False] * slots  # slot_in_flight
        self.table: dict[int, int] = {}  # expert_slot
        self.todo: list[tuple[int, int]] = []
        self.again = False  # whether an expert was requested after one that had got its slot, in one step

    def step(self, active: Sequence[int], carried: int) -> set[int]:
        """Route, let the worker copy so many, publish them and request the misses; returns the hits."""
        hits = {expert for expert in active if expert in self.table}
        for expert in sorted(hits):
            self._use(self.table[expert])
        misses = [expert for expert in sorted(active) if expert not in hits]
        done, self.todo = self.todo[:carried], self.todo[carried:]
        for expert, slot in done:
            self.held[slot], self.waits[slot], self.table[expert] = expert, False, slot
            self._use(slot)
        published = set(self.table)
        for expert in misses[::-1][: self.inserts]:
            if expert not in self.table and (slot := self._free()) is not None:
                self.again |= expert in published
                self.waits[slot] = True
                self.todo.append((expert, slot))
        return hits

    def _use(self, slot: int) -> None:
        self.clock += 1
        self.used[slot] = self.clock

    def _free(self) -> int | None:
        """An empty slot, or the least recent that nothing waits for, whose expert loses its entry."""
        ours = [slot for slot, waits in enumerate(self.waits) if not waits]
        for slot in ours:
            if self.held[slot] is None:
                return slot
        slot = min(ours, key=self.used.__getitem__, default=None)
        if slot is not None:
            self.table.pop(self.held[slot], None)  # type: ignore[arg-type]
            self.held[slot] = None
        return slot


class Play:
    """The same with the policy's cache."""

    def __init__(self, slots: int, inserts: int, experts: int = ALL, admission: Admission | None = None) -> None:
        counted = CountedSlots(NoPlacement())
        self.cache = RepeatedUploads(admission or Admission(), counted, inserts, experts)
        self.session = session_of(self.cache, counted, slots, experts)
        self.steps = 0

    def step(self, active: Sequence[int], carried: int) -> set[int]:
        routing = Routing(tuple(sorted(active)), (1,) * len(active))
        self.session.begin_step(self.steps)
        plan = self.session.plan_layer(LayerInput(self.steps, 0, "decode", routing))
        self.session.end_layer()
        for _ in range(carried):
            if (copy := self.session.next_copy()) is not None:
                self.session.copied(copy)
        self.session.end_step()
        self.steps += 1
        return set(plan.gpu)

    @property
    def stand_ins(self) -> set[int]:
        return {key.expert for key in self.cache._stands_for}


def test_a_repeated_request_is_of_the_least_used_absent_expert() -> None:
    play = Play(slots=3, inserts=1)
    for active, carried in (([0], 0), ([0, 63], 0), ([0], 0), ([], 9)):
        play.step(active, carried)
    assert set(play.session.residency.resident[0]) == {0, 62, 63}, "62 in place of 0, as 63 has been used"
    assert play.step([0, 62, 63], 0) == {0, 63}


def test_what_missed_in_the_same_step_stands_in_for_nothing() -> None:
    play = Play(slots=3, inserts=2, experts=2)
    for active, carried in (([1], 0), ([0, 1], 0), ([0, 1], 9)):
        play.step(active, carried)
    assert play.step([0, 1], 0) == {0, 1}, "the only absent expert, 0, was requested for itself, not for 1"


def test_the_admission_is_asked_about_what_missed() -> None:
    play = Play(slots=2, inserts=1, admission=SecondMiss(8))
    for active, carried in (([0], 0), ([1], 9), ([1], 0)):
        play.step(active, carried)
    assert play.stand_ins == {63}, "1 has missed twice; 63, which stands in for it, never"


def test_an_expert_is_lost_with_its_second_copy_and_found_with_a_third() -> None:
    play = Play(slots=2, inserts=1)
    for carried in (0, 0, 2):
        play.step([0], carried)
    assert play.step([0], 0) == {0}, "published twice: its slots are full of 0"
    assert play.step([0, 1], 1) == {0}, "1 gets the slot of the first copy, and 0 loses its entry"
    assert [play.step([0], 1), play.step([0], 1), play.step([0], 0)] == [set(), set(), {0}]


def test_a_stand_in_that_misses_while_it_waits_gives_its_turn_to_another() -> None:
    play = Play(slots=4, inserts=1)
    for active, carried in (([0], 0), ([0], 0), ([63], 0)):
        play.step(active, carried)
    assert play.stand_ins == {62}, "and no more 63, which is requested itself"
    play.step([], 9)
    assert play.step([0, 62, 63], 0) == {0, 63}


def test_a_stand_in_in_a_slot_is_requested_by_one_of_its_own() -> None:
    play = Play(slots=3, inserts=1)
    for active, carried in (([0], 0), ([0], 0), ([0], 2), ([0, 63], 0)):
        play.step(active, carried)
    assert play.stand_ins == {62, 63}
    assert play.step([0], 1) == {0}
    assert play.step([0, 62, 63], 0) == {0, 63}, "62 stands in for 0 now"


def test_hits_and_queue_of_many_steps_are_those_of_the_code() -> None:
    rng, code, play = Random(1), Code(33, 2), Play(33, 2)
    active, waiting = set(range(8)), []
    for step in range(200):
        active = {expert if rng.random() < 0.8 else min(ALL - 1, int(rng.expovariate(0.06))) for expert in active}
        carried = 1 if step < 100 else 2
        assert play.step(sorted(active), carried) == code.step(sorted(active), carried)
        assert not code.again
        assert len(play.cache._waiting) == len(code.todo)
        waiting.append(len(code.todo))
    assert (waiting[99], waiting[-1]) == (33, 0), "every slot waits for one copy a step, and none for two"


def test_a_cache_that_knows_of_no_second_copy_differs_from_the_code() -> None:
    slots = CountedSlots(NoPlacement())
    cache = UploadCache(LruCache(), Admission(), slots, 1, frees="request")
    code, play = Code(2, 1), Play(2, 1)
    play.session = session_of(cache, slots, 2, ALL)
    steps = [([0], 0), ([0], 0), ([0], 2), ([0, 1], 1), ([0], 0)]
    assert [code.step(*step) for step in steps] != [play.step(*step) for step in steps]


def hits(repeated: bool, carried: int) -> int:
    """Of 200 steps over six experts, two new misses at most, with four slots."""
    play = Play(slots=4, inserts=2)
    if not repeated:
        slots = CountedSlots(NoPlacement())
        play.session = session_of(UploadCache(LruCache(), Admission(), slots, 2, frees="request"), slots, 4, ALL)
    return sum(len(play.step([step % 6, (step + 2) % 6], carried)) for step in range(200))


def test_repeated_requests_drain_a_cache_whose_link_is_slow() -> None:
    assert hits(repeated=True, carried=9) == hits(repeated=False, carried=9), "none waits long enough to be repeated"
    assert hits(repeated=True, carried=1) < hits(repeated=False, carried=1) / 2


class TestLaws(CacheLaws):
    declines = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        slots = CountedSlots(NoPlacement())
        if scenario.group(1) == 0:
            return UploadCache(LruCache(), Admission(), slots, 2)  # a pool, which it is not made for
        slots.slots = tuple(scenario.slots)
        return RepeatedUploads(Admission(), slots, 2, EXPERTS)


STEPS = st.lists(st.tuples(st.sets(st.integers(0, ROUTED - 1), max_size=3), st.integers(0, 3)), max_size=40)


@example(3, 2, True, [({1}, 2), ({0, 4, 5}, 2), ({3}, 1), ({2, 3}, 1), (set(), 2), ({2}, 2)])  # 2 for itself, not for 3
@given(st.integers(1, 6), st.integers(1, 3), st.booleans(), STEPS)
def test_hits_are_those_of_the_code(slots: int, inserts: int, few: bool, steps: list[tuple[set[int], int]]) -> None:
    experts = slots + 3 if few else ALL  # besides what has a slot, and two other misses, one can stand in
    code, play = Code(slots, inserts), Play(slots, inserts, experts)
    for routed, carried in steps:
        active = {expert % experts for expert in routed}
        assert play.step(sorted(active), carried) == code.step(sorted(active), carried)
        if code.again:
            return  # requested there in this step, here from its next miss on
