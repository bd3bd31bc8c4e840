"""The laws of DESIGN section 6 on the real engine, for every policy, in random worlds.

Laws 10 and 11 need the executor and are tested with it. The same worlds are drawn every time (``derandomize``), so that
a red test stays red.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.assigners import CostRule, LoadAll, ResidentOrCpu
from policies.dali import BeamAssigner, GreedyAssigner
from policies.exact_assignment import ExactAssigner
from policies.protocols import Assigner
from policies.registry import SYSTEMS, policy_names
from policies.views import Assignment, LayerView
from sim.bounds import LowerBound, lower_bound
from sim.cost_table import CostTable
from sim.costs import scaled
from sim.demand import StepDemand
from sim.metrics import layer_frame, metrics_of
from tests.invariants.background import law_5_background_copies
from tests.invariants.laws import (
    check_all,
    law_1_conservation,
    law_2_causality,
    law_3_exclusivity,
    law_4_capacity,
    law_5_work_conservation,
    law_12_accounting,
    routings_of,
)
from tests.invariants.log import log_of
from tests.invariants.worlds import Played, SpoiltAssigner, World, digests, fixed_world, part, play, worlds
from traces.trace import Trace

ROOT = Path(__file__).parents[2]
KEEPS_ROUTING = [name for name in policy_names() if not SYSTEMS[name].needs.changes_routing]
NO_FUTURE = [name for name in policy_names() if not SYSTEMS[name].needs.future]

some = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# --- what spans show --------------------------------------------------------------------------------------------------


@some
@given(worlds())
def test_law_1_conservation(world: World) -> None:
    played = play(world)
    law_1_conservation(played.spans, played.routings)
    if not world.needs.changes_routing:
        assert played.routings == routings_of(played.demand)


@some
@given(worlds())
def test_law_2_causality(world: World) -> None:
    law_2_causality(play(world).spans)


@some
@given(worlds())
def test_law_3_exclusivity(world: World) -> None:
    law_3_exclusivity(play(world).spans)


@some
@given(worlds())
def test_law_4_capacity(world: World) -> None:
    played = play(world)
    law_4_capacity(played.spans, played.budget_bytes)


@some
@given(worlds())
def test_law_5_work_conservation(world: World) -> None:
    played = play(world)
    law_5_work_conservation(played.spans, played.demand_slots)
    law_5_background_copies(played.spans, played.session)


@some
@given(worlds())
def test_law_12_accounting(world: World) -> None:
    law_12_accounting(play(world).spans, world.batch)


@some
@given(worlds())
def test_law_12_hits_counted_from_spans_are_those_that_the_session_saw(world: World) -> None:
    """But for copies that end in the very ns in which the plan begins: hits on paper, in the run perhaps late."""
    played = play(world)
    hits = {(row.step, row.layer): row.hits for row in layer_frame(played.spans).itertuples()}
    arrivals = set(played.spans.end_ns[played.spans.kind.isin(["demand", "swap", "prefetch"])])
    log = log_of(played.spans)
    for place, plan in played.session.plans.items():
        ties = log.routed(place) in arrivals
        assert 0 <= hits[place] - len(plan.resident) <= ties, place


@pytest.mark.parametrize("policy", policy_names())
def test_laws_1_to_5_and_12_hold_for_every_policy(policy: str) -> None:
    """Whatever the random worlds above leave out."""
    world = fixed_world(policy)
    played = play(world)
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots)
    law_5_background_copies(played.spans, played.session)


# --- laws about several runs ------------------------------------------------------------------------------------------


def test_law_6_determinism_byte_identical_spans_in_other_processes() -> None:
    """Two processes with different hash seeds, and this one."""
    found = [digests_of_a_process(seed, "tests.invariants.worlds") for seed in ("1", "2")]
    assert found[0] == found[1] == digests()


def digests_of_a_process(hash_seed: str, module: str) -> dict[str, str]:
    """What ``digests()`` of a module answers in another process."""
    code = f"import json; from {module} import digests; print(json.dumps(digests()))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(answer.stdout))


@some
@given(worlds(NO_FUTURE, min_decode=2), st.integers(0, 2**32 - 1))
def test_law_7_no_foresight(world: World, seed: int) -> None:
    law_7_no_foresight(world, seed)


def law_7_no_foresight(
    world: World, seed: int, changes: Callable[[World], dict[str, Any] | None] = lambda _: None
) -> None:
    """Another future from some decode step on changes no decision before it."""
    cut = 1 + seed % 2
    other = replace(world, trace=_other_future(world.trace, cut, seed))
    one, two = play(world, changes(world)), play(other, changes(other))
    steps = sum(step.phase == "prefill" for step in one.demand) + cut - 1
    assert _decisions(one, steps) == _decisions(two, steps), "law 7: what comes later changed a decision"
    ends = one.spans.end_ns[(one.spans.step == steps - 1) & (one.spans.kind == "wait")].max() if steps else 0
    spans = [played.spans[played.spans.end_ns <= ends] for played in (one, two)]
    assert spans[0].to_csv(index=False) == spans[1].to_csv(index=False)


def _other_future(trace: Trace, cut: int, seed: int) -> Trace:
    """The same trace, but from decode token ``cut`` of every sequence on the experts have changed places."""
    decode = trace.phase == 1
    rank = np.array([np.sum(decode[:row] & (trace.sequence[:row] == trace.sequence[row])) for row in range(len(trace))])
    later = decode & (rank >= cut - 1)
    places = np.random.default_rng(seed).permutation(trace.shape.experts).astype(np.int16)
    tensors = {name: array.copy() for name, array in trace.tensors().items()}
    for name, array in tensors.items():
        if name.endswith("ids"):
            array[later] = np.where(array[later] >= 0, places[array[later]], -1)
    if "scores" in tensors:
        tensors["scores"][np.ix_(later, range(trace.shape.moe_layers), places)] = trace.scores[later]  # type: ignore[index]
    return Trace.from_tensors(trace.shape, tensors, trace.provenance)


def _decisions(played: Played, steps: int) -> list[Any]:
    plans, foresights = played.session.plans, played.session.foresights
    return [(place, plan, foresights.get(place)) for place, plan in plans.items() if place[0] < steps]


@some
@given(worlds(KEEPS_ROUTING))
def test_law_8_no_run_beats_the_lower_bound(world: World) -> None:
    law_8_bound(world, lower_bound)


def law_8_bound(world: World, bound_of: Callable[[list[StepDemand], CostTable, int], LowerBound]) -> None:
    """Neither the first token nor the mean of the others comes before the bound."""
    played = play(world)
    bound, metrics = bound_of(played.demand, world.costs, played.budget_bytes), metrics_of(played.spans, world.batch)
    assert bound.ttft_ns is not None
    assert metrics.ttft_ms is not None
    assert bound.ttft_ns <= round(metrics.ttft_ms * 1e6), "law 8: the first token beats its bound"
    if bound.tpot_ns is not None:
        assert bound.tpot_ns <= (metrics.tpot_ms or 0) * 1e6 + 1e-6, "law 8: decoding beats its bound"


@some
@given(worlds())
def test_law_8_the_exact_assignment_is_never_worse(world: World) -> None:
    law_8_exact(world, ExactAssigner())


def law_8_exact(world: World, exact: Assigner) -> None:
    """In the objective that all assigners share, on every layer that some policy comes to."""
    others = [GreedyAssigner(), BeamAssigner(), CostRule(), LoadAll(), ResidentOrCpu()]

    def compare(view: LayerView, chosen: Assignment) -> Assignment:
        best = exact.assign(view).makespan_ns
        for other in others:
            name = type(other).__name__
            assert best <= other.assign(view).makespan_ns, f"law 8: {name} beats the exact one on {view}"
        return chosen

    play(world, {"assigner": SpoiltAssigner(part(world, "assigner"), compare)})


@some
@given(worlds(NO_FUTURE, contention=False), st.integers(2, 9))
def test_law_9_scaling_is_exact_without_contention(world: World, c: int) -> None:
    law_9_scaling(world, c)


def law_9_scaling(world: World, c: int) -> None:
    """All costs times ``c``: all times times ``c``."""
    one, times_c = play(world), play(replace(world, costs=scaled(world.costs, c)))
    expected = one.spans.copy()
    for column in ("ready_ns", "start_ns", "end_ns"):
        expected[column] *= c
    pd.testing.assert_frame_equal(expected, times_c.spans)


@some
@given(worlds(contention=True), st.integers(2, 9))
def test_law_9_scaling_is_close_with_contention(world: World, c: int) -> None:
    """Each of the spans that share the DRAM so far may have added c ns: times are rounded up to whole ns."""
    one, times_c = play(world), play(replace(world, costs=scaled(world.costs, c)))
    assume(_calls(one) == _calls(times_c))
    ends = [_ends_by_name(played) for played in (one, times_c)]
    assume(ends[0].keys() == ends[1].keys())
    shared = np.sort(one.spans.end_ns[one.spans.lane.isin(["cpu", "h2d"]) & (one.spans.end_ns > one.spans.start_ns)])
    for name, end in ends[0].items():
        earlier = int(np.searchsorted(shared, end, side="right"))
        assert abs(ends[1][name] - c * end) <= c * earlier, name


def _calls(played: Played) -> list[Any]:
    return [(place, plan._replace(makespan_ns=0)) for place, plan in played.session.plans.items()]


def _ends_by_name(played: Played) -> dict[tuple[object, ...], int]:
    """The end of every span, by what it did for the how-manieth time."""
    ends: dict[tuple[object, ...], int] = {}
    for span in log_of(played.spans).spans:
        name = (span.lane, span.kind, span.step, span.layer, span.target_layer, span.expert)
        count = 0
        while (*name, count) in ends:
            count += 1
        ends[(*name, count)] = span.end_ns
    return ends
