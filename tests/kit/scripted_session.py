"""A session to drive call by call: two layers of four experts, and parts that do what a test tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from policies.mechanism.copy_queue import CacheUpdate
from policies.mechanism.session import Session
from policies.mechanism.views import (
    Assignment,
    Copy,
    ExpertCosts,
    ExpertId,
    Forecast,
    LayerInput,
    LayerView,
    Plan,
    Routing,
)
from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.protocols import Budget, Composition, InitialPlacement, When

COSTS = ExpertCosts((0, 5, 5), (0, 50, 50), 0, 20, 100)
Into = Literal["cache", "staging"]


def e(layer: int, expert: int) -> ExpertId:
    return ExpertId(layer, expert)


class Placed:
    """Residents of each layer, and slots (default: as many)."""

    def __init__(self, *residents: Sequence[int], slots: Sequence[int] | None = None) -> None:
        self.residents = tuple(tuple(layer) for layer in residents)
        self.slots = tuple(slots or (len(layer) for layer in residents))

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement(self.slots, self.residents)


class Says:
    """An assigner that gives one answer, whatever it is shown."""

    def __init__(self, gpu: Sequence[int] = (), cpu: Sequence[int] = (), loads: Sequence[int] = ()) -> None:
        self.answer = Assignment(tuple(gpu), tuple(cpu), tuple(loads), 0)

    def assign(self, view: LayerView) -> Assignment:
        return self.answer


class Wants:
    """A prefetcher that ranks what the test wants now."""

    def __init__(self, into: Into = "staging") -> None:
        self.into: Into = into
        self.now: Sequence[ExpertId] = ()
        self.protected: frozenset[ExpertId] = frozenset()

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        return self.now

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return self.protected


class Swaps(StaticCache):
    """A cache that asks for what the test wants, at the end of the layer of that number."""

    def __init__(self, wanted: Mapping[int, Sequence[CacheUpdate]]) -> None:
        self.wanted = dict(wanted)

    def swaps(self, view: LayerView, when: When) -> Sequence[CacheUpdate]:
        return self.wanted.pop(view.layer, ()) if when == "layer_end" else ()


def session(placed: Placed | None = None, **parts: Any) -> Session:
    """Two layers of four experts; loads everything, keeps what is there, one staging slot of each kind."""
    given: dict[str, Any] = {
        "assigner": LoadAll(), "prefetcher": None, "cache": StaticCache(), "demand_slots": 1, "prefetch_slots": 1,
        **parts,
    }
    placed = placed or Placed((0, 1), (0, 1))
    budget = Budget(4, (100, 100), 100 * sum(placed.slots))
    return Session(Composition(name="test", placement=placed, **given), budget, (COSTS, COSTS))


def plan(it: Session, layer: int, *active: int, step: int = 0, left_ns: int = 0) -> Plan:
    routing = Routing(active, (1,) * len(active))
    return it.plan_layer(LayerInput(step, layer, "decode", routing, h2d_backlog_ns=left_ns))


def begin(it: Session, *active: int, step: int = 0) -> Plan:
    """A step, up to the plan of layer 0."""
    it.begin_step(step)
    return plan(it, 0, *active, step=step)


def start(it: Session) -> Copy:
    copy = it.next_copy()
    assert copy is not None
    return copy


def pass_through(it: Session) -> ExpertId:
    """The next copy runs, arrives in staging and is used."""
    copy = start(it)
    assert it.copied(copy)
    it.computed(copy.key)
    return copy.key
