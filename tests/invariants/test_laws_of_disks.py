"""Law 13 of docs/design.md, and all others, where a disk holds what the host's memory has no room for."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.mechanism.host_keeping import CacheKeeper
from policies.mechanism.host_tier import HostTier, Read
from policies.mechanism.views import ExpertId, PolicyError
from policies.protocols import Composition
from policies.registry import SYSTEMS, policy_names
from realrun.execution.call_log import Difference, LoggedSession, replay
from sim.runs.bounds import lower_bound
from sim.runs.demand import StepDemand
from sim.timeline.disk_lane import DiskLane, ReadExperts
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.invariants.free_compositions import free_question, with_free_host
from tests.invariants.test_laws import budget_of
from tests.kit.depth import examples
from trilane.testing.host_memory import law_5_reads, law_13_host_memory
from trilane.testing.laws import check_all
from trilane.testing.laws_of_runs import check_run, law_8_bound
from trilane.testing.random_worlds import fixed_world, with_disk, worlds
from trilane.testing.work_conservation import law_5_background_copies
from trilane.testing.worlds import PlayedWorld, World, host_of, play, play_policy

some = settings(max_examples=examples(62), derandomize=True, suppress_health_check=list(HealthCheck))
KEEPS_ROUTING = [name for name in policy_names() if not SYSTEMS[name].needs.changes_routing]
seeds = st.integers(0, 2**32 - 1)


def above_disk(world: World, seed: int) -> World:
    return with_disk(world, random.Random(seed))


@settings(some, max_examples=examples(125))
@given(worlds(), seeds)
def test_laws_1_to_5_12_and_13(world: World, seed: int) -> None:
    world = above_disk(world, seed)
    check_run(world, play(world))


@some
@given(seeds)
def test_all_of_them_hold_for_any_composition(seed: int) -> None:
    world, policy, demand = free_question(seed)
    world = above_disk(world, seed)
    played = play_policy(policy, world, demand)
    check_all(
        played.log, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs,
        world.host_bytes,
    )
    law_5_background_copies(played.log, played.session)


def free_host(seed: int, declines: float) -> tuple[World, Composition, list[StepDemand]]:
    """A free composition that keeps the host's memory itself, above a disk, with room for two experts or more."""
    world, policy, demand = free_question(seed)
    shape, rng = world.trace.shape, random.Random(seed)
    policy = with_free_host(policy, rng, shape.moe_layers, shape.experts, declines)
    return replace(above_disk(world, seed), keeping="experts"), policy, demand


@settings(some, max_examples=examples(125))
@given(seeds)
def test_all_of_them_hold_for_any_policy_of_the_hosts_memory(seed: int) -> None:
    world, policy, demand = free_host(seed, 0)
    played = play_policy(policy, world, demand)
    check_all(
        played.log, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs,
        world.host_bytes,
    )


@some
@given(seeds)
def test_a_cache_that_gives_nothing_up_leaves_room_for_two(seed: int) -> None:
    """It ends, and holds no more than there is room for, though the disk waits where members could leave."""
    world, policy, demand = free_host(seed, 1)
    law_13_host_memory(play_policy(policy, world, demand).spans, world.host_bytes or 0)


def replayed(seed: int, kept: bool) -> Difference | None:
    """The first other answer of a log with reads, replayed in a fresh session. ``kept``: a policy keeps the host's
    memory."""
    def logged() -> tuple[LoggedSession, World, list[StepDemand]]:
        world, policy, demand = free_host(seed, 0) if kept else free_question(seed)
        world = world if kept else above_disk(world, seed)
        return LoggedSession(policy, budget_of(world), world.costs.experts, host_of(world)), world, demand

    session, world, demand = logged()
    Timeline(session, world.costs, demand, TokenBytes(16, 8)).run()
    return replay(session.log, logged()[0])


@pytest.mark.parametrize("kept", [False, True])
@some
@given(seed=seeds)
def test_law_10_a_log_with_reads_replayed_in_a_fresh_session_gives_identical_answers(seed: int, kept: bool) -> None:
    assert replayed(seed, kept) is None


@some
@given(worlds(KEEPS_ROUTING), seeds)
def test_law_8_no_run_beats_the_bound_that_knows_the_disk(world: World, seed: int) -> None:
    world = above_disk(world, seed)
    law_8_bound(world, lambda demand, costs, budget: lower_bound(demand, costs, budget, None, world.host_bytes))


@some
@given(worlds(), seeds)
def test_a_host_with_room_for_all_experts_changes_no_other_span(world: World, seed: int) -> None:
    """Where the GPU holds none of them at first: the host does not hold those before they are needed there."""
    sizes = [costs.expert_bytes for costs in world.costs.experts]
    total = max(sum(sizes) * world.trace.shape.experts, 2 * max(sizes))  # there is room for two at least
    world = replace(above_disk(world, seed), cache_bytes=0, keeping="experts", host_bytes=total)
    if world.system.needs.narrow_share is not None:
        return  # narrow copies take more
    with_room = play(world).spans
    without = play(replace(world, host_bytes=None)).spans
    on_lanes = with_room[with_room.lane != "disk"].astype(str).reset_index(drop=True)
    assert on_lanes.equals(without.astype(str).reset_index(drop=True))


# --- broken twins -----------------------------------------------------------------------------------------------------


SMALL = [  # memories of the host for two to four experts
    replace(above_disk(fixed_world(policy), seed), host_bytes=320 + 40 * seed, keeping="experts")
    for policy in ("naive-cpu", "fiddler", "on-demand", "dali") for seed in range(4)
]
SMALL += [  # and a quick disk, which waits for the CPU to be done with experts
    replace(world, costs=world.costs.map_experts(lambda costs: costs._replace(read_ns=1))) for world in SMALL[:4]
]


def _caught(message: str) -> None:
    """The law finds the offence in one of these worlds."""
    found = []
    for world in SMALL:
        try:
            _check(world)
        except AssertionError as error:
            found.append(str(error))
    assert any(re.match(message, text) for text in found), found


def _check(world: World) -> PlayedWorld:
    played = play(world)
    check_all(
        played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs,
        played.host_bytes,
    )
    return played


def test_these_worlds_read_and_drop_experts_and_wait_for_room() -> None:
    spans = pd.concat([_check(world).spans for world in SMALL])
    assert {"read", "read_ahead", "drop", "keep"} <= set(spans.kind)
    assert (spans.start_ns > spans.ready_ns)[spans.kind == "read"].any()


def test_a_broken_host_with_too_much_room_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HostTier.__init__
    monkeypatch.setattr(HostTier, "__init__", lambda self, size, *given: sound(self, size + 160, *given))
    _caught("law 13: the host holds .* bytes at")


def test_a_broken_host_that_drops_what_is_in_use_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HostTier._read

    def heedless(self: HostTier, *given: Any) -> Read | None:
        users, self._users = self._users, {}
        read = sound(self, *given)
        self._users = users
        return read

    monkeypatch.setattr(HostTier, "_read", heedless)
    _caught("law 13: the host does not hold the expert of|the run has stopped")


def test_a_broken_host_whose_experts_are_used_before_they_are_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HostTier.holds

    def hasty(self: HostTier, key: ExpertId) -> bool:
        return sound(self, key) or (self.reading is not None and self.reading.key == key)

    monkeypatch.setattr(HostTier, "holds", hasty)
    _caught("law 13: the host does not hold the expert of")


def test_a_broken_disk_that_reads_two_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = DiskLane._begin

    def doubly(self: DiskLane, read: Read) -> None:
        sound(self, read)
        rows = self.recorder.rows
        rows.append(("disk", *([self.clock.now] * 2), self.clock.now + 1, "read", *rows[-1][5:]))

    monkeypatch.setattr(DiskLane, "_begin", doubly)
    _caught("law 3: disk does two things at once")


@pytest.mark.parametrize(("owner", "deaf"), [(ReadExperts, "end_batch"), (DiskLane, "start_queued")])
def test_a_broken_disk_that_sleeps_is_caught(owner: type, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wakes it when room has been made, or when a plan needs experts."""
    sound, wake = getattr(owner, deaf), DiskLane.wake

    def sleeps(self: Any, *given: Any) -> None:
        monkeypatch.setattr(DiskLane, "wake", lambda self: None)
        sound(self, *given)
        monkeypatch.setattr(DiskLane, "wake", wake)

    monkeypatch.setattr(owner, deaf, sleeps)
    _caught("law 5: the disk rests|the run has stopped")


def test_a_broken_log_of_a_host_that_never_held_what_is_read_there_is_caught() -> None:
    played = _check(SMALL[0])
    with pytest.raises(AssertionError, match=r"law 13: the host holds no expert, but .* reads one there"):
        law_13_host_memory(played.spans[played.spans.lane != "disk"], played.host_bytes or 0)


# --- and of a memory that the policy keeps ----------------------------------------------------------------------------


def _caught_in_kept(message: str) -> None:
    """The laws find the offence in one of twelve worlds whose policies keep the host's memory."""
    found = []
    for seed in range(12):
        world, policy, demand = free_host(seed, 0)
        try:
            played = play_policy(policy, world, demand)
            law_13_host_memory(played.log, world.host_bytes or 0)
            law_5_reads(played.log, world.host_bytes or 0)
        except (AssertionError, PolicyError) as error:
            found.append(str(error))
    assert any(re.match(message, text) for text in found), found


def test_a_keeper_that_gives_up_what_is_in_use_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CacheKeeper.victims
    monkeypatch.setattr(CacheKeeper, "victims", lambda self, incoming, in_use: sound(self, incoming, ()))
    _caught_in_kept("law 13: the host does not hold the expert of")


def test_a_keeper_that_gives_up_too_little_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheKeeper, "victims", lambda self, incoming, in_use: iter(self._passing))
    _caught_in_kept("law 5: the disk rests|law 13: the host does not hold|the run has stopped")


def test_a_keeper_that_does_not_tell_the_cache_what_has_left_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: CacheKeeper, key: ExpertId) -> None:
        del self._members[key]

    monkeypatch.setattr(CacheKeeper, "_expel", silent)
    _caught_in_kept("host cache .* chose .* as a victim: expected a member")


def test_a_keeper_whose_order_is_not_a_function_of_the_calls_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 10: it goes on where the last run has stopped."""
    sound, chance = CacheKeeper.victims, random.Random(0)

    def by_chance(self: CacheKeeper, *given: Any) -> Iterator[ExpertId]:
        victims = [*sound(self, *given)]
        return iter(chance.sample(victims, len(victims)))

    monkeypatch.setattr(CacheKeeper, "victims", by_chance)
    assert any(replayed(seed, True) for seed in range(12))
