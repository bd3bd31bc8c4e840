"""Simulate a scenario: the only way into the simulator."""

from __future__ import annotations

from policies.mechanism.routing_error import RoutingErrors
from policies.mechanism.session import Session
from policies.user_errors import told_with_line
from sim.costs.roofline_costs import ACTIVATION_BYTES, ROUTING_BYTES
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import Row
from sim.timeline.cards import CardsTimeline
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.peers import PeersTimeline
from sim.timeline.timeline import Timeline
from trilane.common.gc_paused import gc_paused


def simulate(scenario: Scenario) -> Run:
    """Simulate one scenario.

    Raises ScenarioError, TraceError, BatchError, ShapeError, HardwareError, BudgetError, PolicyError or
    MissingFromTraceError: bad input is refused before the run, with what to do about it.
    """
    return play(prepare(scenario))


def play(prepared: Prepared, *sessions: Session) -> Run:
    """Simulate a prepared scenario. ``sessions``: fresh ones, one a GPU, if the caller needs to look at them later."""
    with gc_paused():
        return _run(prepared, *sessions)


def _run(prepared: Prepared, *sessions: Session) -> Run:
    """A function of its own: its rows are freed before garbage is collected again, which would scan them."""
    rows, errors = _played(prepared, *sessions)
    return Run.of(prepared, rows, errors)


def spans_of(prepared: Prepared, *sessions: Session) -> list[Row]:
    """The spans alone, for callers that need no more of a run; ``sessions`` as in ``play``."""
    rows, _ = _played(prepared, *sessions)
    return rows


def _played(prepared: Prepared, *given: Session) -> tuple[list[Row], RoutingErrors | None]:
    shape = prepared.shape
    token_bytes = TokenBytes(shape.hidden * ACTIVATION_BYTES, shape.top_k * ROUTING_BYTES)
    sessions = given or prepared.sessions_of(Session)
    if prepared.gpus > 1:
        costs, shares = ([getattr(card, name) for card in prepared.cards] for name in ("costs", "share"))
        if prepared.scenario.split_mode == "expert":
            return PeersTimeline(sessions, shares, costs, prepared.demand, token_bytes).spans(), None
        blocks = [card.block for card in prepared.cards]
        return CardsTimeline(sessions, blocks, costs, prepared.demand, token_bytes).run(), None
    [session] = sessions
    errors = RoutingErrors(prepared.weights.of_step, shape.experts) if prepared.needs.changes_routing else None
    timeline = Timeline(session, prepared.played_costs, prepared.demand, token_bytes, errors)
    with told_with_line(prepared.scenario.policy):
        timeline.run()
    rows, timeline.recorder.rows = timeline.recorder.rows, []  # a timeline is a cycle, and would keep them
    return rows, errors
