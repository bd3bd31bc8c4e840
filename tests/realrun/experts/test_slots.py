"""Slots on the GPU: by hand, and against what a session believes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertCosts, ExpertId, LayerInput, Plan, Swap, Updates
from policies.protocols import Budget, Composition
from realrun.experts.store import GpuSlots
from sim.runs.demand import demand_of
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.invariants.free_compositions import free_composition
from traces.batches import compose as compose_batch
from trilane.testing.random_worlds import fixed_trace, random_costs, with_forecasts

# --- slots on the GPU -------------------------------------------------------------------------------------------------


A, B, C, D = (ExpertId(0, expert) for expert in range(4))
LAYERS, EXPERTS, SIZE = 3, 8, 100


def arena(slots: int) -> Tensor:
    return torch.zeros(slots, 4, dtype=torch.uint8)


def staged(id: ExpertId, kind: str = "demand") -> Copy:
    return Copy(id, kind, "staging", (), 4)  # type: ignore[arg-type]


def cached(id: ExpertId, *victims: ExpertId) -> Copy:
    return Copy(id, "demand", "cache", victims, 4)


def same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_each_quota_has_its_own_slots() -> None:
    slots = GpuSlots(arena(3), demand=1, prefetch=1)
    taken = [slots.begin(staged(A)), slots.begin(staged(B, "prefetch")), slots.begin(cached(C))]
    assert len({buffer.data_ptr() for buffer in taken}) == 3
    assert [same(slots.buffer(id), buffer) for id, buffer in zip((A, B, C), taken, strict=True)] == [True] * 3
    for more in (staged(D), staged(D, "prefetch"), cached(D)):
        with pytest.raises(IndexError):
            slots.begin(more)


def test_the_victims_slot_is_the_next_one_taken() -> None:
    slots = GpuSlots(arena(2), 0, 0)
    first = slots.place(A)
    slots.place(B)
    assert same(slots.begin(cached(C, A)), first)
    with pytest.raises(KeyError):
        slots.buffer(A)


def test_the_slot_of_an_evicted_expert_is_the_next_one_taken() -> None:
    slots = GpuSlots(arena(2), 0, 0)
    first = slots.place(A)
    slots.place(B)
    slots.evict(A)
    assert same(slots.begin(cached(C)), first)


def test_an_empty_slot_is_taken_before_one_whose_expert_could_be_adopted() -> None:
    slots = GpuSlots(arena(2), demand=2, prefetch=0)
    of_a = slots.begin(staged(A))
    slots.release(A)
    of_b = slots.begin(staged(B))
    assert not same(of_a, of_b)
    slots.release(B)
    assert same(slots.begin(staged(C)), of_a)  # the oldest


def test_adoption_exchanges_two_slots_and_moves_nothing() -> None:
    slots = GpuSlots(arena(2), demand=1, prefetch=0)
    of_d, of_a = slots.place(D), slots.begin(staged(A))
    slots.release(A)
    slots.adopt(Swap(A, D))
    assert same(slots.buffer(A), of_a)
    assert same(slots.begin(staged(B)), of_d)


@pytest.mark.parametrize("anew", [staged(B), cached(B)], ids=["to staging", "to the cache"])
def test_who_is_copied_anew_leaves_an_empty_slot_behind(anew: Copy) -> None:
    """Its old bytes are not adoptable twice, and their slot goes before one that holds something."""
    slots = GpuSlots(arena(4), demand=2, prefetch=0)
    slots.begin(staged(A))
    of_b = slots.begin(staged(B))
    slots.release(B)
    slots.release(A)  # B is the older
    slots.begin(anew)
    if anew.into == "cache":
        assert same(slots.begin(staged(C)), of_b)  # and A may still be adopted
    slots.place(D)
    slots.adopt(Swap(A, D))


# --- against the session ----------------------------------------------------------------------------------------------


class MirroredSession(Session):
    """A session whose decisions an arena follows, as the executor's does; after every call the two must agree."""

    def __init__(self, policy: Composition, budget: Budget, costs: Sequence[ExpertCosts]) -> None:
        super().__init__(policy, budget, costs)
        staging = policy.demand_slots + policy.prefetch_slots
        self.slots = GpuSlots(arena(budget.cache_bytes // SIZE + staging), policy.demand_slots, policy.prefetch_slots)
        for layer, experts in enumerate(self.residency.resident):
            for expert in experts:
                write(self.slots.place(ExpertId(layer, expert)), ExpertId(layer, expert))
        self.seen = {"adopted": 0, "adoptable": 0, "staged": 0, "two in flight": 0}

    def plan_layer(self, given: LayerInput) -> Plan:
        return self._followed(super().plan_layer(given), lambda plan: list(map(self.slots.release, plan.released)))

    def end_layer(self) -> Updates:
        return self._followed(super().end_layer(), self._adopt)

    def end_step(self) -> Updates:
        return self._followed(super().end_step(), self._adopt)

    def next_copy(self, demand: bool = True) -> Copy | None:
        def begin(copy: Copy | None) -> None:
            if copy is not None:
                write(self.slots.begin(copy), copy.key)

        return self._followed(super().next_copy(demand), begin)

    def copied(self, copy: Copy) -> bool:
        return self._followed(super().copied(copy), lambda kept: None if kept else self.slots.release(copy.key))

    def computed(self, id: ExpertId) -> None:
        self._followed(super().computed(id), lambda _: self.slots.release(id))

    def _adopt(self, updates: Updates) -> None:
        for swap in updates.adopted:
            self.slots.adopt(swap)
            self.seen["adopted"] += 1

    def _followed(self, answer: Any, follow: Callable[[Any], object]) -> Any:
        follow(answer)
        self.check()
        return answer

    def check(self) -> None:
        """Everybody who is, or could be, on the GPU has a buffer of their own with their own bytes in it."""
        residency, free = self.residency, self.slots._free
        there = {id: self.slots.buffer(id) for ids in residency.ids for id in ids if residency.holds(id)}
        adoptable = [id for quota in residency._intact.values() for id in quota]
        there |= {id: buffer for entries in free.values() for buffer, id in entries if id in adoptable}
        assert there.keys() >= set(adoptable)
        for id in self._copies.flying:
            there[id] = self.slots.buffer(id)
        assert len({buffer.data_ptr() for buffer in there.values()}) == len(there), "two experts in one buffer"
        for id, buffer in there.items():
            assert buffer.tolist() == bytes_of(id), f"the buffer of {id} holds {buffer.tolist()}"
        self.seen["adoptable"] += len(adoptable)
        self.seen["staged"] += sum(map(len, residency.staged))


class EagerSession(MirroredSession):
    """Asked for the second copy when the first begins, as a link is that must not rest between two copies."""

    _behind: Copy | None = None

    def next_copy(self, demand: bool = True) -> Copy | None:
        copy, self._behind = self._behind or super().next_copy(demand), None
        if copy is not None:
            self._behind = super().next_copy(demand)
            self.seen["two in flight"] += self._behind is not None
        return copy


def bytes_of(id: ExpertId) -> list[int]:
    return [id.layer, id.expert, 7, 7]


def write(buffer: Tensor, id: ExpertId) -> None:
    buffer.copy_(torch.tensor(bytes_of(id)))


def mirrored(seed: int, kind: type[MirroredSession] = MirroredSession) -> MirroredSession:
    """A policy that nobody would write, simulated; equal experts."""
    rng = random.Random(seed)
    policy = free_composition(rng, seed, EXPERTS)
    trace = with_forecasts(fixed_trace(np.random.default_rng(seed)), policy.needs, rng)
    costs = random_costs([SIZE] * LAYERS, rng, contention=False)
    demand = demand_of(trace, compose_batch(trace, batch=rng.randint(1, 3)), policy.needs)
    budget = Budget(EXPERTS, (SIZE,) * LAYERS, rng.choice((0, 1, 3, 6, 12, 24)) * SIZE)
    session = kind(policy, budget, costs.experts)
    Timeline(session, costs, demand, TokenBytes(16, 8)).run()
    return session


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1), st.sampled_from([MirroredSession, EagerSession]))
def test_the_arena_holds_what_the_session_believes(seed: int, kind: type[MirroredSession]) -> None:
    mirrored(seed, kind)


def test_these_sessions_stage_and_adopt() -> None:
    """The law above is about something."""
    seen = [mirrored(seed, EagerSession).seen for seed in range(20)]
    assert all(sum(each[what] for each in seen) > 0 for what in ("staged", "adoptable", "adopted", "two in flight"))
