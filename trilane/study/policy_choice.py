"""A policy with parameters of its own, as comparisons and sweeps name it: ``dali{window: 8}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from policies.system import ChoiceError
from trilane.common.errors import ErrorClass
from trilane.common.quoting import quoted
from trilane.common.yaml_files import parse_yaml

PolicyChoice = str | Mapping[str, Mapping[str, Any]]
_WITH_PARAMETERS = re.compile(r"\s*(?P<name>[^{}]*?)\s*(?P<parameters>\{.*\})\s*", re.DOTALL)


def policy_in(value: object, error: ErrorClass = ChoiceError) -> tuple[str, dict[str, Any]]:
    """A policy and its parameters from a name, ``{name: {parameter: value}}``, or the text ``name{parameter: value}``.

    Raises ``error``.
    """
    if isinstance(value, str):
        if "{" in value and "}" not in value:
            raise error(f"policy: expected a closing brace, as in 'dali{{window: 8}}', got {quoted(value)}")
        if (match := _WITH_PARAMETERS.fullmatch(value)) is None:
            return value, {}
        given = parse_yaml(match["parameters"], "policy", error)
        value = {match["name"]: given} if match["name"] else given
    if isinstance(value, Mapping) and len(value) == 1:
        [(name, parameters)] = value.items()
        if isinstance(parameters, Mapping):
            return str(name), dict(parameters)
    raise error(f"policy: expected a name, or `name: {{parameter: value}}`, got {quoted(value)}")


def policy_label(policy: str, parameters: Mapping[str, Any]) -> str:
    """The text that ``policy_in`` reads."""
    values = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in parameters.items()]
    return f"{policy}{{{', '.join(values)}}}" if values else policy
