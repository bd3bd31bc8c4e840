"""Cost of a decision: time of one ``plan_layer`` and one ``foresee`` of our Python session, for every policy.

What the cache learns (``observe``) is timed by itself, and is not part of the plan's time.

The line base + per_active_expert x active experts is fitted to the medians (least squares of relative errors, both
coefficients >= 0). With ``write`` it goes to the simulator's table of planning costs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import yaml
from scipy.optimize import nnls

import sim.runs.prepare
import sim.simulate
from benchmarks.figures import Cell, Section, Target, cpu_model
from benchmarks.traffic import BOOTSTRAP, base_scenario, wide_scenario
from policies.mechanism.session import Session
from policies.mechanism.views import ExpertCosts, Forecast, Foresight, LayerInput, LayerView, Plan
from policies.protocols import Budget, Composition
from policies.registry import SYSTEMS
from sim.machine.plan_costs import load_plan_costs
from sim.runs.scenario import Scenario
from trilane.common.files import atomic_path

TABLE = Path(sim.simulate.__file__).parent / "machine" / "plan_costs.yaml"
SECTIONS = ("plan", "foresee", "observe")
VARIANTS: Mapping[str, tuple[str, Mapping[str, object]]] = {"dali-ilp@highs": ("dali-ilp", {"solver": "highs"})}
SLOW = ("dali-ilp@highs",)  # milliseconds a decision: fewer of them
RECALLS = (0.8, 0.8, 0.8)  # of forecasts that the trace lacks
MICROSECONDS = {  # (policy, case): plan and foresee together
    ("hybrimoe", "64/6, batch 1"): 150,
    ("hybrimoe", "64/6, batch 32"): 2000,
}
PLAN_MICROSECONDS = {("dali", "64/6, batch 32"): 60}


class Point(NamedTuple):
    """Medians of one case, in ns."""

    active: float
    plan_ns: float
    foresee_ns: float
    observe_ns: float


class Line(NamedTuple):
    """A fit, in ns, and its largest relative error at a point."""

    base: float
    per_active: float
    error: float


class TimedSession(Session):
    """The session, with a stopwatch on its two decisions in decode steps."""

    plans: list[tuple[int, int]] = []  # noqa: RUF012  # (active experts, ns)
    foresees: list[int] = []  # noqa: RUF012
    observes: list[int] = []  # noqa: RUF012
    in_decode = False

    def __init__(self, policy: Composition, budget: Budget, costs: Sequence[ExpertCosts]) -> None:
        super().__init__(policy, budget, costs)
        self.observe_ns, self.observe = 0, policy.cache.observe
        policy.cache.observe = self.timed_observe  # type: ignore[method-assign]

    def timed_observe(self, view: LayerView) -> None:
        """Let the cache learn, and keep the time."""
        start = time.perf_counter_ns()
        self.observe(view)
        self.observe_ns = time.perf_counter_ns() - start

    def plan_layer(self, given: LayerInput) -> Plan:
        """Plan, and keep the time."""
        start = time.perf_counter_ns()
        plan = super().plan_layer(given)
        elapsed = time.perf_counter_ns() - start
        self.in_decode = given.phase == "decode"
        if self.in_decode:
            self.plans.append((len(given.routing.active), elapsed - self.observe_ns))
            self.observes.append(self.observe_ns)
        return plan

    def foresee(self, forecasts: Sequence[Forecast]) -> tuple[Foresight, tuple[Any, ...]]:
        """Foresee, and keep the time."""
        start = time.perf_counter_ns()
        result = super().foresee(forecasts)
        elapsed = time.perf_counter_ns() - start
        if self.in_decode:
            self.foresees.append(elapsed)
        return result


def measure(folder: Path, policies: Iterable[str] = (), write: bool = False) -> Section:
    """Every policy (or those named) in every case; ``write``: also into ``plan_costs.yaml``."""
    cases = {
        "64/6, batch 1": base_scenario(folder, 1),
        "64/6, batch 4": base_scenario(folder, 4),
        "64/6, batch 32": base_scenario(folder, 32),
        "128/8, batch 1": wide_scenario(folder),
    }
    notes = [f"median wall time of one call in decode steps, in us; {BOOTSTRAP}", "128/8: two tokens side by side"]
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    fits: dict[str, tuple[Line, ...]] = {}
    for policy in policies or (*SYSTEMS, *VARIANTS):
        points: dict[str, Point] = {}
        for case, scenario in cases.items():
            try:
                points[case] = _point(policy, scenario)
            except ValueError as error:
                notes.append(f"{policy}, {case}: not measured: {error}")
        if not points:
            continue
        lines = fits[policy] = tuple(fit([(p.active, p[1 + place]) for p in points.values()]) for place in range(3))
        rows += [_row(policy, name, points, cases, line) for name, line in zip(SECTIONS, lines, strict=True)]
        targets += _targets(policy, points)
    if write:
        write_table(fits, TABLE, usual=not policies)
        notes.append(f"written to {TABLE.name}")
    columns = ("policy", "decision", *(f"us, {case}" for case in cases), "base us", "us / active expert", "worst error")
    return Section("Decision cost", columns, rows, targets, notes)


def _point(policy: str, scenario: Scenario) -> Point:
    """Medians over one run."""
    name, parameters = VARIANTS.get(policy, (policy, {}))
    prompt, generated = (1, 3) if policy in SLOW else (16, 32)
    limit = SYSTEMS[name].needs.max_batch
    if limit is not None and scenario.batch > limit:
        raise ValueError(f"takes batches of at most {limit}")
    TimedSession.plans, TimedSession.foresees, TimedSession.observes = [], [], []
    with patch.object(sim.runs.prepare, "Session", TimedSession):
        played = scenario.with_(prompt_tokens=prompt, generated_tokens=generated, noisy_forecast_recall=RECALLS)
        sim.simulate.simulate(played.with_(policy=name, parameters=parameters))
    active, plans = zip(*TimedSession.plans, strict=True)
    foresees, observes = median(TimedSession.foresees or [0]), median(TimedSession.observes)
    return Point(sum(active) / len(active), median(plans), foresees, observes)


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """base + slope x active through (active, ns), both >= 0."""
    active, ns = (np.array(column, float) for column in zip(*points, strict=True))
    if not ns.any():
        return Line(0.0, 0.0, 0.0)
    matrix = np.stack([np.ones_like(active), active], axis=1)
    (base, slope), _ = nnls(matrix / ns[:, None], np.ones_like(ns))
    return Line(float(base), float(slope), float(np.abs(matrix @ [base, slope] / ns - 1).max()))


def _row(policy: str, decision: str, points: Mapping[str, Point], cases: Iterable[str], line: Line) -> list[Cell]:
    column = 1 + SECTIONS.index(decision)
    medians = [points[case][column] / 1e3 if case in points else None for case in cases]
    return [policy, decision, *medians, line.base / 1e3, line.per_active / 1e3, f"{line.error:.0%}"]


def _targets(policy: str, points: Mapping[str, Point]) -> list[Target]:
    targets = []
    for case, point in points.items():
        plan, both = PLAN_MICROSECONDS.get((policy, case)), MICROSECONDS.get((policy, case))
        if plan is not None:
            targets.append(Target(f"{policy}, {case}: plan", "us", plan, point.plan_ns / 1e3, at_least=False))
        if both is not None:
            got = (point.plan_ns + point.foresee_ns) / 1e3
            targets.append(Target(f"{policy}, {case}: plan + foresee", "us", both, got, at_least=False))
    return targets


def write_table(fits: Mapping[str, tuple[Line, ...]], path: Path, usual: bool = True) -> None:
    """Put the fits into the planning cost table. Rows that were not measured stay, an oracle decides for free.

    ``usual``: their medians are those of a policy without a row, too; not so of a few policies.
    """
    text = path.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    source = f"measured by make bench on {cpu_model()}, {date.today().isoformat()}, Python {platform.python_version()}"
    for place, section in enumerate(SECTIONS):
        measured = {p: lines[place] for p, lines in fits.items() if _is_charged(p, section)}
        for policy, line in measured.items():
            silent = not line.base and not line.per_active
            document[section][policy] = _entry(line, "it forecasts nothing" if silent else source, silent)
        known = [line for policy, line in measured.items() if policy not in VARIANTS and line.base + line.per_active]
        if known and usual:
            typical = Line(median(line.base for line in known), median(line.per_active for line in known), 0.0)
            document[section]["default"] = _entry(typical, f"median of the policies {source}", False, "low")
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    body = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=1000)
    with atomic_path(path) as aside:
        aside.write_text(header + body, encoding="utf-8")
        load_plan_costs(aside)


def _is_charged(policy: str, section: str) -> bool:
    """Not an oracle; and a variant that differs in its assigner foresees like the policy that it is a variant of."""
    return section == "plan" if policy in VARIANTS else not SYSTEMS[policy].needs.future


def _entry(line: Line, source: str, certain: bool, confidence: str = "medium") -> dict[str, object]:
    return {
        "base_ns": round(line.base),
        "per_active_expert_ns": round(line.per_active),
        "source": source,
        "confidence": "high" if certain else confidence,
    }
