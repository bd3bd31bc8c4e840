"""The laws of docs/design.md where layers are divided among several GPUs, equal or not.

Lanes that each GPU has are looked at as one where the law is about a layer (one GPU works at a time), and by themselves
where it is about a lane or a memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.mechanism.host_share import HostShare
from policies.mechanism.host_tier import HostTier
from policies.mechanism.residency import Residency
from policies.registry import SYSTEMS, policy_names
from sim.machine.peers import PeerLink
from sim.runs.bounds import LowerBounds
from sim.runs.cards import LayerBlock, least_costs
from sim.runs.columns import columns_of_rows
from sim.runs.metrics import metrics_of
from sim.runs.spans import spans_frame
from sim.runs.vocabulary import MOST_GPUS
from sim.timeline.cards import CardsTimeline
from sim.timeline.disk_lane import ReadExperts
from sim.timeline.timeline import Timeline
from tests.kit.depth import examples
from tests.kit.played_cards import BYTES, OtherGpu, PlayedCards, play, sessions
from trilane.testing.host_memory import law_5_reads, law_13_host_memory
from trilane.testing.laws import (
    law_1_conservation,
    law_2_causality,
    law_3_exclusivity,
    law_4_capacity,
    law_4_sizes,
    slow_metrics,
    stall_times,
)
from trilane.testing.log import Log
from trilane.testing.random_worlds import SIZES, fixed_world, with_disk, worlds
from trilane.testing.work_conservation import _ready, law_2_launches
from trilane.testing.worlds import World
from trilane.testing.worlds import play as play_alone

KEEPS_ROUTING = [name for name in policy_names() if not SYSTEMS[name].needs.changes_routing]
some = settings(max_examples=examples(62), derandomize=True, suppress_health_check=list(HealthCheck))


def check(played: PlayedCards) -> None:
    """All laws."""
    log, as_one, costs = played.log, played.as_one, played.world.costs
    law_3_exclusivity(log)
    law_1_conservation(as_one, {
        (step.index, layer): routing.workload()
        for step in played.demand for layer, routing in enumerate(step.routings)
    })
    law_2_causality(as_one)
    law_2_launches(as_one, costs)
    law_4_sizes(as_one, costs)
    for block, budget in zip(played.blocks, played.budgets, strict=True):
        law_4_capacity([span for span in as_one.spans if block.first <= span.layer < block.end], budget)
    if played.world.host_bytes is not None:
        law_13_host_memory(as_one, played.world.host_bytes)
        law_5_reads(as_one, played.world.host_bytes)
    hand_overs(log, played.blocks, [table.peer for table in played.tables])
    work_conservation(log, as_one, played)
    accounting(played)


def hand_overs(log: Log, blocks: Sequence[LayerBlock], peers: Sequence[PeerLink | None] = (None,) * MOST_GPUS) -> None:
    """A layer on another GPU than the one before begins when its input has crossed both links, or the one between."""
    for step in sorted({span.step for span in log.spans if span.step >= 0}):
        for number, block in enumerate(blocks[1:], 1):
            before, first = (step, block.first - 1), (step, block.first)
            down = log.of(before, "hand_over", lane=f"d2h{number - 1 or ''}")
            peer = peers[number]
            [up] = log.of(first, "hand_over", lane=f"{'peer' if peer and peer.own_lane else 'h2d'}{number}")
            assert len(down) == (peer is None), f"law 2: {down} before {up}"
            attention = log.one(first, "attention")
            assert attention.lane == f"gpu{number}"
            spans = [log.one(before, "combine"), *down, up]
            chain = [time for span in spans for time in (span.start_ns, span.end_ns)]
            assert chain == sorted(chain), f"law 2: a hand-over before its input is there: {chain}"
            assert up.end_ns <= attention.start_ns, f"law 2: {attention} starts before its input is there, {up}"


def work_conservation(log: Log, as_one: Log, played: PlayedCards) -> None:
    """No lane is idle while its next piece of work is ready."""
    back = any(span.kind == "writeback" for span in log.spans)
    for lane in log.lanes.keys() - {"disk"}:  # where reads wait for room, too: ``law_5_reads``
        for free, span in log.in_order(lane):
            early = back and lane.startswith("h2d")  # copies wait for what is written back in turn
            assert span.start_ns == max(free, span.ready_ns) or (early and span.start_ns > free), f"law 5: {span}"
    starts = {block.first for block in played.blocks[1:]}
    for layer in as_one.routed_layers():
        for span in as_one.layers[layer]:
            expected = _ready(as_one, layer, span, played.world.costs)
            if layer[1] in starts and span.kind in ("attention", "gate", "speculate", "shared"):  # one launch
                arrived = max(as_one.of(layer, "hand_over"), key=lambda span: span.lane != "d2h")
                expected = max(expected or 0, arrived.end_ns)
            assert expected is None or span.ready_ns == expected, f"law 5: {span} could have started at {expected} ns"


def accounting(played: PlayedCards) -> None:
    """Metrics worked out anew are the same, but for the shares of lanes, which are each GPU's own."""
    batch, as_one = played.world.batch, played.as_one
    given = metrics_of(columns_of_rows(played.rows), batch).to_dict()
    for name, value in slow_metrics(as_one, batch).items():
        if not name.endswith("busy_share"):
            assert given[name] == pytest.approx(value), f"law 12: {name}"
    makespan = max(span.end_ns for span in as_one.spans)
    busy = sum(span.end_ns - span.start_ns for span in as_one.lanes["gpu"])
    assert sum(stall_times(as_one, 0, makespan).values()) == makespan - busy


# --- random worlds ----------------------------------------------------------------------------------------------------


PEERS = st.builds(PeerLink, st.integers(0, 20), st.sampled_from((1e8, 1e10)), st.booleans())
OTHER_GPUS = st.builds(
    OtherGpu, st.integers(1, 4), st.integers(1, 4), st.sampled_from((0.0, 0.5, 1.0, 2.0)), st.none() | PEERS
)


def above_disks(world: World, random: Random, disks: int) -> World:
    """The world above so many disks, which serve each read together."""
    return with_disk(world, random, disks) if disks else world


@settings(some, max_examples=examples(250))
@given(
    worlds(KEEPS_ROUTING, contention=False), st.lists(OTHER_GPUS, min_size=1, max_size=MOST_GPUS), st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_laws_1_to_5_12_and_13_with_one_to_four_gpus_above_none_to_two_disks(
    world: World, kinds: list[OtherGpu], disks: int, random: Random
) -> None:
    gpus = min(len(kinds), world.trace.shape.moe_layers)
    parts = tuple(random.choice((1.0, 2.0, 5.0)) for _ in range(gpus))
    check(play(above_disks(world, random, disks), gpus, parts, kinds))


@pytest.mark.parametrize("disks", [0, 1])
@pytest.mark.parametrize("policy", KEEPS_ROUTING)
def test_all_of_them_hold_with_four_gpus(policy: str, disks: int) -> None:
    [size] = [size for size in SIZES if size.name == "many layers"]
    world = size.world(SYSTEMS[policy])
    alone = dict.fromkeys(("gpu_permille", "gpu_with_cpu_permille", "cpu_with_gpu_permille"), 1000)
    check(play(above_disks(replace(world, costs=replace(world.costs, **alone)), Random(policy), disks), 4))


@some
@given(worlds(KEEPS_ROUTING), st.integers(0, 1), st.randoms(use_true_random=False))
def test_one_gpu_by_itself_gives_the_same_spans(world: World, disks: int, random: Random) -> None:
    world = above_disks(world, random, disks)
    block = [LayerBlock(0, world.trace.shape.moe_layers)]
    tables, budgets = [world.costs], [world.cache_bytes]
    own = sessions(world, block, tables, budgets)
    card = CardsTimeline(own, block, tables, world.demand(own[0].policy.needs), BYTES)
    assert spans_frame(card.run()).equals(play_alone(world).spans)


@some
@given(
    worlds(KEEPS_ROUTING, min_decode=1), st.tuples(OTHER_GPUS, OTHER_GPUS), st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_law_8_no_run_beats_the_lower_bound(
    world: World, kinds: tuple[OtherGpu, OtherGpu], disks: int, random: Random
) -> None:
    assume(world.trace.shape.moe_layers > 1)
    world = above_disks(world, random, disks)
    played = play(world, 2, None, kinds)
    made = metrics_of(columns_of_rows(played.rows), world.batch)
    costs = least_costs(played.tables, played.blocks)
    bound = LowerBounds(played.demand, costs, None, world.host_bytes, 2).at(sum(played.budgets))
    for name, least_ns in (("ttft_ms", bound.ttft_ns), ("tpot_ms", bound.tpot_ns)):
        taken_ms = getattr(made, name)
        assert least_ns is None or taken_ms is None or taken_ms * 1e6 >= least_ns * (1 - 1e-9), name


def test_law_8_catches_a_bound_of_the_slower_gpu_alone() -> None:
    """Broken twin: the costs of the first GPU, for all layers, where the second is quicker."""
    played = play(fixed_world("naive-cpu"), 2, None, (OtherGpu(8, 8), OtherGpu()))
    taken_ms = metrics_of(columns_of_rows(played.rows), played.world.batch).tpot_ms
    sound, broken = (
        LowerBounds(played.demand, costs, None, None, 2).at(sum(played.budgets)).tpot_ns or 0.0
        for costs in (least_costs(played.tables, played.blocks), played.tables[0])
    )
    assert sound <= (taken_ms or 0.0) * 1e6 < broken


# --- broken twins -----------------------------------------------------------------------------------------------------

TWO = fixed_world("on-demand")


def test_a_gpu_that_does_not_wait_for_its_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timeline, "input_ns", property(lambda self: 0, lambda self, ns: None), raising=False)
    with pytest.raises(AssertionError, match=r"law 2: .* starts before its input is there"):
        hand_overs(play(TWO, 2).log, play(TWO, 2).blocks)


def test_a_gpu_with_too_many_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free, self._room = ([size + 600 for size in each] for each in (self._free, self._room))

    monkeypatch.setattr(Residency, "__init__", generous)
    with pytest.raises(AssertionError, match="law 4"):
        check(play(replace(TWO, cache_bytes=300), 3))


def test_a_host_that_works_for_two_gpus_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CardsTimeline._hand_over

    def forgets(self: CardsTimeline, card: Timeline, following: Timeline) -> Any:
        free_ns = following.host.free_ns
        yield from sound(self, card, following)
        following.host.free_ns = free_ns

    monkeypatch.setattr(CardsTimeline, "_hand_over", forgets)
    with pytest.raises(AssertionError, match="law 3: host does two things at once"):
        check(play(TWO, 2))


def test_a_gpu_that_rests_after_its_input_is_there_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CardsTimeline._hand_over

    def late(self: CardsTimeline, card: Timeline, following: Timeline) -> Any:
        yield from sound(self, card, following)
        following.input_ns += 3

    monkeypatch.setattr(CardsTimeline, "_hand_over", late)
    with pytest.raises(AssertionError, match=r"law 5: .* could have started at"):
        check(play(TWO, 2))


# --- and of a memory of the host that they share ----------------------------------------------------------------------

ABOVE_DISK = [  # room for three to four experts
    replace(with_disk(fixed_world(policy), Random(policy)), host_bytes=480, keeping="experts")
    for policy in ("on-demand", "fiddler", "dali", "best-exact", "moe-infinity")
]


def _caught(message: str) -> None:
    """A law finds the offence in one of these worlds."""
    found = []
    for world in ABOVE_DISK:
        try:
            check(play(world, 2))
        except AssertionError as error:
            found.append(str(error))
    assert any(re.match(message, text) for text in found), found


def test_in_these_worlds_gpus_read_and_drop_experts_and_read_ahead() -> None:
    rows = [row for world in ABOVE_DISK for row in play(world, 2).rows]
    assert {"read", "read_ahead", "drop", "keep"} <= {row[4] for row in rows if row[0] == "disk"}


def test_a_host_of_which_each_gpu_has_the_whole_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HostTier.__init__
    monkeypatch.setattr(HostTier, "__init__", lambda self, size, *given: sound(self, 3 * size, *given))
    _caught("law 13: the host holds .* bytes at")


def test_a_gpu_that_does_not_say_when_its_copies_have_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others read drops what it uses."""
    monkeypatch.setattr(HostShare, "need", lambda self, keys, by_plan=False: None)
    monkeypatch.setattr(HostShare, "end_use", lambda self, key: None)
    _caught("law 13: the host does not hold|the run has stopped")


def test_a_disk_that_no_gpu_wakes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadExperts, "_land", lambda self, read: None)
    _caught("law 5: the disk rests|the run has stopped")
