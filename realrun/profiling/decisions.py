"""The cost of every policy's decisions on this host: its session without a machine, over a bundled trace."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import nnls

from policies.mechanism.host_tier import HostTier
from policies.mechanism.session import Session
from policies.mechanism.views import ExpertCosts, ExpertId, Forecast, Foresight, LayerInput, Plan, PolicyError
from policies.protocols import Budget, Composition
from policies.registry import system
from realrun.execution.call_log import LoggedSession
from sim.costs.engine_costs import costs_on
from sim.machine.hardware import Hardware
from sim.machine.plan_costs import PlanCost
from sim.runs.demand import StepDemand
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape

T = TypeVar("T")
TRACE, MODEL, LAYERS = "mini-deepseek", "deepseek-v2-lite", 4
ROUNDS = 3
REST_S = 0.002  # before a decision on host lanes, where the host thread sleeps; on a CUDA machine it spins
OTHER_BYTES = 64_000_000  # read between decisions, since experts pass through the caches in a real run
DecisionTimes = Mapping[str, list[tuple[int, int]]]  # (active experts, ns) by decision


@dataclass(frozen=True)
class DecisionCosts:
    """Costs by policy; ``skipped``: why a policy has none."""

    plan: dict[str, PlanCost]
    foresee: dict[str, PlanCost]
    skipped: dict[str, str]


class TimedSession(LoggedSession):
    """A session that measures the time of its decisions in decode steps."""

    def __init__(
        self, times: DecisionTimes, rest_s: float, policy: Composition, budget: Budget, costs: Sequence[ExpertCosts],
        host: HostTier | None = None,
    ) -> None:
        super().__init__(policy, budget, costs, host)
        self._times, self._given = times, LayerInput(-1, -1, "prefill", None)  # type: ignore[arg-type]
        self._rest_s = rest_s
        self._other = np.zeros(OTHER_BYTES // 8, np.int64)

    def plan_layer(self, given: LayerInput) -> Plan:
        self._given = given
        return self._timed("plan", super().plan_layer, given)

    def foresee(self, forecasts: Sequence[Forecast]) -> tuple[Foresight, tuple[ExpertId, ...]]:
        return self._timed("foresee", super().foresee, forecasts)

    def _timed(self, decision: str, decide: Callable[..., T], given: Any) -> T:
        if self._given.phase == "prefill":
            return decide(given)
        self._other.sum()
        time.sleep(self._rest_s)
        began_ns = time.perf_counter_ns()
        answer = decide(given)
        self._times[decision].append((len(self._given.routing.active), time.perf_counter_ns() - began_ns))
        return answer


def decision_costs(
    hardware: Hardware, shapes: Sequence[ModelShape], policies: Iterable[str], batches: Sequence[int],
    generated_tokens: int, progress: Callable[[str], None],
) -> DecisionCosts:
    """Costs of every policy's ``plan_layer`` and ``foresee``: base + per active expert x active experts.

    Decisions are made with the costs of the first measured model that matches the trace, otherwise with those of a
    model of the catalogue on a preset; the time of a decision hardly depends on them. Oracles cost nothing.
    """
    settings = {batch: _setting(hardware, shapes, batch, generated_tokens) for batch in batches}
    costs = DecisionCosts({}, {}, {})
    cases: dict[str, dict[int, DecisionTimes]] = {}
    chosen = list(policies)
    rest_s = REST_S if hardware.measured and hardware.measured_profile().kind == "host-lanes" else 0.0
    for turn in range(ROUNDS):  # back and forth, as in all measurements
        for policy in chosen if turn % 2 == 0 else reversed(chosen):
            progress(f"decisions of {policy}")
            for batch, setting in settings.items():
                times = cases.setdefault(policy, {}).setdefault(batch, defaultdict(list))
                _decide(setting, policy, times, rest_s, costs.skipped)
    for policy in chosen:
        if timed := [times for times in cases[policy].values() if times["plan"]]:
            costs.skipped.pop(policy, None)
            costs.plan[policy] = fitted_cost([_middle(times["plan"]) for times in timed])
            costs.foresee[policy] = fitted_cost([_middle(times["foresee"]) for times in timed])
    return costs


def fitted_cost(points: Sequence[tuple[float, float]]) -> PlanCost:
    """The line base + slope x active through (active, ns), by least squares of relative errors, both >= 0."""
    active, ns = (np.array(column, float) for column in zip(*points, strict=True))
    if not ns.all():
        return PlanCost(0.0, 0.0)
    matrix = np.stack([np.ones_like(active), active], axis=1)
    (base, slope), _ = nnls(matrix / ns[:, None], np.ones_like(ns))
    return PlanCost(round(float(base)), round(float(slope)))


def _decide(setting: Prepared, policy: str, times: DecisionTimes, rest_s: float, skipped: dict[str, str]) -> None:
    """Add the times of one run; none if the policy cannot run in this setting."""
    if system(policy).needs.future:
        skipped[policy] = "decisions of an oracle cost nothing"
        return
    try:
        prepared = setting.with_policy(policy)
        drive(prepared.session_of(partial(TimedSession, times, rest_s)), prepared.demand)
    except (ValueError, PolicyError) as error:
        skipped[policy] = str(error)


def drive(session: Session, demand: Sequence[StepDemand]) -> None:
    """Call a session for a demand without a machine: a layer's own copies arrive at once, and one other copy after each
    layer, as on a link that is busy most of the time."""
    for step in demand:
        session.begin_step(step.index)
        for layer, (routing, forecasts) in enumerate(zip(step.routings, step.forecasts, strict=True)):
            scores = None if step.scores is None else step.scores[:, layer].tolist()
            plan = session.plan_layer(LayerInput(step.index, layer, step.phase, routing, scores, step.sequences))
            _compute(session, plan)
            if session.looks_ahead and layer < len(step.routings) - 1:
                session.foresee(forecasts)
            if copy := session.next_copy():
                session.copied(copy)
            session.end_layer()
        session.end_step()


def _compute(session: Session, plan: Plan) -> None:
    """Copy what the layer waits for; staged experts are computed as soon as they have arrived."""
    for expert in session.staged(plan.layer) & set(plan.gpu):
        session.computed(ExpertId(plan.layer, expert))
    for _ in (*plan.streamed, *plan.loads):
        copy = session.next_copy()
        assert copy is not None
        if session.copied(copy) and copy.into == "staging":
            session.computed(copy.key)


def _middle(times: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Mean of the active experts and median of the ns; zeros without any times."""
    return (fmean(active for active, _ in times), median(ns for _, ns in times)) if times else (0.0, 0.0)


def _setting(hardware: Hardware, shapes: Sequence[ModelShape], batch: int, generated: int) -> Prepared:
    scenario = Scenario(
        trace=f"{TRACE}:{LAYERS}", model=f"{MODEL}:{LAYERS}", cached_share=0.3, batch=batch, prompt_tokens=8,
        generated_tokens=generated,
    )
    setting = prepare(scenario)
    like = load_model(MODEL)
    for shape in shapes:
        if (shape.experts, shape.top_k) == (like.experts, like.top_k):
            part = replace(shape, moe_layers=LAYERS, expert_bytes=())
            most = max(len(step.rows) for step in setting.steps)
            return replace(setting, shape=part, hardware=hardware, costs=costs_on(hardware, part, most))
    return setting
