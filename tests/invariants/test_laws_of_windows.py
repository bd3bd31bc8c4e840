"""All laws of docs/design.md with pools of threads, copies that the GPU makes itself, and windows; and broken twins."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.mechanism.session import Session
from policies.registry import SYSTEMS, policy_names
from sim.costs.cost_table import CostTable, DraftWork
from sim.runs.bounds import lower_bound
from sim.runs.vocabulary import FROM_EXPERTS
from sim.timeline.copy_lane import CopyLane
from sim.timeline.gpu_lane import GpuLane
from tests.kit.depth import examples
from trilane.testing.laws_of_runs import check_run, law_2_swaps, law_8_bound, law_9_scaling
from trilane.testing.pools import law_2_phases, law_3_kernel_copies
from trilane.testing.random_worlds import SLOT, Size, with_disk, with_pool, worlds
from trilane.testing.worlds import World, play

PARTIAL = [name for name in policy_names() if any(kind in FROM_EXPERTS for kind, _ in SYSTEMS[name].needs.forecasts)]
NAMES = [name for name in policy_names() if name not in PARTIAL]
KEEPS_ROUTING = [name for name in NAMES if not SYSTEMS[name].needs.changes_routing]
NO_FUTURE = [name for name in NAMES if not SYSTEMS[name].needs.future]
SEEDS = st.integers(0, 2**32 - 1)

some = settings(max_examples=examples(62), derandomize=True, suppress_health_check=list(HealthCheck))


@settings(some, max_examples=examples(125))
@given(worlds(NAMES), SEEDS)
def test_laws_1_to_5_and_12_with_pools_and_copies_by_the_gpu(world: World, seed: int) -> None:
    world = with_pool(world, random.Random(seed))
    check_run(world, play(world))


@some
@given(worlds(NAMES), SEEDS)
def test_laws_1_to_5_12_and_13_hold_above_a_disk(world: World, seed: int) -> None:
    world = with_disk(with_pool(world, random.Random(seed)), random.Random(seed + 1))
    check_run(world, play(world))


@some
@given(worlds(NAMES, min_decode=1), SEEDS)
def test_they_hold_in_windows(world: World, seed: int) -> None:
    assume(world.batch == 1 and all(kind != "token" for kind, _ in world.system.needs.forecasts))
    costs = replace(world.costs, draft=DraftWork(1, world.trace.shape.top_k))
    rng = random.Random(seed)
    world = with_pool(replace(world, costs=costs, draft_shares=(0.6, 0.3)), rng)
    check_run(world, play(replace(world, rejected=rng.choice(("recorded", "drawn")))))


@some
@given(worlds(KEEPS_ROUTING), SEEDS)
def test_law_8_no_run_beats_the_lower_bound(world: World, seed: int) -> None:
    law_8_bound(with_pool(world, random.Random(seed)), lower_bound)


@some
@given(worlds(NO_FUTURE, contention=False), SEEDS, st.integers(2, 9))
def test_law_9_scaling(world: World, seed: int, c: int) -> None:
    law_9_scaling(with_pool(world, random.Random(seed)), c)


# --- broken twins -----------------------------------------------------------------------------------------------------


def _world() -> World:
    """A policy that loads some experts and leaves others to the CPU."""
    world = Size("twins", top_k=6, cache_bytes=6 * SLOT).world(SYSTEMS["strata"], pcie_share=0.6)
    return replace(world, costs=replace(world.costs, kernel_copies=True, permille_before_barrier=600, barrier_ns=2))


def test_the_world_of_the_twins_has_a_pool_and_copies_by_the_gpu() -> None:
    played = play(_world())
    check_run(_world(), played)
    assert {"gate_up", "fetch"} <= set(played.spans.kind)
    assert played.spans[played.spans.kind == "fetch"].groupby(["step", "layer"]).size().max() > 1


@pytest.mark.parametrize("order", [(1, 0), (0, 1, 0, 1)], ids=["second products first", "in two rounds"])
def test_a_pool_without_a_barrier_is_caught(order: tuple[int, ...]) -> None:
    world = _world()
    spans = play(world).spans
    kinds = spans.kind.astype(str).copy()
    for _, batch in spans[spans.lane == "cpu"].groupby(["step", "layer"]):
        turns = [order[place * len(order) // len(batch)] for place in range(len(batch))]
        kinds[batch.index] = [("gate_up", "expert")[turn] for turn in turns]
    with pytest.raises(AssertionError, match="law 2: the pool"):
        law_2_phases(spans.assign(kind=kinds), world.costs)


def test_spans_of_a_pool_where_there_is_none_are_caught() -> None:
    world = _world()
    with pytest.raises(AssertionError, match="law 2: there is no pool"):
        law_2_phases(play(world).spans, replace(world.costs, permille_before_barrier=None))


@pytest.mark.parametrize("more_ns", [None, 1], ids=["the GPU stays free", "it takes longer"])
def test_copies_that_do_not_take_the_gpu_as_long_as_the_link_are_caught(
    more_ns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = GpuLane.fetch

    def broken(self: GpuLane, start_ns: int, end_ns: int, *rest: Any) -> None:
        if more_ns is not None:
            sound(self, start_ns, end_ns + more_ns, *rest)

    monkeypatch.setattr(GpuLane, "fetch", broken)
    with pytest.raises(AssertionError, match="law 3: the GPU has made"):
        law_3_kernel_copies(play(_world()).spans, _world().costs)


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_does_not_wait_for_swaps_is_caught(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size("swaps", experts=12, top_k=3, decode=24, cache_bytes=9 * SLOT)
    world = size.world(SYSTEMS["strata"], pcie_share=0.6, every=1, decay=1.0)
    played = play(world)
    assert (played.spans.kind == "swap").sum() >= 2
    law_2_swaps(played)
    if not waits:
        monkeypatch.setattr(CopyLane, "await_rest", lambda _: None)
        with pytest.raises(AssertionError, match=r"law 2: step \d+ is launched at \d+ ns, while the link has"):
            law_2_swaps(play(world))


def sharing(costs: CostTable) -> CostTable:
    return costs.map_experts(lambda expert: expert._replace(first_gpu_ns=30))


def test_one_call_for_all_copied_experts_is_quicker_than_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "load_may_start", property(lambda self: False))
    world = _world()
    world = replace(world, costs=sharing(world.costs))
    alone = play(world)
    check_run(world, alone)  # lawful, as calls may be small,
    monkeypatch.undo()
    together = play(world)
    assert together.spans.end_ns.max() < alone.spans.end_ns.max(), "but each of them has kernels of its own"
