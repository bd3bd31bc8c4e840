"""All candidates, played and ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from policies.registry import ChoiceError
from sim.machine.units import in_gb
from sim.runs.demand import MissingFromTraceError
from sim.runs.memory import BudgetError
from sim.runs.prepare import Prepared
from sim.runs.scenario import ScenarioError
from trilane.common.gc_paused import gc_paused
from trilane.study.fit.asked import Asked, asked_of
from trilane.study.fit.candidates import candidates, may_be_recommended
from trilane.study.fit.memory_needed import HOST_RESERVE_BYTES, host_memory_of
from trilane.study.fit.policy_result import Played, host_bytes_of, play_policy
from trilane.study.fit.question import FitError, Question
from trilane.study.pool import Each

_REFUSALS = (BudgetError, ChoiceError, FitError, MissingFromTraceError, ScenarioError)


@dataclass(frozen=True)
class Contest:
    """Candidates by kind, each by the time until the last token; and who cannot run, and why.

    ``exact`` may be recommended; ``beside`` keep the routing, too, but were not asked for.
    """

    exact: list[Played]
    beside: list[Played]
    changing: list[Played]
    clairvoyant: list[Played]
    refused: Mapping[str, str]


def play_all(question: Question, each: Each = map) -> Contest:
    """``each``: who plays them. Raises FitError with all reasons, if none can run that keeps the routing and may be
    recommended."""
    setting = asked_of(question).setting
    names = candidates(question, setting.shape, setting.hardware)
    found = dict(zip(names, each(partial(_play, question), names), strict=True))
    refused = {name: one for name, one in found.items() if isinstance(one, str)}
    played = [one for one in found.values() if not isinstance(one, str)]
    played.sort(key=lambda one: one.answer.answer_ms)
    keeping = [one for one in played if not one.needs.changes_routing and not one.needs.future]
    exact = [one for one in keeping if may_be_recommended(question, one.answer.policy)]
    if not exact:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise FitError(f"none of the policies that keep the routing can run: {reasons}")
    beside = [one for one in keeping if one not in exact]
    changing = [one for one in played if one.needs.changes_routing]
    return Contest(exact, beside, changing, [one for one in played if one.needs.future], refused)


def _play(question: Question, name: str) -> Played | str:
    """A policy, played; or why it cannot be."""
    asked = asked_of(question)
    try:
        prepared = asked.ready(name)
        _check_host(asked, prepared)
    except _REFUSALS as error:
        return str(error)
    with gc_paused():
        return play_policy(asked, prepared)


def _check_host(asked: Asked, prepared: Prepared) -> None:
    """Raises FitError where the host cannot hold what the policy needs there."""
    host = host_memory_of(asked.question, asked.setting.hardware)
    missing = 0 if host is None else host_bytes_of(prepared, prepared.session()) + HOST_RESERVE_BYTES - host
    if missing > 0:
        raise FitError(
            f"{in_gb(missing)} GB of host memory are missing: experts that may leave the GPU stay there, too"
        )
