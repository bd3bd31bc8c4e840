"""Numbers with their sources, in YAML: ``key: {value: 25e9, source: "...", confidence: high}``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from sim.machine.plausibility import HardwareError
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

T = TypeVar("T")
Confidence = Literal["high", "medium", "low"]
_ORDER: tuple[Confidence, ...] = ("high", "medium", "low")


class Origin(NamedTuple):
    """The source of a number, and how far to trust it."""

    source: str
    confidence: Confidence


class Sourced(NamedTuple, Generic[T]):
    """A value with its source."""

    value: T
    source: str
    confidence: Confidence

    @property
    def origin(self) -> Origin:
        """Source and confidence."""
        return Origin(self.source, self.confidence)


def read_file(hint: Any, path: Path) -> Any:
    """A YAML file as a value of the type ``hint``. Raises HardwareError, with the file's name."""
    return from_dict(hint, read_yaml(path, HardwareError), path.name, HardwareError)


def product(how: str, *factors: Sourced[Any]) -> Sourced[float]:
    """A product, to four digits, with the confidence of its least certain factor."""
    value = prod(float(factor.value) for factor in factors)
    sources = "; ".join(factor.source for factor in factors)
    return Sourced(float(f"{value:.4g}"), f"{how}: {sources}", least_sure(*factors))


def least_sure(*numbers: Sourced[Any]) -> Confidence:
    """Confidence of the least certain number."""
    return max((number.confidence for number in numbers), key=_ORDER.index)


def numbers_in(sections: Mapping[str, Any]) -> dict[str, Sourced[Any]]:
    """Every number with a source in mappings and named tuples, at any depth, by its dotted key."""
    numbers: dict[str, Sourced[Any]] = {}
    for name, value in sections.items():
        if isinstance(value, Sourced):
            numbers[name] = value
        elif (inner := _entries(value)) is not None:
            numbers |= {f"{name}.{key}": number for key, number in numbers_in(inner).items()}
    return numbers


def with_numbers(sections: Mapping[str, Any], changed: Mapping[str, Sourced[Any]], prefix: str = "") -> dict[str, Any]:
    """Replace the numbers of some dotted keys."""
    return {name: _with(value, prefix + name, changed) for name, value in sections.items()}


def _with(value: Any, key: str, changed: Mapping[str, Sourced[Any]]) -> Any:
    if isinstance(value, Sourced):
        return changed.get(key, value)
    if (inner := _entries(value)) is None:
        return value
    entries = with_numbers(inner, changed, f"{key}.")
    return entries if isinstance(value, Mapping) else value._replace(**entries)


def _entries(value: Any) -> Mapping[str, Any] | None:
    """Entries of a mapping or a named tuple; None of anything else."""
    if isinstance(value, Mapping):
        return value
    return value._asdict() if hasattr(value, "_asdict") else None
