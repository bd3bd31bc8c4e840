"""The values of an axis, as a command line or a sweep file writes them: a list, one value, or a range such as 8..64."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_type_hints

import numpy as np
import yaml

from sim.scenario import Scenario
from sim.sweep.axes import DIALS, PARAMETER, SweepError, check_axis

POINTS = 8  # of a range that does not say how many
MOST_POINTS = 10_000
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?:/\s*(\d+)\s*)?")
_EVEN = ("_share", "_fraction", "_permille", "_recall")  # names of what is spread evenly, not by ratio


def values_in(name: str, text: str) -> tuple[Any, ...]:
    """The values that a text names for an axis, each once.

    ``1,4,16``: these. ``8..64``: eight points at even ratios, rounded to three digits; powers of two between the ends
    where both are whole and the axis counts something (``batch=1..16``); even steps for shares. ``8..64/5``: five
    points. Raises SweepError.
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
    kept: list[Any] = []
    for value in values:
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in kept):
            kept.append(value)
    return tuple(kept)


def _scalar(name: str, text: str) -> Any:
    """One value of a list, read as YAML reads it; ``25e9`` is a number here too."""
    if not text.strip():
        raise SweepError(f"{name}: expected a value between commas, got none")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise SweepError(f"{name}: {text!r} is not a YAML value") from None
    return number_in(value) if isinstance(value, str) and is_number(name) else value


def number_in(text: str) -> Any:
    """A number that YAML 1.1 takes for text, such as 25e9; other text as it is."""
    return float(text) if re.fullmatch(_NUMBER, text.strip()) else text


def is_number(name: str) -> bool:
    """Whether the values of an axis are numbers (of some, text or null as well)."""
    return name in DIALS or "." in name or _hint(name) in (int, float, int | None, float | None)


def _hint(name: str) -> Any:
    return get_type_hints(Scenario).get(name)


def _counts(name: str) -> bool:
    """Whether an axis counts something: batches, tokens, a policy's window."""
    return name.startswith(PARAMETER) or _hint(name) in (int, int | None)


# --- ranges -----------------------------------------------------------------------------------------------------------


def _range(name: str, text: str, match: re.Match[str]) -> tuple[Any, ...]:
    """The points of LOW..HIGH or LOW..HIGH/COUNT."""
    low, high = float(match[1]), float(match[2])
    if not is_number(name) or not low < high:
        raise SweepError(f"{name}: expected a range LOW..HIGH of numbers, such as 8..64, got {text!r}")
    count = None if match[3] is None else int(match[3])
    if count is not None and not 2 <= count <= MOST_POINTS:
        raise SweepError(f"{name}: expected 2 to {MOST_POINTS:,} points in a range, got {text!r}")
    whole = _counts(name) and low.is_integer() and high.is_integer()
    if whole and count is None and low >= 1:
        return _doublings(int(low), int(high))
    spread = np.linspace if low <= 0 or name.endswith(_EVEN) else np.geomspace
    inner = [_rounded(value, whole) for value in spread(low, high, count or POINTS)[1:-1].tolist()]
    ends = (int(low), int(high)) if low.is_integer() and high.is_integer() else (low, high)
    return distinct([ends[0], *inner, ends[1]])


def _doublings(low: int, high: int) -> tuple[int, ...]:
    """Both ends, and the powers of two between them."""
    powers = (1 << bit for bit in range(high.bit_length()))
    return (low, *(power for power in powers if low < power < high), high)


def _rounded(value: float, whole: bool) -> int | float:
    """Three digits that count, or a whole number."""
    return round(value) if whole else float(f"{value:.3g}")
