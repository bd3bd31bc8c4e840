"""The laws of docs/design.md on the real engine, for all policies together, in random worlds.

What each policy by itself is held to is in tests/conformance; laws 10 and 11 need the executor. The same worlds are
drawn every time (``derandomize``), so that a red test stays red.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

from policies.mechanism.copy_queue import CopyQueue
from policies.mechanism.residency import Residency
from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertId
from policies.parts.exact_assignment import ExactAssigner
from policies.protocols import Budget, Composition
from policies.registry import SYSTEMS, policy_names
from realrun.execution.call_log import LOGGED, LoggedSession, replay
from sim.machine.plan_costs import PlanCost
from sim.runs.bounds import lower_bound
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.invariants.free_compositions import free_question
from tests.kit.broken import law_8_exact
from tests.kit.depth import examples
from trilane.testing.laws import check_all
from trilane.testing.laws_of_runs import check_run, law_7_no_foresight, law_8_bound, law_9_scaling
from trilane.testing.log import log_of
from trilane.testing.random_worlds import scaled, worlds
from trilane.testing.work_conservation import law_5_background_copies
from trilane.testing.worlds import PlayedWorld, World, play

KEEPS_ROUTING = [name for name in policy_names() if not SYSTEMS[name].needs.changes_routing]
NO_FUTURE = [name for name in policy_names() if not SYSTEMS[name].needs.future]

some = settings(max_examples=examples(62), derandomize=True, suppress_health_check=list(HealthCheck))


# --- what spans show --------------------------------------------------------------------------------------------------


@settings(some, max_examples=examples(125))
@given(worlds())
def test_laws_1_to_5_and_12(world: World) -> None:
    check_run(world, play(world))


@some
@given(worlds(), st.integers(1, 60))
def test_all_of_them_hold_where_the_host_works_between_layers_and_on_the_caches(world: World, layer_ns: int) -> None:
    played = play(_with_host_work(world, layer_ns))
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
    law_5_background_copies(played.spans, played.session)


def _with_host_work(world: World, ns: int) -> World:
    decisions = replace(world.costs.plan_costs, observe={"default": PlanCost(ns, 1)})
    return replace(world, costs=replace(world.costs, layer_ns=ns, plan_costs=decisions))


# --- laws about several runs (6: tests/conformance) -------------------------------------------------------------------


@some
@given(worlds(NO_FUTURE, min_decode=2), st.integers(0, 2**32 - 1))
def test_law_7_no_foresight(world: World, seed: int) -> None:
    law_7_no_foresight(world, seed)


@some
@given(worlds(KEEPS_ROUTING))
def test_law_8_no_run_beats_the_lower_bound(world: World) -> None:
    law_8_bound(world, lower_bound)


@some
@given(worlds())
def test_law_8_the_exact_assignment_is_never_worse(world: World) -> None:
    law_8_exact(world, ExactAssigner())


@some
@given(worlds(NO_FUTURE, contention=False), st.integers(2, 9))
def test_law_9_scaling_is_exact_without_contention(world: World, c: int) -> None:
    law_9_scaling(world, c)
    law_9_scaling(_with_host_work(world, c), c)


@some
@given(worlds(contention=True), st.integers(2, 9))
def test_law_9_scaling_is_close_with_contention(world: World, c: int) -> None:
    """Each of the spans that share the DRAM so far may have added c ns: times are rounded up to whole ns.

    The GPU shares nothing here. Where it does, what slows a span down is looked up once, as it is reserved: whether
    that is before or after another event may turn on a ns, and then no number of roundings bounds the difference.
    """
    alone = dict.fromkeys(("gpu_permille", "gpu_with_cpu_permille", "cpu_with_gpu_permille"), 1000)
    world = replace(world, costs=replace(world.costs, **alone))
    one, times_c = play(world), play(replace(world, costs=scaled(world.costs, c)))
    assume(_calls(one) == _calls(times_c))
    ends = [_ends_by_name(played) for played in (one, times_c)]
    assume(ends[0].keys() == ends[1].keys())
    shared = np.sort(one.spans.end_ns[one.spans.lane.isin(["cpu", "h2d"]) & (one.spans.end_ns > one.spans.start_ns)])
    for name, end in ends[0].items():
        earlier = int(np.searchsorted(shared, end, side="right"))
        assert abs(ends[1][name] - c * end) <= c * earlier, name


def _calls(played: PlayedWorld) -> list[Any]:
    return [(place, plan._replace(makespan_ns=0)) for place, plan in played.session.plans.items()]


def _ends_by_name(played: PlayedWorld) -> dict[tuple[object, ...], int]:
    """The end of every span, by what it did for the how-manieth time."""
    ends: dict[tuple[object, ...], int] = {}
    for span in log_of(played.spans).spans:
        name = (span.lane, span.kind, span.step, span.layer, span.target_layer, span.expert)
        count = 0
        while (*name, count) in ends:
            count += 1
        ends[(*name, count)] = span.end_ns
    return ends


# --- Duties of the mechanism to a link that is given its next copy before the present one has ended -------------------


T = TypeVar("T")


class WatchedSession(LoggedSession):
    """Passes every logged call through ``_watch``."""

    def _watch(self, method: Callable[..., T], *given: Any) -> T:
        return method(self, *given)


def watched(method: Callable[..., T]) -> Callable[..., T]:
    return wraps(method)(lambda session, *given: session._watch(method, *given))


for _name in LOGGED:
    setattr(WatchedSession, _name, watched(getattr(LoggedSession, _name)))


class EagerSession(WatchedSession):
    """Asked for the second copy at moments drawn at random; what must hold is checked after every call."""

    def __init__(self, policy: Composition, world: World, rng: random.Random) -> None:
        self.budget = budget_of(world)
        super().__init__(policy, self.budget, world.costs.experts)
        self.rng, self.eagerness = rng, rng.choice((0.1, 0.5, 1))
        self.behind: Copy | None = None
        self.demand_may_start = True
        self.active: set[ExpertId] = set()  # of the layer at work, where this session has them computed
        self.capacity = [free + held for free, held in zip(self.residency._free, self._held(), strict=True)]
        self.slots = {"demand": policy.demand_slots, "prefetch": policy.prefetch_slots}
        self.quota: dict[ExpertId, str] = {}  # of each expert that was copied into a staging slot
        self.seen: Counter[str] = Counter()

    def next_copy(self, demand: bool = True) -> Copy | None:
        self.demand_may_start = demand
        copy, self.behind = self.behind or super().next_copy(demand), None
        self._ask_ahead()
        return copy

    def _ask_ahead(self) -> None:
        """Perhaps ask for the copy behind the one in flight."""
        if self.behind is None and len(self._copies.in_flight) == 1 and self.rng.random() < self.eagerness:
            self.behind = super().next_copy(self.demand_may_start)

    def _watch(self, method: Callable[..., T], *given: Any) -> T:
        flying = [copy.key for copy in self._copies.in_flight]
        there = [set(experts) for experts in self.residency.resident]
        answer = super()._watch(method, *given)
        self._follow(method.__name__, answer)
        if isinstance(answer, Copy):
            self._check_victims(answer, flying, there)
        self._check_memory()
        if method.__name__ != "next_copy":
            self._ask_ahead()
        return answer

    def _follow(self, call: str, answer: Any) -> None:
        if call == "plan_layer":
            self.active = {self.residency.ids[answer.layer][e] for e in (*answer.gpu, *answer.cpu)}
            self.demand_may_start = False  # until the plan takes effect
        elif call in ("foresee", "end_layer"):
            self.demand_may_start = True
        if call in ("end_layer", "end_step"):
            self.active = set()
            self.seen["adopted"] += len(answer.adopted)
        elif isinstance(answer, Copy):
            if answer.into == "staging":
                self.quota[answer.key] = "prefetch" if answer.kind == "prefetch" else "demand"
            self.seen[f"{answer.kind} behind"] += len(self._copies.in_flight) > 1

    # --- what must hold -------------------------------------------------------------------------------------------

    def _check_victims(self, copy: Copy, flying: list[ExpertId], there: list[set[int]]) -> None:
        for victim in copy.victims:
            assert victim not in flying, f"{victim} is in flight, and leaves for {copy}"
            assert victim.expert in there[victim.layer], f"{victim} leaves for {copy}, but is not there"
            assert victim not in self.active, f"{victim} is active in the layer at work, and leaves for {copy}"

    def _check_memory(self) -> None:
        residency, in_flight = self.residency, self._copies.in_flight
        flying = [copy.key for copy in in_flight]
        assert len(set(flying)) == len(flying), f"an expert is in flight twice: {in_flight}"
        assert not any(map(residency.holds, flying)), f"an expert is copied that is there: {in_flight}"
        held = self._held(*(copy for copy in in_flight if copy.into == "cache"))
        most = self.budget.cache_bytes
        assert sum(held) <= most, f"{held} of {most} bytes of the cache are held, with {in_flight} in flight"
        for group, (bytes, capacity) in enumerate(zip(held, self.capacity, strict=True)):
            assert bytes <= capacity, f"{bytes} of {capacity} bytes are held in group {group}, {in_flight} in flight"
        staged = [residency.ids[layer][expert] for layer, experts in enumerate(residency.staged) for expert in experts]
        taken = Counter(self.quota[id] for id in [*staged, *(c.key for c in in_flight if c.into == "staging")])
        assert all(taken[quota] <= slots for quota, slots in self.slots.items()), f"{taken} of {self.slots} slots"

    def _held(self, *loading: Copy) -> list[int]:
        """Bytes of the cache by group: residents and copies on their way to it."""
        residency = self.residency
        held = [0] * len(residency._free)
        for layer, experts in enumerate(residency.resident):
            held[residency.group_of[layer]] += residency.expert_bytes[layer] * len(experts)
        for copy in loading:
            held[residency.group_of[copy.key.layer]] += copy.expert_bytes
        return held


def budget_of(world: World) -> Budget:
    sizes = tuple(costs.expert_bytes for costs in world.costs.experts)
    return Budget(world.trace.shape.experts, sizes, world.cache_bytes)


def eagerly(seed: int) -> EagerSession:
    """A free composition, simulated; checked on the way."""
    world, policy, demand = free_question(seed)
    session = EagerSession(policy, world, random.Random(f"eager {seed}"))
    Timeline(session, world.costs, demand, TokenBytes(16, 8)).run()
    pool_of_unequal = session.residency.pooled and not session.residency.uniform
    session.seen["behind in a pool of unequal experts"] += pool_of_unequal and session.seen["demand behind"]
    return session


def eagerly_often() -> Counter[str]:
    """Observations in many of these runs."""
    return sum((eagerly(seed).seen for seed in range(200)), Counter[str]())


links = settings(
    max_examples=examples(37), derandomize=True, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@links
@example(1001878)  # a prefetch that would take the room of a load that waits for its plan
@given(st.integers(0, 2**32 - 1))
def test_laws_4_and_10_hold_with_two_copies_in_flight(seed: int) -> None:
    """And no expert is copied twice; a fresh session gives the same answers to the same calls."""
    log = eagerly(seed).log
    world, policy, _ = free_question(seed)
    assert replay(log, Session(policy, budget_of(world), world.costs.experts)) is None


def test_these_sessions_have_copies_of_all_kinds_in_flight_behind_others() -> None:
    """The law above is about something."""
    assert eagerly_often().keys() == {
        "demand behind", "prefetch behind", "swap behind", "adopted", "behind in a pool of unequal experts",
    }


# --- broken twins -----------------------------------------------------------------------------------------------------


def test_a_broken_queue_that_forgets_what_is_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CopyQueue._next_background

    def forgetful(self: CopyQueue, pinned: Set[ExpertId]) -> Copy | None:
        flying, self.flying = self.flying, ()
        copy = sound(self, pinned)
        self.flying = flying
        return copy

    monkeypatch.setattr(CopyQueue, "_next_background", forgetful)
    with pytest.raises(AssertionError, match="an expert is in flight twice"):
        eagerly_often()


def test_a_broken_memory_with_too_many_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free, self._room = ([bytes + 600 for bytes in each] for each in (self._free, self._room))

    monkeypatch.setattr(Residency, "__init__", generous)
    with pytest.raises(AssertionError, match="bytes of the cache are held"):
        eagerly_often()
