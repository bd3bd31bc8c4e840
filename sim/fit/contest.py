"""All candidates, played and ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.registry import ChoiceError
from sim.demand import MissingFromTraceError
from sim.fit.asked import Asked
from sim.fit.candidates import candidates, may_be_recommended
from sim.fit.memory_needed import HOST_RESERVE_BYTES, host_memory_of
from sim.fit.played import Played, host_bytes_of, play_policy
from sim.fit.question import FitError
from sim.machine.units import in_gb
from sim.memory import BudgetError
from sim.scenario import ScenarioError

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


def play_all(asked: Asked) -> Contest:
    """Raises FitError with all reasons, if none can run that keeps the routing and may be recommended."""
    played, refused = [], {}
    for name in candidates(asked.question, asked.setting.shape, asked.setting.hardware):
        try:
            played.append(_play(asked, name))
        except _REFUSALS as error:
            refused[name] = str(error)
    played.sort(key=lambda one: one.times.answer_ms(asked.question.generated))
    needs = [(one, one.prepared.composition.needs) for one in played]
    keeping = [one for one, need in needs if not need.changes_routing and not need.future]
    exact = [one for one in keeping if may_be_recommended(asked.question, one.prepared.composition.name)]
    if not exact:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise FitError(f"none of the policies that keep the routing can run: {reasons}")
    changing = [one for one, need in needs if need.changes_routing]
    beside = [one for one in keeping if one not in exact]
    return Contest(exact, beside, changing, [one for one, need in needs if need.future], refused)


def _play(asked: Asked, name: str) -> Played:
    """Raises FitError where the host cannot hold what the policy needs there."""
    prepared = asked.ready(name)
    host = host_memory_of(asked.question, asked.setting.hardware)
    missing = 0 if host is None else host_bytes_of(prepared) + HOST_RESERVE_BYTES - host
    if missing > 0:
        raise FitError(
            f"{in_gb(missing)} GB of host memory are missing: experts that may leave the GPU stay there, too"
        )
    return play_policy(prepared, asked.question.generated)
