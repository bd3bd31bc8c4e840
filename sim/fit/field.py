"""All candidates, played and ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.registry import ChoiceError
from sim.demand import MissingFromTraceError
from sim.fit.asked import Asked
from sim.fit.candidates import candidates
from sim.fit.fits import HOST_RESERVE_BYTES, host_memory_of
from sim.fit.played import Played, host_bytes_of, play_policy
from sim.fit.question import FitError
from sim.memory import GB, BudgetError
from sim.scenario import ScenarioError

_REFUSALS = (BudgetError, ChoiceError, FitError, MissingFromTraceError, ScenarioError)


@dataclass(frozen=True)
class Field:
    """Candidates by kind, each by the time until the last token; and who cannot run, and why."""

    exact: list[Played]
    changing: list[Played]
    clairvoyant: list[Played]
    refused: Mapping[str, str]


def play_field(asked: Asked) -> Field:
    """Raises FitError with all reasons, if none that keeps the routing can run."""
    played, refused = [], {}
    for name in candidates(asked.question, asked.setting.shape, asked.setting.hardware):
        try:
            played.append(_play(asked, name))
        except _REFUSALS as error:
            refused[name] = str(error)
    played.sort(key=lambda one: one.times.answer_ms(asked.question.generated))
    needs = [(one, one.prepared.composition.needs) for one in played]
    exact = [one for one, need in needs if not need.changes_routing and not need.future]
    if not exact:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise FitError(f"none of the policies that keep the routing can run: {reasons}")
    changing = [one for one, need in needs if need.changes_routing]
    return Field(exact, changing, [one for one, need in needs if need.future], refused)


def _play(asked: Asked, name: str) -> Played:
    """Raises FitError where the host cannot hold what the policy needs there."""
    prepared = asked.ready(name)
    host = host_memory_of(asked.question, asked.setting.hardware)
    missing = 0 if host is None else host_bytes_of(prepared) + HOST_RESERVE_BYTES - host
    if missing > 0:
        gb = f"{missing / GB:.1f} GB"
        raise FitError(f"{gb} of host memory are missing: experts that may leave the GPU stay there, too")
    return play_policy(prepared)
