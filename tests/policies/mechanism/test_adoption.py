"""A cache update that finds its expert in a free staging slot exchanges the slots instead of copying."""

from __future__ import annotations

from policies.mechanism.residency import Residency
from policies.mechanism.views import Copy, ExpertId
from policies.parts.caches import StaticCache
from policies.protocols import Budget, InitialPlacement

A, B, C, D = (ExpertId(0, e) for e in range(4))


def residency(demand_slots: int = 1) -> Residency:
    """One layer of four experts; D is cached."""
    return Residency(Budget(4, (10,), 10), InitialPlacement((1,), ((3,),)), StaticCache(), demand_slots, 0)


def stage(it: Residency, id: ExpertId) -> None:
    """Copy an expert into a staging slot, use it, and give the slot back."""
    copy = Copy(id, "demand", "staging", (), 10)
    it.start(copy)
    it.finish(copy)
    it.release(id)


def test_an_expert_that_lies_in_a_free_slot_is_adopted() -> None:
    it = residency()
    stage(it, A)
    assert not it.holds(A)  # its slot may be taken at any moment
    assert it.adopt(A, D)
    assert it.holds(A)
    assert not it.holds(D)
    assert it.staging == {"demand": 1, "prefetch": 0}


def test_the_next_copy_takes_the_slot_and_what_lay_in_it_is_gone() -> None:
    it = residency()
    stage(it, A)
    stage(it, B)
    assert not it.adopt(A, D)
    assert it.adopt(B, D)


def test_an_empty_slot_is_taken_before_one_that_holds_something() -> None:
    it = residency(demand_slots=2)
    stage(it, A)
    stage(it, B)
    stage(it, C)  # two slots: A, the oldest, is overwritten
    assert not it.adopt(A, D)
    assert it.adopt(B, D)


def test_nobody_is_adopted_twice_or_while_being_copied_again() -> None:
    it = residency(demand_slots=2)
    stage(it, A)
    it.start(Copy(A, "demand", "staging", (), 10))
    assert not it.adopt(A, D)
    stage(it, B)
    assert it.adopt(B, D)
    assert not it.adopt(B, B)


def test_a_slot_that_is_smaller_than_a_staging_slot_is_not_given_for_one() -> None:
    """Staging slots hold the largest expert; layer 0 has smaller ones."""
    it = Residency(Budget(4, (10, 20), 10), InitialPlacement((1, 0), ((3,), ())), StaticCache(), 1, 0)
    stage(it, A)
    assert not it.adopt(A, D)
    assert it.holds(D)
