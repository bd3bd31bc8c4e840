"""Prepared questions: the scenario of a question, resolved, on its own machine or on another; and the policies that are
played in it, by default one of each kind that keeps the routing, with llama.cpp and the clairvoyant run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from policies.mechanism.session import Session
from policies.protocols import PolicyKind
from policies.registry import system
from sim.costs.cost_table import CostTable, StepCosts, StepModel
from sim.costs.engine import load_engine
from sim.machine.hardware import Hardware
from sim.machine.plan_costs import PlanCosts
from sim.runs.prepare import Prepared, prepare
from sim.runs.vocabulary import kind_of
from trilane.common.errors import TrilaneError
from trilane.common.gc_paused import gc_paused
from trilane.common.units import missing_gb
from trilane.engines.memory import HOST_RESERVE_BYTES, host_memory_of, need_of
from trilane.engines.question import USUAL_POLICIES, FitError, Question
from trilane.engines.routing import RoutingSource, routing_for
from trilane.fit.policy_result import PlayedPolicy, needed_on_host, play_policy
from trilane.study import CLAIRVOYANT_POLICY
from trilane.study.player import play_in
from trilane.study.pool import WorkerPool
from trilane.study.question_scenario import scenario_of


def prepared_for(question: Question) -> Prepared:
    """A question, prepared for any policy. Raises TraceError, and what ``prepare`` raises."""
    routing = routing_of(question, with_calibration=True)
    prepared = prepare(scenario_of(question, routing.name, routing.calibration), routing.trace)
    return on_machine(replace(prepared, shape=question.with_cache(prepared.shape)), prepared.hardware)


def routing_of(question: Question, *, with_calibration: bool = False) -> RoutingSource:
    """Return the routing of a question, with the forecasts that its candidates read. Raises what ``routing_for`` and
    ``forecasts_read`` raise."""
    return routing_for(question, forecasts_read(question), with_calibration=with_calibration)


def on_machine(prepared: Prepared, hardware: Hardware) -> Prepared:
    """Return the same question on another machine.

    Where every expert is on the GPU and its kernels are recorded, no routing comes to the host, which neither waits nor
    decides.
    """
    moved = prepared.on(hardware)
    replays = load_engine(moved.scenario.engine, moved.scenario.engine_overrides).replays
    return moved.with_costs(undecided(moved.costs)) if replays and moved.gpus == 1 and all_on_gpu(moved) else moved


def all_on_gpu(prepared: Prepared) -> bool:
    """True if there is room for every expert."""
    tokens = prepared.tokens_per_sequence
    return need_of(prepared.shape, prepared.hardware, prepared.scenario.batch, tokens).all_on_gpu


@dataclass(frozen=True)
class _Undecided:
    """Steps whose routing stays on the GPU."""

    steps: StepModel

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        return self.steps.step(tokens, context)._replace(routing_ns=0)


def undecided(costs: CostTable) -> CostTable:
    """The costs without routing to the host, synchronisation and decisions."""
    return replace(costs, steps=_Undecided(costs.steps), sync_ns=0, plan_costs=PlanCosts())


# --- candidate policies -----------------------------------------------------------------------------------------------


RESIDENT = "llama.cpp"  # where every expert is on the GPU there is nothing to decide, and no staging
LLAMA_CPP = "llama.cpp@impl"
DEFAULT_CANDIDATES = (  # one of each kind; others (fiddler, on-demand, hybrimoe) are near these, or take longer to play
    LLAMA_CPP,
    "ktransformers",
    "mixtral-offloading@impl",
    "dali",
    "best-exact",
)


def percent_with_room(prepared: Prepared, policies: Sequence[str]) -> int:
    """Percent of the experts, rounded down, that the GPU has room for under each of the policies that can run."""
    shares = []
    for name in policies:
        with suppress(TrilaneError):
            shares.append(prepared.with_policy(name).memory.slots / prepared.shape.moe_layers / prepared.shape.experts)
    return int(100 * min(shares, default=0))


@dataclass(frozen=True)
class Ranking:
    """Candidates by kind, each by the time until the last token; and those that cannot run, with the reasons.

    ``exact`` may be recommended; ``compared`` keep the routing, too, but are not among those to choose from.
    """

    exact: list[PlayedPolicy]
    compared: list[PlayedPolicy]
    changing: list[PlayedPolicy]
    clairvoyant: list[PlayedPolicy]
    refused: Mapping[str, str]


def candidate_names(question: Question) -> tuple[str, ...]:
    """Policies to play where experts are offloaded: those to choose from, llama.cpp and the clairvoyant run.

    Raises ChoiceError for an unknown name.
    """
    chosen = chosen_names(question)
    for name in chosen:
        system(name)
    return tuple(dict.fromkeys((*chosen, LLAMA_CPP, CLAIRVOYANT_POLICY)))


def chosen_names(question: Question) -> tuple[str, ...]:
    """The policies to choose from: those that were named, the usual ones by their own names."""
    named = question.policies or (USUAL_POLICIES,)
    groups = [DEFAULT_CANDIDATES if name == USUAL_POLICIES else (name,) for name in named]
    return tuple(dict.fromkeys(chain(*groups)))


def forecasts_read(question: Question) -> tuple[str, ...]:
    """The forecasts that some candidate may read, such as ``gate@1``. Raises ChoiceError."""
    keys = {key for name in candidate_names(question) for key in system(name).needs.forecasts}
    return tuple(f"{kind}@{lookahead}" for kind, lookahead in sorted(keys) if kind != "oracle")


def play_candidates(question: Question, policies: tuple[str, ...], pool: WorkerPool[Prepared]) -> Ranking:
    """Play all candidates; the processes of ``pool`` hold the question, prepared.

    Raises FitError with all reasons, if none can run that keeps the routing and may be recommended.
    """
    host_bytes = host_memory_of(question, pool.state.hardware)
    last_first = policies[::-1]  # the last take the longest: begun first, they keep no other process waiting
    results = {last_first[place]: one for place, one in play_in(pool, partial(_play, host_bytes), last_first)}
    outcomes = {name: results[name] for name in policies}
    refused = {name: one for name, one in outcomes.items() if isinstance(one, str)}
    played = [one for one in outcomes.values() if not isinstance(one, str)]
    played.sort(key=lambda one: one.result.answer_ms)
    of_kind = {kind: [one for one in played if kind_of(one.result.labels) == kind] for kind in PolicyKind}
    keeping = of_kind[PolicyKind.KEEPS]
    chosen = (*chosen_names(question), RESIDENT)
    exact = [one for one in keeping if one.result.policy in chosen]
    if not exact:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise FitError(f"none of the policies that keep the routing can run: {reasons}")
    compared = [one for one in keeping if one not in exact]
    return Ranking(exact, compared, of_kind[PolicyKind.CHANGES], of_kind[PolicyKind.CLAIRVOYANT], refused)


def _play(host_bytes: int | None, prepared: Prepared, name: str) -> PlayedPolicy | str:
    """A policy's result, or why it cannot run."""
    try:
        candidate, sessions = candidate_in(prepared, name, host_bytes)
    except TrilaneError as error:
        return str(error)
    with gc_paused():
        return play_policy(candidate, *sessions)


def candidate_in(prepared: Prepared, name: str, host_bytes: int | None) -> tuple[Prepared, list[Session]]:
    """The question under a policy, and a session of it for each GPU. Raises FitError without room on a host of so many
    bytes and without a disk, and what ``Prepared.sessions_of`` raises."""
    candidate = prepared.with_policy(name)
    sessions = candidate.sessions_of(Session)
    needed = needed_on_host(candidate.shape, sessions) + HOST_RESERVE_BYTES
    if candidate.scenario.host_expert_gb is None and host_bytes is not None and needed > host_bytes:
        missing = missing_gb(needed - host_bytes)
        raise FitError(f"{missing} GB of host memory are missing: experts that may leave the GPU stay there, too")
    return candidate, sessions
