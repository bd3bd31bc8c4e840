"""The values of an axis, as a command line or a sweep file writes them: a list, one value, or a range such as 8..64."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from policies.registry import SYSTEMS
from sim.machine.dials import DIALS, PCIE, link_bytes_per_s
from trilane.common.hints import hints_of, plain_types
from trilane.common.quoting import quoted
from trilane.common.yaml_files import parse_yaml
from trilane.study.sweep.axes import NUMBERS, PARAMETER, SweepError, check_axis, takers

POINTS = 8  # of a range that does not say how many
MOST_POINTS = 10_000
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?:/\s*(\d+)\s*)?")
_EVEN = ("_share", "_fraction", "_permille", "_recall", "_acceptance")  # names of what is spread evenly, not by ratio


def values_in(name: str, text: str) -> tuple[Any, ...]:
    """The values that a text names for an axis, each once.

    ``1,4,16``: these. ``8..64``: eight points at even ratios, in three digits; powers of two between the ends
    where both are whole and the axis counts something (``batch=1..16``); even steps for shares and for parameters that
    are no whole numbers. ``8..64/5``: five points. Raises SweepError, and HardwareError for a PCIe slot that is none.
    """
    check_axis(name)
    if match := _RANGE.fullmatch(text):
        return _range(name, text, match)
    return distinct(_scalar(name, part) for part in text.split(","))


def values_of(name: str, given: object) -> tuple[Any, ...]:
    """The same from a sweep file: a list, one value, or text as on the command line. Raises SweepError."""
    check_axis(name)
    if isinstance(given, str):
        return values_in(name, given)
    values = distinct(given if isinstance(given, list) else [given])
    if not values:
        raise SweepError(f"{name}: expected one value or more, got an empty list")
    return tuple(number_in(value) if isinstance(value, str) and is_number(name) else value for value in values)


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Each once, in order; 1 and 1.0 are one, 1 and true are not."""
    kept: dict[Any, Any] = {}
    for value in values:
        kept.setdefault(_identity(value), value)
    return tuple(kept.values())


def _identity(value: Any) -> Any:
    """The same for values that are one."""
    if isinstance(value, Mapping):
        return frozenset((name, _identity(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    return isinstance(value, bool), value


def _scalar(name: str, text: str) -> Any:
    """One value of a list, read as YAML reads it; ``25e9`` is a number here too."""
    if not text.strip():
        raise SweepError(f"{name}: expected a value between commas, got none")
    value = parse_yaml(text, name, SweepError)
    if name == PCIE:
        link_bytes_per_s(value)  # raises for what no link has: a slip, where other numbers may be out of reach of some
    return number_in(value) if isinstance(value, str) and is_number(name) else value


def number_in(text: str) -> Any:
    """A number that YAML 1.1 takes for text, such as 25e9; other text as it is."""
    return float(text) if re.fullmatch(_NUMBER, text.strip()) else text


def is_number(name: str) -> bool:
    """Whether the values of an axis are numbers (of some, text or null as well)."""
    if name.startswith(PARAMETER):
        return bool(_kinds(name) & {int, float})
    return name in DIALS or "." in name or name in NUMBERS


def _counts(name: str) -> bool:
    """Whether an axis counts something: batches, tokens, a policy's window."""
    return float not in _kinds(name) if name.startswith(PARAMETER) else NUMBERS.get(name) is int


def _kinds(name: str) -> frozenset[type]:
    """Types of ``parameters.X`` in the policies that have it."""
    hints = (hints_of(SYSTEMS[policy].parameters)[name.removeprefix(PARAMETER)] for policy in takers(name))
    return frozenset[type]().union(*map(plain_types, hints))


# --- ranges -----------------------------------------------------------------------------------------------------------


def _range(name: str, text: str, match: re.Match[str]) -> tuple[Any, ...]:
    """The points of LOW..HIGH or LOW..HIGH/COUNT."""
    low, high = float(match[1]), float(match[2])
    if not is_number(name) or not -math.inf < low < high < math.inf:
        raise SweepError(f"{name}: expected a range LOW..HIGH of numbers, such as 8..64, got {quoted(text)}")
    if match[3] is not None and not 2 <= float(match[3]) <= MOST_POINTS:
        raise SweepError(f"{name}: expected 2 to {MOST_POINTS:,} points in a range, got {quoted(text)}")
    count = None if match[3] is None else int(match[3])
    whole = _counts(name) and low.is_integer() and high.is_integer()
    if whole and count is None and low >= 1:
        return _doublings(int(low), int(high))
    spread = np.linspace if low <= 0 or _is_even(name) else np.geomspace
    inner = spread(low, high, count or POINTS)[1:-1].tolist()
    ends = (int(low), int(high)) if low.is_integer() and high.is_integer() else (low, high)
    return distinct([ends[0], *(map(round, inner) if whole else _rounded(inner)), ends[1]])


def _is_even(name: str) -> bool:
    """Whether a range goes in even steps: shares do, and what policies weigh with, which is mostly 0 to 1."""
    return name.endswith(_EVEN) or (name.startswith(PARAMETER) and not _counts(name))


def _doublings(low: int, high: int) -> tuple[int, ...]:
    """Both ends, and the powers of two between them."""
    powers = (1 << bit for bit in range(high.bit_length()))
    return (low, *(power for power in powers if low < power < high), high)


def _rounded(values: Sequence[float]) -> list[float]:
    """Three digits that count; more where values would fall together."""
    rounded: list[float] = []
    for digits in range(3, 18):
        rounded = [float(f"{value:.{digits}g}") for value in values]
        if len(set(rounded)) == len(values):
            break
    return rounded
