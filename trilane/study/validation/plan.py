"""The plan of a validation: scenarios that share a base, written as strict YAML.

repeats: 5                                  # measured runs of each scenario, after one that warms up
scenario: {trace: ..., model: ..., ...}     # what all have in common; keys of a Scenario
vary:                                       # every combination of these
  cached_share: [0.25, 0.5]
  batch: [1, 4]
policies:                                   # with each of these
  - fiddler
  - dali: {prefetch: 0}                     # with parameters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

from realrun.errors import RefusedError
from sim.runs.scenario import Scenario
from trilane.common.hints import NOT_EMPTY, Constraint, between
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml
from trilane.study.sweep.axes import policy_in

MOST_SCENARIOS = 10_000
_ELSEWHERE = dict.fromkeys(("policy", "parameters"), "in the list of policies")
_Policy = str | Annotated[Mapping[str, Mapping[str, Any]], Constraint("with one policy", lambda given: len(given) == 1)]


@dataclass(frozen=True)
class _PlanFile:
    """The keys of a plan's file (module docstring)."""

    scenario: Mapping[str, Any]
    policies: Annotated[tuple[_Policy, ...], NOT_EMPTY]
    vary: Mapping[str, Annotated[tuple[Any, ...], NOT_EMPTY]] = field(default_factory=dict)
    repeats: Annotated[int, between(1, 1000)] = 5


@dataclass(frozen=True)
class ValidationPlan:
    """``scenarios``, each to be measured ``repeats`` times."""

    scenarios: tuple[Scenario, ...]
    repeats: int

    @classmethod
    def from_yaml(cls, path: str | Path, changes: Mapping[str, Any]) -> ValidationPlan:
        """Read a plan; ``changes`` are made to the common scenario. Raises RefusedError, ScenarioError."""
        plan = from_dict(_PlanFile, read_yaml(path, RefusedError), str(path), RefusedError)
        _check_free(plan.scenario, f"{path}: scenario", _ELSEWHERE)
        _check_free(plan.vary, f"{path}: vary", {**_ELSEWHERE, **dict.fromkeys(changes, "as an option")})
        count = prod(map(len, plan.vary.values())) * len(plan.policies)
        if count > MOST_SCENARIOS:
            raise RefusedError(f"{path}: expected at most {MOST_SCENARIOS:,} scenarios to measure, got {count:,}")
        varied = [dict(zip(plan.vary, values, strict=True)) for values in product(*plan.vary.values())]
        scenarios = [
            Scenario.from_dict({**plan.scenario, **changes, **values, "policy": name, "parameters": own}, str(path))
            for values in varied for name, own in map(policy_in, plan.policies)
        ]
        return cls(tuple(scenarios), plan.repeats)


def _check_free(keys: Mapping[str, Any], where: str, elsewhere: Mapping[str, str]) -> None:
    """Raises RefusedError for keys of a scenario that are given elsewhere."""
    for key in keys:
        if key in elsewhere:
            raise RefusedError(f"{where}: {key} is given {elsewhere[key]}; leave it out here")


def alternating(scenarios: int, rounds: int) -> Iterator[Sequence[int]]:
    """The order of scenarios in each round: back and forth, so that a drift of the machine affects all equally."""
    for turn in range(rounds):
        yield range(scenarios) if turn % 2 == 0 else range(scenarios)[::-1]
