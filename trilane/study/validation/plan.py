"""Validation plans: scenarios that share a base, written as strict YAML.

repeats: 5                                  # measured runs of each scenario, after one to warm up
scenario: {trace: ..., model: ..., ...}     # common to all; keys of a Scenario
vary:                                       # every combination of these
  cached_share: [0.25, 0.5]
  batch: [1, 4]
policies:                                   # each with every combination
  - fiddler
  - dali: {prefetch: 0}                     # with parameters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from realrun.errors import RefusedError
from sim.runs.scenario import Scenario
from trilane.common.hints import NOT_EMPTY, Constraint, Count
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

_ONE_POLICY = Constraint("with one policy, as in `dali: {prefetch: 0}`", lambda entry: len(entry) == 1)
_ELSEWHERE = dict.fromkeys(("policy", "parameters"), "in the list of policies")


@dataclass(frozen=True)
class ValidationPlan:
    """``scenarios``, each to be measured ``repeats`` times."""

    scenarios: tuple[Scenario, ...]
    repeats: int

    @classmethod
    def from_yaml(cls, path: str | Path, changes: Mapping[str, Any]) -> ValidationPlan:
        """Read a plan; ``changes`` apply to all scenarios. Raises YamlError, RefusedError or ScenarioError."""
        found = from_dict(_PlanFile, read_yaml(path), str(path), RefusedError)
        _check_unset(found.scenario, f"{path}: scenario", _ELSEWHERE)
        _check_unset(found.vary, f"{path}: vary", {**_ELSEWHERE, **dict.fromkeys(changes, "as an option")})
        varied = [dict(zip(found.vary, values, strict=True)) for values in product(*found.vary.values())]
        scenarios = [
            Scenario.from_dict({**found.scenario, **changes, **values, **_policy(entry)}, str(path))
            for values in varied for entry in found.policies
        ]  # fmt: skip
        return cls(tuple(scenarios), found.repeats)


@dataclass(frozen=True)
class _PlanFile:
    """The content of a plan's file."""

    scenario: Mapping[str, Any]
    policies: Annotated[Sequence[str | Annotated[Mapping[str, Mapping[str, Any]], _ONE_POLICY]], NOT_EMPTY]
    repeats: Count = 5
    vary: Mapping[str, Annotated[Sequence[Any], NOT_EMPTY]] = field(default_factory=dict)


def _check_unset(keys: Mapping[str, Any], where: str, elsewhere: Mapping[str, str]) -> None:
    """Raises RefusedError for keys of a scenario that are set elsewhere."""
    for key in keys:
        if key in elsewhere:
            raise RefusedError(f"{where}: {key} is set {elsewhere[key]}; leave it out here")


def _policy(entry: str | Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of a scenario for an entry of the list of policies."""
    [(name, parameters)] = [(entry, {})] if isinstance(entry, str) else entry.items()
    return {"policy": name, "parameters": dict(parameters)}


def alternating(scenarios: int, rounds: int) -> Iterator[Sequence[int]]:
    """The order of scenarios in each round: back and forth, so that a drift of the machine affects all equally."""
    for turn in range(rounds):
        yield range(scenarios) if turn % 2 == 0 else range(scenarios)[::-1]
