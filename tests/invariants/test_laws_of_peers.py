"""The laws of docs/design.md where the experts of each layer are divided among several GPUs, equal or not.

Lanes that each GPU has are looked at as one where the law is about a layer, which they compute together, and by
themselves where it is about a lane or a memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.mechanism.residency import Residency
from policies.registry import SYSTEMS, policy_names
from sim.costs.cost_table import CostTable
from sim.runs.bounds import LowerBound, LowerBounds
from sim.runs.columns import columns_of_rows
from sim.runs.expert_shares import least_experts
from sim.runs.metrics import metrics_of
from sim.runs.spans import Span, spans_frame
from sim.runs.stalls import stalls_of
from sim.runs.vocabulary import MOST_GPUS
from sim.timeline.layer_parts import LayerParts
from sim.timeline.peers import PeerParts, PeersTimeline
from tests.invariants.test_laws_of_cards import OTHER_GPUS
from tests.kit.depth import examples
from tests.kit.played_cards import OtherGpu
from tests.kit.played_peers import PlayedPeers, play
from trilane.testing.laws import (
    gaps,
    law_1_conservation,
    law_2_causality,
    law_3_exclusivity,
    law_4_capacity,
    slow_metrics,
    stall_times,
)
from trilane.testing.log import Layer, Log, log_of
from trilane.testing.random_worlds import SIZES, fixed_world, worlds
from trilane.testing.work_conservation import _ready
from trilane.testing.worlds import World
from trilane.testing.worlds import play as play_alone

TOGETHER = [
    name for name, system in SYSTEMS.items()
    if name in policy_names() and not (system.needs.changes_routing or system.needs.tokens
                                       or system.needs.calibrated_tokens)
]
some = settings(max_examples=examples(62), derandomize=True, suppress_health_check=list(HealthCheck))


def apart(world: World) -> World:
    """The world on an engine and a machine for which GPUs that compute a layer together are simulated."""
    alone = dict.fromkeys(("gpu_permille", "gpu_with_cpu_permille", "cpu_with_gpu_permille"), 1000)
    off = dict.fromkeys(("serial", "serial_copies", "kernel_copies"), False)
    return replace(world, costs=replace(world.costs, permille_before_barrier=None, barrier_ns=0, **alone, **off))


def check(played: PlayedPeers) -> None:
    """All laws."""
    log, as_one = played.log, played.as_one
    law_3_exclusivity(log)
    law_1_conservation(as_one, {
        (step.index, layer): routing.workload()
        for step in played.demand for layer, routing in enumerate(step.routings)
    })
    law_2_causality(as_one)
    for number, budget in enumerate(played.budgets):
        law_4_capacity(played.of_gpu(number), budget)
        owned(played, number)
        given_up(played, number)
    alone = without_sums(as_one)
    for layer in as_one.routed_layers():
        crossings(log, layer, played.tables)
        readiness(log, alone, layer, played)
    work_conservation(log)
    accounting(played)


def owned(played: PlayedPeers, number: int) -> None:
    """Only its own experts are ever in the memory of a GPU, or computed by it."""
    own = played.shares[number].own
    for span in played.of_gpu(number).spans:
        if span.lane in ("gpu", "h2d") and span.expert >= 0:
            layer = span.target_layer if span.target_layer >= 0 else span.layer
            assert span.expert in own[layer], f"law 1: {span} is of an expert that GPU {number} does not own"


def given_up(played: PlayedPeers, number: int) -> None:
    """A GPU's staging slots are free once the layers have ended that their experts were for."""
    kept = [experts for experts in played.sessions[number].residency.staged if experts]
    assert not kept, f"law 4: staging slots of GPU {number} still hold {kept}"


def crossings(log: Log, layer: Layer, tables: Sequence[CostTable]) -> None:
    """A peer with experts gets the hidden states before and gives their sum back after; one without has no part."""
    handed = len(log.of(layer, "hand_over"))
    for number, table in enumerate(tables):
        experts = log.of(layer, "expert", lane=f"gpu{number}") if number else []
        if not experts:
            assert not number or not log.of(layer, "partial_sum", lane=f"gpu{number}")
            continue
        there, back = _way(log, layer, number, table)
        handed -= len(there) + len(back)
        [added] = log.of(layer, "partial_sum", lane=f"gpu{number}")
        chain = [log.one(layer, "attention"), *(log.of(layer, "activations") if table.peer is None else ()), *there]
        assert there[0].start_ns >= log.planned(layer), f"law 2: {there[0]} before it was planned"
        for before, after in pairwise(chain):
            assert before.end_ns <= after.start_ns, f"law 2: {after} needs {before}"
        for expert in experts:
            assert there[-1].end_ns <= expert.start_ns, f"law 2: {expert} starts before its input is there: {there}"
            assert expert.end_ns <= added.start_ns, f"law 2: {added} needs {expert}"
        chain = [added, *back, log.one(layer, "combine")]
        for before, after in pairwise(chain):
            assert before.end_ns <= after.start_ns, f"law 2: {after} needs {before}"
    assert not handed, f"law 2: layer {layer} has crossings that no GPU needs"


def _way(log: Log, layer: Layer, number: int, table: CostTable) -> tuple[list[Span], list[Span]]:
    """The crossings to a peer and back."""
    if table.peer is not None and table.peer.own_lane:
        there, back = log.of(layer, "hand_over", lane=f"peer{number}")
        return [there], [back]
    [there] = log.of(layer, "hand_over", lane=f"h2d{number}")
    down = log.of(layer, "hand_over", lane=f"d2h{number}")
    added = log.of(layer, "partial_sum", lane=f"gpu{number}")[0]
    assert len(down) == (table.peer is None)
    ready_ns = down[0].end_ns if down else added.end_ns
    up = [s for s in log.of(layer, "hand_over", lane="h2d") if s.ready_ns == ready_ns]
    assert up, f"law 5: a sum that is there at {ready_ns} ns waits"
    return [there], [*down, up[0]]


def without_sums(log: Log) -> Log:
    """A log without the launches of partial sums, which follow that of combine."""
    sums = set()
    for layer in log.routed_layers():
        sums |= {id(span) for span in log.launches(layer)[2 : 2 + len(log.of(layer, "partial_sum"))]}
    return log_of(span for span in log.spans if id(span) not in sums)


def readiness(log: Log, as_one: Log, layer: Layer, played: PlayedPeers) -> None:
    """Spans are ready when their inputs are: on the CPU and the first GPU as without peers, but for combine."""
    back = [span.end_ns for span in log.of(layer, "hand_over") if span.lane in ("h2d", "peer1")]
    for span in as_one.layers[layer]:
        if span.kind in ("combine", "partial_sum", "hand_over", "launch"):
            continue
        if span.kind == "activations":  # for the CPU, or for peers
            assert span.ready_ns == log.planned(layer), f"law 5: {span}"
            continue
        expected = _ready(as_one, layer, span, played.world.costs)
        if span.kind == "expert" and span.lane == "gpu":
            number = _owner(played, span)
            there = _way(log, layer, number, played.tables[number])[0][-1].end_ns if number else 0
            expected = max(expected or 0, there)
        assert expected is None or span.ready_ns == expected, f"law 5: {span} could have started at {expected} ns"
    combine = log.one(layer, "combine")
    expected = max(_ready(as_one, layer, combine, played.world.costs) or 0, *back, 0)
    assert combine.ready_ns == expected, f"law 5: {combine} could have started at {expected} ns"


def _owner(played: PlayedPeers, span: Span) -> int:
    return next(n for n, share in enumerate(played.shares) if span.expert in share.own[span.layer])


def work_conservation(log: Log) -> None:
    """No lane is idle while its next piece of work is ready."""
    back = any(span.kind == "writeback" for span in log.spans)
    for lane in log.lanes:
        for free, span in log.in_order(lane):
            early = back and lane.startswith("h2d")  # copies wait for what is written back in turn
            assert span.start_ns == max(free, span.ready_ns) or (early and span.start_ns > free), f"law 5: {span}"


def accounting(played: PlayedPeers) -> None:
    """Metrics worked out anew are the same, but for the shares of lanes, which are each GPU's own."""
    batch, as_one = played.world.batch, played.as_one
    given = metrics_of(columns_of_rows(played.rows), batch).to_dict()
    for name, value in slow_metrics(as_one, batch).items():
        if not name.endswith("busy_share"):
            assert given[name] == pytest.approx(value), f"law 12: {name}"
    makespan = max(span.end_ns for span in as_one.spans)
    idle = sum(end - begin for begin, end in gaps(as_one, "gpu", makespan))
    stalls = stalls_of(spans_frame(played.rows))
    assert stalls._asdict() == stall_times(as_one, 0, makespan)
    assert sum(stalls) == idle, "law 12: stalls sum to the time in which no GPU works"


# --- random worlds ----------------------------------------------------------------------------------------------------


@settings(some, max_examples=examples(250))
@given(worlds(TOGETHER), st.lists(OTHER_GPUS, min_size=1, max_size=MOST_GPUS), st.randoms(use_true_random=False))
def test_laws_1_to_5_and_12_with_one_to_four_gpus(world: World, kinds: list[OtherGpu], random: Random) -> None:
    gpus = min(len(kinds), world.trace.shape.experts)
    parts = tuple(random.choice((1.0, 2.0, 5.0)) for _ in range(gpus))
    one_link = [kind if number == 1 or not (kind.peer and kind.peer.own_lane) else kind._replace(peer=None)
                for number, kind in enumerate(kinds)]
    check(play(apart(world), gpus, parts, [OtherGpu(memory=kinds[0].memory), *one_link[1:]]))


@pytest.mark.parametrize("policy", TOGETHER)
def test_all_of_them_hold_with_four_gpus(policy: str) -> None:
    [size] = [size for size in SIZES if size.name == "many layers"]
    world = apart(size.world(SYSTEMS[policy]))
    check(play(world, min(4, world.trace.shape.experts)))


@some
@given(worlds(TOGETHER))
def test_one_gpu_by_itself_gives_the_same_spans(world: World) -> None:
    world = apart(world)
    assert spans_frame(play(world, 1).rows).equals(play_alone(world).spans)


@some
@given(worlds(TOGETHER, min_decode=1), st.tuples(OTHER_GPUS, OTHER_GPUS))
def test_law_8_no_run_beats_the_lower_bound(world: World, kinds: tuple[OtherGpu, OtherGpu]) -> None:
    played = play(apart(world), min(2, world.trace.shape.experts), (), kinds)
    made = metrics_of(columns_of_rows(played.rows), world.batch)
    bound = _bound(played, len(played.tables))
    for name, least_ns in (("ttft_ms", bound.ttft_ns), ("tpot_ms", bound.tpot_ns)):
        taken_ms = getattr(made, name)
        assert least_ns is None or taken_ms is None or taken_ms * 1e6 >= least_ns * (1 - 1e-9), name


def _bound(played: PlayedPeers, together: int) -> LowerBound:
    gpus, costs = len(played.tables), least_experts(played.tables)
    return LowerBounds(played.demand, costs, None, None, gpus, together).at(sum(played.budgets))


# --- broken twins -----------------------------------------------------------------------------------------------------

TWO = apart(fixed_world("on-demand"))
MIXED = apart(fixed_world("dali"))


def test_in_these_worlds_peers_compute_next_to_the_cpu() -> None:
    lanes = {(span.lane, span.kind) for span in play(MIXED, 2).log.spans}
    assert {("gpu", "expert"), ("gpu1", "expert"), ("cpu", "expert"), ("gpu1", "partial_sum")} <= lanes


def test_a_peer_that_does_not_wait_for_its_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerParts, "_run_copied", LayerParts._run_copied)
    monkeypatch.setattr(PeerParts, "_send_up", lambda self: self._at(self.clock.now + 50, lambda: _sound_up(self)))
    with pytest.raises(AssertionError, match=r"law 2: .* starts before its input is there"):
        check(play(TWO, 2))


_sound_up: Callable[[PeerParts], None] = PeerParts._send_up


def test_a_layer_that_does_not_wait_for_its_peers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerParts, "end_result", lambda self: self._end_part(self.state))
    with pytest.raises(AssertionError, match=r"law [23]"):
        check(play(TWO, 2))


def test_experts_that_only_their_gpus_plan_knows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes those of the first GPU alone."""
    sound = PeersTimeline._decide

    def forgets(self: PeersTimeline, *given: Any) -> Any:
        plan, own = sound(self, *given), self._shares[0].experts
        return plan._replace(cpu=tuple(expert for expert in plan.cpu if expert < own))

    monkeypatch.setattr(PeersTimeline, "_decide", forgets)
    with pytest.raises(AssertionError, match="law 1"):
        check(play(MIXED, 2))


def test_a_gpu_with_too_many_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free, self._room = ([size + 600 for size in each] for each in (self._free, self._room))

    monkeypatch.setattr(Residency, "__init__", generous)
    with pytest.raises(AssertionError, match="law 4"):
        check(play(replace(TWO, cache_bytes=100), 2))


def test_an_expert_of_two_owners_is_caught() -> None:
    played = play(TWO, 2)
    foreign = replace(played, shares=[played.shares[0]._replace(first=1, end=2), played.shares[1]])
    with pytest.raises(AssertionError, match=r"law 1: .* of an expert that GPU 0 does not own"):
        check(foreign)


def test_a_sum_that_rests_before_it_crosses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = PeerParts._at
    monkeypatch.setattr(PeerParts, "_at", lambda self, at_ns, then: sound(self, at_ns + 3, then))
    with pytest.raises(AssertionError, match=r"law (5|2)"):
        check(play(TWO, 2))


def test_law_8_catches_a_bound_of_one_gpu() -> None:
    """Broken twin: experts that four GPUs compute together, bounded as if one did. The links take next to no time."""
    [size] = [size for size in SIZES if size.name == "many layers"]
    world = apart(size.world(SYSTEMS["on-demand"]))
    experts = world.trace.shape.experts
    gpu_ns, cpu_ns = (tuple(ns * w for w in range(64)) for ns in (900, 90_000))
    slow = world.costs.map_experts(lambda costs: costs._replace(gpu_ns=gpu_ns, cpu_ns=cpu_ns, copy_ns=1))
    played = play(replace(world, costs=slow, cache_bytes=10**6), min(4, experts))
    taken_ns = (metrics_of(columns_of_rows(played.rows), world.batch).tpot_ms or 0.0) * 1e6
    sound, broken = (_bound(played, together).tpot_ns or 0.0 for together in (min(4, experts), 1))
    assert sound <= taken_ns < broken
