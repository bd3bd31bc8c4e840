"""What is left out of costs, inputs and decisions is nothing: no time, no contention, no experts."""

from __future__ import annotations

from dataclasses import asdict

from policies.mechanism.views import Assignment, Commitment, ExpertCosts, Foresight, LayerInput, Plan, Routing, Updates
from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.parts.placements import NoPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import UNDECLARED, Composition, Needs

ROUTING = Routing((), ())


def test_costs_without_write_back_and_contention() -> None:
    costs = ExpertCosts((0, 1), (0, 1), 0, 1, 1)
    assert (costs.writeback_ns, costs.cpu_permille, costs.copy_permille, costs.between_ns) == (0, 1000, 1000, 0)


def test_a_layer_on_idle_lanes() -> None:
    given = LayerInput(0, 0, "decode", ROUTING)
    assert (given.scores, given.sequences, given.h2d_backlog_ns, given.cpu_backlog_ns) == (None, (), 0, 0)


def test_decisions_about_no_expert() -> None:
    assert Assignment((), (), (), 0).streamed == Plan(0, ROUTING, *((),) * 9, 0).streamed == ()
    assert Assignment((), (), (), 0).deferred == Plan(0, ROUTING, *((),) * 9, 0).deferred == ()
    assert (Commitment(ROUTING).precompute, Foresight(), Updates()) == ((), ((), None, frozenset()), ((), (), ()))


def test_a_policy_that_declares_nothing_needs_nothing() -> None:
    nothing = {"forecasts": (), "forecast_layers": {}, "forecast_phases": ("prefill", "decode"), "max_batch": None}
    nothing["narrow_share"] = None
    flags = ("scores", "tokens", "future", "calibration", "uniform_sizes", "gpu_only", "changes_routing")
    assert asdict(Needs()) == nothing | dict.fromkeys(flags, False)


def test_a_composition_of_three_parts() -> None:
    """One kind of staging slots, no prefetches, no routing but the model's own; the registry gives it its name."""
    bare = Composition(placement=NoPlacement(), assigner=LoadAll(), cache=StaticCache())
    assert type(bare.router) is TrueRouter
    assert (bare.prefetcher, bare.swaps_before_prefetches, bare.writes_back) == (None, False, False)
    assert (bare.demand_slots, bare.prefetch_slots, bare.decision_cost, bare.name) == (2, 0, "", "")
    assert (bare.needs is UNDECLARED, bare.parameters) == (True, {})
