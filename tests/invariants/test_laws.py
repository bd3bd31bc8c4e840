"""The laws of DESIGN section 6 on the real engine, for every policy, in random worlds; and broken twins of its parts.

Laws 10 and 11 need the executor and are tested with it. The same worlds are drawn every time (``derandomize``), so that
a red test stays red.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Container
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
from policies.registry import SYSTEMS, policy_names
from policies.residency import Residency
from policies.views import Assignment, ExpertId, LayerView, PolicyError
from sim.bounds import lower_bound
from sim.costs import scaled
from sim.cpu_lane import CpuLane
from sim.lanes import Lane
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
from tests.invariants.worlds import Played, World, digests, fixed_world, play, worlds
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
    found = [_digests_of_a_process(seed) for seed in ("1", "2")]
    assert found[0] == found[1] == digests()


def _digests_of_a_process(hash_seed: str) -> dict[str, str]:
    code = "import json; from tests.invariants.worlds import digests; print(json.dumps(digests()))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(answer.stdout))


@some
@given(worlds(NO_FUTURE, min_decode=2), st.integers(0, 2**32 - 1))
def test_law_7_no_foresight(world: World, seed: int) -> None:
    """Another future from some decode step on changes no decision before it."""
    cut = 1 + seed % 2
    other = replace(world, trace=_other_future(world.trace, cut, seed))
    one, two = play(world), play(other)
    steps = sum(step.phase == "prefill" for step in one.demand) + cut - 1
    assert _decisions(one, steps) == _decisions(two, steps)
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
    played = play(world)
    bound, metrics = lower_bound(played.demand, world.costs, played.budget_bytes), metrics_of(played.spans, world.batch)
    assert bound.ttft_ns is not None
    assert metrics.ttft_ms is not None
    assert bound.ttft_ns <= round(metrics.ttft_ms * 1e6)
    if bound.tpot_ns is not None:
        assert bound.tpot_ns <= (metrics.tpot_ms or 0) * 1e6 + 1e-6


@some
@given(worlds())
def test_law_8_the_exact_assignment_is_never_worse(world: World) -> None:
    """In the objective that all assigners share, on every layer that some policy comes to."""
    others = [GreedyAssigner(), BeamAssigner(), CostRule(), LoadAll(), ResidentOrCpu()]

    def compare(view: LayerView, chosen: Assignment) -> Assignment:
        best = ExactAssigner().assign(view).makespan_ns
        for other in others:
            assert best <= other.assign(view).makespan_ns, f"{type(other).__name__} beats the exact one on {view}"
        return chosen

    play(world, {"assigner": BrokenAssigner(_part(world, "assigner"), compare)})


@some
@given(worlds(NO_FUTURE, contention=False), st.integers(2, 9))
def test_law_9_scaling_is_exact_without_contention(world: World, c: int) -> None:
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
    return [(place, plan[:-1]) for place, plan in played.session.plans.items()]  # all but the makespan


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


# --- broken twins: a part that breaks a rule is caught ----------------------------------------------------------------


class BrokenAssigner:
    """An assigner whose answer is spoilt (or only looked at)."""

    def __init__(self, inner: Any, spoil: Callable[[LayerView, Assignment], Assignment]) -> None:
        self.inner, self.spoil = inner, spoil

    def assign(self, view: LayerView) -> Assignment:
        return self.spoil(view, self.inner.assign(view))


class BrokenCache:
    """A cache that picks the first resident, pinned or not."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.members = inner, set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def admitted(self, id: ExpertId, group: int) -> None:
        self.members.add(id)
        self.inner.admitted(id, group)

    def evicted(self, id: ExpertId, group: int) -> None:
        self.members.discard(id)
        self.inner.evicted(id, group)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return next((id for id in sorted(self.members) if id in blocked and id.layer == incoming.layer), None)


WORLD = fixed_world("on-demand")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda view, a: a._replace(cpu=a.gpu[:1]), "expected each of"),  # computes an expert twice
        (lambda view, a: a._replace(gpu=a.gpu[:-1], loads=a.loads[:-1]), "expected each of"),  # skips one
        (lambda view, a: a._replace(loads=a.gpu), "expected the absent experts"),  # loads residents
        (lambda view, a: a._replace(gpu=(*a.gpu, 99)), "expected each of"),  # runs one that nobody chose
    ],
)
def test_a_broken_policy_is_caught(spoil: Callable[[LayerView, Assignment], Assignment], message: str) -> None:
    inner = _part(WORLD, "assigner")
    with pytest.raises(PolicyError, match=message):
        play(WORLD, {"assigner": BrokenAssigner(inner, spoil)})


def test_a_broken_cache_that_evicts_a_pinned_expert_is_caught() -> None:
    with pytest.raises(PolicyError, match="pinned"):
        play(WORLD, {"cache": BrokenCache(_part(WORLD, "cache"))})


def _part(world: World, name: str) -> Any:
    return getattr(play(world).session.policy, name)


@pytest.mark.parametrize("lane", ["gpu", "host", "d2h"])
def test_a_broken_lane_that_starts_too_early_is_caught(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is free, or before the work is ready."""
    sound = Lane.reserve

    def hasty(self: Lane, *given: Any, **named: Any) -> int:
        end = sound(self, *given, **named)
        row = self.recorder.rows[-1]
        if self.name == lane and row[2] > 3:
            self.recorder.rows[-1] = (row[0], row[1], row[2] - 3, *row[3:])
        return end

    monkeypatch.setattr(Lane, "reserve", hasty)
    _caught("law [23]")


@pytest.mark.parametrize("lane", ["gpu", "host", "d2h"])
def test_a_broken_lane_that_idles_is_caught(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Lane.reserve

    def lazy(self: Lane, ready: int, *rest: Any, **named: Any) -> int:
        self.free_ns = max(self.free_ns, ready) + 2 * (self.name == lane)
        return sound(self, ready, *rest, **named)

    monkeypatch.setattr(Lane, "reserve", lazy)
    _caught("law 5")


def test_a_broken_cpu_that_does_not_wait_for_activations_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CpuLane.add

    def hasty(self: CpuLane, experts: Any, workload: Any, ready: int, *rest: Any) -> None:
        sound(self, experts, workload, ready - 5, *rest)

    monkeypatch.setattr(CpuLane, "add", hasty)
    _caught("law 2: the CPU needs the activations")


def test_a_broken_memory_with_too_many_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free = [free + 600 for free in self._free]

    monkeypatch.setattr(Residency, "__init__", generous)
    _caught("law 4", "on-demand")


def _caught(message: str, policy: str = "fiddler") -> None:
    world = fixed_world(policy)
    played = play(world)
    with pytest.raises(AssertionError, match=message):
        check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots)
