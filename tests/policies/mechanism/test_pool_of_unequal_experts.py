"""A pool over layers whose experts differ in size: nobody comes in before there is room."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.session import Session
from policies.mechanism.views import Assignment, ExpertCosts, ExpertId, Forecast, LayerInput, LayerView, Routing
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import NoPlacement
from policies.protocols import Budget, Composition, InitialPlacement

SIZES = (160, 100, 60)  # bytes of an expert, by layer
COSTS = [ExpertCosts((0, 1), (0, 1), 0, 1, size) for size in SIZES]


class Seated(NoPlacement):
    """Expert 0 of layer 0, of 160 bytes, in a pool."""

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement(None, ((0,), (), ()))


class Ahead:
    """Prefetches one expert of layer 2 into the cache."""

    into = "cache"

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        return [ExpertId(2, 1)]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return frozenset()


def test_a_prefetch_waits_for_the_victim_whose_room_it_was_promised_to_leave() -> None:
    """Layer 1's load evicts 160 bytes for its 100. Until it starts, its victim is there, and 60 bytes are not free."""
    session = planned(160, Routing((0,), (1,)))
    assert session.next_copy(demand=False) is None
    assert copied(session) == (ExpertId(1, 0), (ExpertId(0, 0),))
    assert copied(session) == (ExpertId(2, 1), ())


def test_a_prefetch_leaves_their_room_to_all_loads_that_start_before_a_victim_leaves() -> None:
    """Layer 1's first load has the 100 bytes that are free, the second evicts 160 for its 100: 60 remain, later."""
    session = planned(260, Routing((0, 1), (1, 1)))
    assert session.next_copy(demand=False) is None
    assert copied(session) == (ExpertId(1, 0), ())
    assert copied(session) == (ExpertId(1, 1), (ExpertId(0, 0),))
    assert copied(session) == (ExpertId(2, 1), ())


def planned(pool_bytes: int, routing: Routing) -> Session:
    """A session whose plan of layer 1 is made; the prefetch for layer 2 is queued."""
    policy = Composition(placement=Seated(), assigner=LoadAll(), prefetcher=Ahead(), cache=LruCache())
    session = Session(policy, Budget(2, SIZES, pool_bytes), COSTS)
    session.begin_step(0)
    session.plan_layer(LayerInput(0, 0, "decode", Routing((0,), (1,))))
    session.foresee(())
    session.end_layer()
    session.plan_layer(LayerInput(0, 1, "decode", routing))
    return session


def copied(session: Session) -> tuple[ExpertId, tuple[ExpertId, ...]]:
    """The next copy, which starts and arrives, and its victims."""
    copy = session.next_copy()
    assert copy is not None
    session.copied(copy)
    return copy.key, copy.victims
