"""Experts in host memory: the layout of one in its buffer, and a store of random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertCosts, ExpertId, LayerInput, Plan, Swap, Updates
from policies.protocols import Budget, Composition
from realrun.errors import RefusedError
from realrun.experts import store as expert_store
from realrun.experts.ffn import SwiGlu, expert_ffn
from realrun.experts.store import ExpertLayout, ExpertStore, GpuSlots, Slab, WeightPart, random_store
from realrun.machine.pinned import plain
from sim.runs.demand import demand_of
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.invariants.free_compositions import free_composition
from traces.batches import compose as compose_batch
from trilane.testing.random_worlds import fixed_trace, random_costs, with_forecasts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple), st.sampled_from(DTYPES)), max_size=5
)


def test_parts_begin_at_multiples_of_64_bytes() -> None:
    layout = ExpertLayout.of_parts([("up_proj", (3, 5), torch.bfloat16), ("down_proj", (5, 3), torch.float32)])
    assert layout.parts == (
        WeightPart("up_proj", (3, 5), torch.bfloat16, 0),  # 30 bytes
        WeightPart("down_proj", (5, 3), torch.float32, 64),  # 60 bytes
    )
    assert layout.size_bytes == 128


def test_a_shape_gives_the_librarys_matrices() -> None:
    gated = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.bfloat16)
    assert [(p.name, p.shape) for p in gated.parts] == [("gate_up_proj", (96, 32)), ("down_proj", (32, 48))]
    assert gated.size_bytes == 3 * 32 * 48 * 2
    ungated = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.float32, gated=False)
    assert [(p.name, p.shape) for p in ungated.parts] == [("up_proj", (48, 32)), ("down_proj", (32, 48))]


@given(PARTS)
def test_views_share_the_buffer_and_not_each_other(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    layout = ExpertLayout.of_parts((f"part{n}", shape, dtype) for n, (shape, dtype) in enumerate(parts))
    buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert layout.size_bytes % 64 == 0
    for number, part in enumerate(layout.parts):
        view = views[part.name]
        assert (view.shape, view.dtype) == (part.shape, part.dtype)
        assert view.data_ptr() == buffer.data_ptr() + part.offset_bytes
        assert view.data_ptr() % 64 == 0
        view.fill_(number + 1)
    assert all((views[part.name] == number + 1).all() for number, part in enumerate(layout.parts))


def test_a_larger_slot_serves_too() -> None:
    layout = ExpertLayout.from_shape(4, 4, torch.float32)
    assert layout.views(torch.zeros(layout.size_bytes + 640, dtype=torch.uint8))["down_proj"].shape == (4, 4)


class Experts(nn.Module):
    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))


def test_a_module_gives_one_slice_of_each_parameter_of_all_experts() -> None:
    experts = Experts(
        gate_up_proj=torch.zeros(8, 6, 4), gate_up_proj_bias=torch.zeros(8, 6), down_proj=torch.zeros(8, 4, 3),
        scale=torch.zeros(1),
    )
    layout = ExpertLayout.from_module(experts.bfloat16())
    assert [(p.name, p.shape) for p in layout.parts] == [
        ("gate_up_proj", (6, 4)),
        ("gate_up_proj_bias", (6,)),
        ("down_proj", (4, 3)),
    ]
    assert {part.dtype for part in layout.parts} == {torch.bfloat16}


def test_parameters_that_disagree_about_the_number_of_experts_are_refused() -> None:
    experts = Experts(gate_up_proj=torch.zeros(12, 6, 4), down_proj=torch.zeros(8, 4, 3))
    with pytest.raises(RefusedError, match=r"same leading dimension.*'gate_up_proj': \(12, 6, 4\)"):
        ExpertLayout.from_module(experts)


LAYOUT = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.bfloat16)


def noting(asked: list[int]) -> Callable[[int], torch.Tensor]:
    def allocate(size_bytes: int) -> torch.Tensor:
        asked.append(size_bytes)
        return plain(size_bytes)

    return allocate


def test_memory_is_asked_for_by_layer() -> None:
    asked: list[int] = []
    store = random_store(LAYOUT, layers=3, experts=5, allocate=noting(asked))
    assert asked == [5 * LAYOUT.size_bytes] * 3
    assert store.size_bytes == 15 * LAYOUT.size_bytes
    assert store.layouts == (LAYOUT,) * 3


def test_every_expert_has_memory_of_its_own() -> None:
    store = random_store(LAYOUT, layers=2, experts=3, allocate=plain)
    for number in range(6):
        store.buffer(number // 3, number % 3).fill_(number)
    assert all((store.buffer(number // 3, number % 3) == number).all() for number in range(6))
    assert all(store.buffer(layer, expert).data_ptr() % 64 == 0 for layer in range(2) for expert in range(3))


def test_layers_may_differ() -> None:
    small, large = (ExpertLayout.from_shape(32, width, torch.float32) for width in (16, 64))
    store = ExpertStore([Slab.allocated(small, 4, plain), Slab.allocated(large, 2, plain)])
    assert [len(store.buffer(layer, 1)) for layer in range(2)] == [small.size_bytes, large.size_bytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_are_normal_numbers_and_so_is_what_comes_of_them(dtype: torch.dtype) -> None:
    layout = ExpertLayout.from_shape(64, 96, dtype)
    weights = layout.views(random_store(layout, layers=1, experts=2, allocate=plain, seed=3).buffer(0, 1))
    smallest = torch.finfo(dtype).tiny
    assert all((value.abs() >= smallest).all() and value.isfinite().all() for value in weights.values())
    assert all(-0.01 < value.float().mean() < 0.01 for value in weights.values())
    assert expert_ffn(SwiGlu(), weights, torch.ones(2, 64, dtype=dtype)).isfinite().all()


def test_random_experts_differ_and_come_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_store, "BLOCK_ELEMENTS", 1000)  # shorter than an expert, so that it repeats

    def first(seed: int) -> torch.Tensor:
        return random_store(LAYOUT, layers=1, experts=2, allocate=plain, seed=seed).buffer(0, 0)

    store = random_store(LAYOUT, layers=1, experts=2, allocate=plain)
    assert not torch.equal(store.buffer(0, 0), store.buffer(0, 1))
    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


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
