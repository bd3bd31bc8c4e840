"""What is to be validated: scenarios that share a base, written as strict YAML.

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
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from realrun.errors import RefusedError
from sim.runs.scenario import Scenario
from trilane.common.yaml_files import YamlError, read_yaml

_KEYS = ("repeats", "scenario", "vary", "policies")
_ELSEWHERE = dict.fromkeys(("policy", "parameters"), "in the list of policies")


@dataclass(frozen=True)
class ValidationPlan:
    """``scenarios``, each to be measured ``repeats`` times."""

    scenarios: tuple[Scenario, ...]
    repeats: int

    @classmethod
    def from_yaml(cls, path: str | Path, changes: Mapping[str, Any]) -> ValidationPlan:
        """Read a plan; ``changes`` are to what its scenarios have in common. Raises RefusedError, ScenarioError."""
        document = _read(path)
        if not isinstance(document, Mapping) or not {"scenario", "policies"} <= set(document) <= set(_KEYS):
            raise RefusedError(f"{path}: expected the keys {', '.join(_KEYS)} (scenario and policies at least)")
        repeats = document.get("repeats", 5)
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
            raise RefusedError(f"{path}: repeats must be a whole number >= 1, got {repeats!r}")
        base = {**_free(document["scenario"], f"{path}, scenario", _ELSEWHERE), **changes}
        said = {**_ELSEWHERE, **dict.fromkeys(changes, "as an option")}
        varied = _varied(_free(document.get("vary", {}), f"{path}, vary", said), f"{path}, vary")
        policies = [_policy(each, f"{path}, policies") for each in _some(document["policies"], f"{path}, policies")]
        asked = [
            Scenario.from_dict({**base, **values, **policy}, str(path)) for values in varied for policy in policies
        ]
        return cls(tuple(asked), repeats)


def _read(path: str | Path) -> Any:
    try:
        return read_yaml(path)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}") from None
    except YamlError as error:
        raise RefusedError(str(error)) from None


def _free(value: Any, where: str, elsewhere: Mapping[str, str]) -> Mapping[str, Any]:
    """Keys of a scenario without those that are said elsewhere."""
    keys = _mapping(value, where)
    for key in keys:
        if key in elsewhere:
            raise RefusedError(f"{where}: {key} is said {elsewhere[key]}; leave it out here")
    return keys


def _some(values: Any, where: str) -> Sequence[Any]:
    if not isinstance(values, list) or not values:
        raise RefusedError(f"{where}: expected a list with one entry or more, got {values!r:.60}")
    return values


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RefusedError(f"{where}: expected lines of `key: value`, got {value!r:.60}")
    return value


def _varied(axes: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Every combination of the axes' values."""
    for key, values in axes.items():
        _some(values, f"{where}, {key}")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _policy(value: Any, where: str) -> dict[str, Any]:
    """A name, or a name with parameters."""
    if isinstance(value, str):
        return {"policy": value}
    if isinstance(value, Mapping) and len(value) == 1:
        [(name, parameters)] = value.items()
        return {"policy": name, "parameters": dict(_mapping(parameters, f"{where}, {name}"))}
    raise RefusedError(f"{where}: expected a name, or `name: {{parameter: value}}`, got {value!r}")


def alternating(scenarios: int, rounds: int) -> Iterator[Sequence[int]]:
    """In which order they are measured: there and back, so that a drift of the machine meets all of them alike."""
    for turn in range(rounds):
        yield range(scenarios) if turn % 2 == 0 else range(scenarios)[::-1]
