"""Layer views to test policies with, and a session to drive call by call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from hypothesis import strategies as st

from policies.mechanism.copy_queue import CacheUpdate
from policies.mechanism.session import Session
from policies.mechanism.views import (
    INFINITE_NS,
    Assignment,
    Copy,
    ExpertCosts,
    ExpertId,
    Forecast,
    LayerInput,
    LayerView,
    Phase,
    Plan,
    ResidencyView,
    Routing,
)
from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.parts.routers import routing_of_tokens
from policies.protocols import Budget, Composition, InitialPlacement, When

NO_PLAN = Assignment((), (), (), 0)  # for prefetchers that do not look at the layer's plan


def costs(gpu_ns: Sequence[int], cpu_ns: Sequence[int], *, first_cpu_ns: int = 0, copy_ns: int = 0) -> ExpertCosts:
    """Tables by workload from 1 on."""
    return ExpertCosts((0, *gpu_ns), (0, *cpu_ns), first_cpu_ns, copy_ns, 1)


def view(
    workload: Mapping[int, int],
    cost: ExpertCosts,
    *,
    ready: Mapping[int, int] | None = None,
    layer: int = 0,
    step: int = 0,
    phase: Phase = "decode",
    resident: Sequence[Sequence[int]] = ((),),
) -> LayerView:
    """A view of ``layer``; experts that ``ready`` does not name are absent."""
    active = tuple(sorted(workload))
    known = ready or {}
    return LayerView(
        step=step,
        layer=layer,
        phase=phase,
        routing=Routing(active, tuple(workload[e] for e in active)),
        scores=None,
        sequences=(),
        ready_ns={e: known.get(e, INFINITE_NS) for e in active},
        h2d_backlog_ns=0,
        cpu_backlog_ns=0,
        costs=(cost,) * (layer + 1),
        residency=ResidencyView(resident, [()] * len(resident)),
    )


@st.composite
def views(draw: st.DrawFn, most: int = 12, longest_ns: int = 1000) -> LayerView:
    """Up to ``most`` active experts, some resident, some loading; arbitrary tables."""
    time = st.integers(1, longest_ns)
    heaviest = draw(st.integers(1, 6))
    table = st.lists(time, min_size=heaviest, max_size=heaviest)
    cost = costs(draw(table), draw(table), first_cpu_ns=draw(st.integers(0, longest_ns)), copy_ns=draw(time))
    workload = draw(st.dictionaries(st.integers(0, 63), st.integers(1, heaviest), min_size=1, max_size=most))
    ready = {e: draw(st.sampled_from((0, 0, cost.copy_ns // 2, INFINITE_NS, INFINITE_NS))) for e in sorted(workload)}
    return view(workload, cost, ready=ready)


# --- views that know every token's scores, for policies that weigh tokens ---------------------------------------------

COST = costs((5, 6, 7), (10, 20, 30), copy_ns=30)


def scored_view(
    scores: Sequence[Sequence[float]],
    k: int,
    *,
    resident: Collection[int] = (),
    staged: Collection[int] = (),
    loading: Mapping[int, int] | None = None,
    renormalised: bool = True,
    cost: ExpertCosts = COST,
    phase: Phase = "decode",
) -> LayerView:
    """Layer 0 of a model whose router takes the ``k`` best of ``scores`` [tokens][experts], ties to the lower id."""
    ids = [sorted(range(len(own)), key=lambda e, own=own: -own[e])[:k] for own in scores]  # type: ignore[misc]
    sums = [sum(own[e] for e in chosen) if renormalised else 1 for own, chosen in zip(scores, ids, strict=True)]
    weights = [[own[e] / total for e in chosen] for own, chosen, total in zip(scores, ids, sums, strict=True)]
    routing = routing_of_tokens(ids, weights)
    known = {**dict.fromkeys((*resident, *staged), 0), **(loading or {})}
    return LayerView(
        step=0,
        layer=0,
        phase=phase,
        routing=routing,
        scores=scores,
        sequences=tuple(range(len(ids))),
        ready_ns={e: known.get(e, INFINITE_NS) for e in routing.active},
        h2d_backlog_ns=0,
        cpu_backlog_ns=0,
        costs=(cost, cost),
        residency=ResidencyView([resident, ()], [staged, ()]),
    )


# --- a session: two layers of four experts, and parts that do what a test tells them ----------------------------------

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
