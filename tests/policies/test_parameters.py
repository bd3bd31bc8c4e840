"""Every parameter of every policy reaches a part: no two of its values compose the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import combinations
from random import Random
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest

from policies.parts.future import Future
from policies.registry import SYSTEMS, BuildContext, added, compose
from tests.kit.views import costs
from trilane.common.hints import hints_of
from trilane.testing.worlds import toy_calibration

LAYERS, EXPERTS, TOP_K = 8, 64, 2
CALIBRATION = toy_calibration(LAYERS, EXPERTS, TOP_K)
CONTEXT = BuildContext(
    "toy", EXPERTS, LAYERS, top_k=TOP_K, batch=2, costs=[costs((10,), (40,))] * LAYERS,
    calibration=replace(CALIBRATION, activations=np.repeat(CALIBRATION.activations, 8, axis=0)), future=Future([]),
)

UPLOADING = ("llama-cache-lru", "llama-cache-lru@impl", "llama-cache-pool")
# Parameters that are read with another one, and values that are not those of the type.
WITH: Mapping[tuple[str, str], Mapping[str, object]] = {
    ("dali", "beam_width"): {"assigner": "beam"},
    ("dali", "solver"): {"assigner": "exact"},
    **{(policy, "window"): {"admits": "second"} for policy in UPLOADING},
    **{(policy, "half_life"): {"admits": "hotter"} for policy in UPLOADING},
    **{("mix", name): {"cache": "mrs"} for name in ("alpha", "keep", "prior", "background")},
}
VALUES: Mapping[tuple[str, str], list[object]] = {
    **{(policy, "threshold"): [1.5, 3.0] for policy in ("daop", "daop@impl")},
    ("llama-cache-heat", "margin"): [1.25, 3.0],
    ("hobbit", "skip_above"): [0.75, 1.0],  # at least narrow_above
    ("buddy", "buddies"): [1, 2],  # of the few that were used together
}


def alternatives(hint: Any, default: object) -> list[Any]:
    """Values of a parameter besides its default."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0], default)
    if get_origin(hint) in (Union, UnionType):
        return [value for kind in get_args(hint) if kind is not type(None) for value in alternatives(kind, default)]
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if value != default]
    if hint is bool:
        return [not default]
    if hint is int:
        return [3, 7]
    return [0.125, 0.625] if hint is float else [(1,), (1, 2)]


def described(part: object, depth: int = 0) -> object:
    """A part with all that it holds, as values that can be compared."""
    if isinstance(part, np.ndarray):
        return part.tolist()
    if isinstance(part, Random):
        return part.getstate()
    if isinstance(part, Mapping):
        return [(described(key), described(value, depth + 1)) for key, value in part.items()]
    if isinstance(part, list | tuple | set | frozenset):
        return [described(value, depth + 1) for value in part]
    if callable(part) and hasattr(part, "__qualname__"):
        return part.__qualname__
    held = getattr(part, "__dict__", None)
    if held is None or depth > 6:
        return repr(part) if held is None else type(part).__qualname__
    return type(part).__qualname__, [(name, described(value, depth + 1)) for name, value in held.items()]


def parts_of(policy: str, parameters: Mapping[str, object]) -> Mapping[str, object]:
    """All of a composition but the parameters themselves."""
    made = compose(policy, parameters, context=CONTEXT)
    return {field.name: described(getattr(made, field.name)) for field in fields(made) if field.name != "parameters"}


PARAMETERS = [
    (policy, name)
    for policy in SYSTEMS if not added(policy)
    for name, *_ in SYSTEMS[policy].parameter_table()
]


@pytest.mark.parametrize(("policy", "name"), PARAMETERS)
def test_every_parameter_reaches_a_part_whatever_its_value(policy: str, name: str) -> None:
    kind: Any = SYSTEMS[policy].parameters
    default = getattr(kind(), name)
    values = [default, *VALUES.get((policy, name), alternatives(hints_of(kind)[name], default))]
    assert len(values) > 1
    composed = [parts_of(policy, {**WITH.get((policy, name), {}), name: value}) for value in values]
    assert all(one != other for one, other in combinations(composed, 2))
