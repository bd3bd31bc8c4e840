"""Numbers with their sources, in YAML: ``key: {value: 25e9, source: "...", confidence: high}``."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml
from trilane.machines.plausibility import HardwareError

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
    """The confidence of the least certain one."""
    return max((number.confidence for number in numbers), key=_ORDER.index)
