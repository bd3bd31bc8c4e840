"""The laws on compositions that nobody would write (free_compositions.py): what the mechanism owes to any policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from policies.mechanism.session import Session
from policies.mechanism.views import ExpertId, LayerInput, LayerView, Routing, Swap
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.protocols import Budget, Composition, When
from sim.runs.hits import layer_frame
from sim.runs.spans import Span
from tests.invariants.free_compositions import play_freely
from tests.kit.depth import examples
from tests.kit.hand_worked import Placed
from tests.kit.toys import uniform_costs
from trilane.testing.laws import check_all
from trilane.testing.log import log_of
from trilane.testing.work_conservation import law_5_background_copies

SEEDS = st.integers(0, 2**32 - 1)
some = settings(
    max_examples=examples(37), derandomize=True, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@some
@given(SEEDS)
def test_laws_1_to_5_and_12_hold_for_free_compositions(seed: int) -> None:
    world, played = play_freely(seed)
    assert sum(s.kind == "wait" and s.layer < 0 for s in log_of(played.spans).spans) == len(played.demand)
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
    law_5_background_copies(played.spans, played.session)


@some
@given(SEEDS)
def test_hits_counted_from_spans_are_those_that_the_session_saw(seed: int) -> None:
    """But for copies that end, or experts that leave, in the very ns in which the plan begins."""
    _, played = play_freely(seed)
    log = log_of(played.spans)
    changes = {s.end_ns for s in log.lanes["h2d"]}
    hits = {(row.step, row.layer): row.hits for row in layer_frame(played.spans).itertuples()}
    for place, plan in played.session.plans.items():
        if not plan.precomputed:  # a metric for the experts of the layer; the session leaves those out
            assert hits[place] == len(plan.resident) or log.routed(place) in changes, place


@some
@given(SEEDS)
def test_writeback_follows_every_eviction_by_a_copy(seed: int) -> None:
    world, played = play_freely(seed, writes_back=True)
    log = log_of(played.spans)
    written = [s for s in log.lanes["d2h"] if s.kind == "writeback"]
    evicted = _evicted_by_copies(log.lanes["h2d"])
    assert [(s.layer, s.expert, s.bytes, s.ready_ns) for s in written] == [
        (s.layer, s.expert, s.bytes, s.start_ns) for s in evicted
    ]
    for span in written:
        costs = world.costs.experts[span.layer]
        throughout_ns = costs.writeback_ns * 10**6 / (costs.both_ways_permille * costs.copy_permille)  # slowed by both
        assert costs.writeback_ns <= span.end_ns - span.start_ns <= throughout_ns
        assert span.bytes == costs.expert_bytes


def _evicted_by_copies(on_link: Sequence[Span]) -> list[Span]:
    """Evictions but those of which the place goes, without a copy, to an expert from a staging slot."""
    return [
        span for span, after in zip_longest(on_link, on_link[1:])
        if span.kind == "evict" and (after is None or (after.kind, after.start_ns) != ("place", span.start_ns))
    ]


@some
@given(SEEDS)
def test_nothing_is_written_back_unless_the_policy_says_so(seed: int) -> None:
    _, played = play_freely(seed, writes_back=False)
    assert "writeback" not in set(played.spans.kind)


class SwapsAtOnce(LruCache):
    """Wants 1 for 0 as soon as a layer is routed."""

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        return [Swap(ExpertId(0, 1), ExpertId(0, 0))] if when == "routed" else []


def test_a_swap_does_not_take_the_slot_that_a_planned_load_was_promised() -> None:
    """While the plan is not in effect the link may serve swaps, but the load's victim is spoken for."""
    policy = Composition(placement=Placed(((0,),)), assigner=LoadAll(), cache=SwapsAtOnce())
    session = Session(policy, Budget(3, (100,), 100), uniform_costs(1).experts)
    session.begin_step(0)
    session.plan_layer(LayerInput(0, 0, "decode", Routing((2,), (1,))))
    assert session.next_copy(demand=False) is None
    load = session.next_copy()
    assert load is not None
    assert (load.key, load.victims) == (ExpertId(0, 2), (ExpertId(0, 0),))
