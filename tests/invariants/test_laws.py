"""The laws of docs/design.md on the real engine, for all policies together, in random worlds.

What each policy by itself is held to is in tests/conformance; laws 10 and 11 need the executor. The same worlds are
drawn every time (``derandomize``), so that a red test stays red.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.parts.exact_assignment import ExactAssigner
from policies.registry import SYSTEMS, policy_names
from sim.machine.plan_costs import PlanCost
from sim.runs.bounds import lower_bound
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
