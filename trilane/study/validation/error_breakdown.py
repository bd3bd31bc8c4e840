"""The breakdown of a TPOT error into parts of a decode step, in ms and in words.

A step consists of the GPU's work, by kind, and its waits. On both sides these add up to TPOT, so their differences add
up to its error (except that medians over repeats do not add up exactly).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trilane.study.validation.comparison import Repeated, RunComparison

_WAITS = {"h2d": "the GPU waits for copies", "cpu": "the GPU waits for the CPU", "host": "the GPU waits for the host"}
_BEHIND = {"h2d": ("h2d",), "cpu": ("cpu", "d2h"), "host": ("host", "d2h")}  # lanes whose work may cause a wait
_MOST = 3  # parts that are named
_WORTH_NAMING = 0.1  # least share of the TPOT error, or of the wait to be explained


@dataclass(frozen=True)
class ErrorPart:
    """A part of a decode step, measured and predicted; ``behind``: the likely cause of a wait's error."""

    what: str
    ms: Repeated
    behind: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: {_side_by_side(self.ms)}"
        return f"{text}; {self.behind}" if self.behind else text

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what, "measured_ms": self.ms.median, "predicted_ms": self.ms.predicted,
            "difference_ms": self.ms.difference, "behind": self.behind,
        }


def parts_of(comparison: RunComparison) -> list[ErrorPart]:
    """All parts of a mean decode step: the GPU's work by kind, and its waits by lane."""
    work = [ErrorPart(f"{kind} on the GPU", ms) for (lane, kind), ms in comparison.work_ms.items() if lane == "gpu"]
    return work + [ErrorPart(_WAITS[lane], ms, _behind(comparison, lane)) for lane, ms in comparison.stall_ms.items()]


def error_breakdown(comparison: RunComparison) -> list[ErrorPart]:
    """The parts that differ most, in either direction, largest first; without those that are small compared with the
    error of the whole.

    Parts may differ more than the whole: errors that cancel out are errors.
    """
    parts = sorted(parts_of(comparison), key=lambda part: -abs(part.ms.difference))
    least = _WORTH_NAMING * abs(comparison.tpot_ms.difference)
    return [part for part in parts[:_MOST] if part.ms.difference and abs(part.ms.difference) >= least]


def _behind(comparison: RunComparison, waited_for: str) -> str:
    """The work of the awaited lane with an error in the same direction as that of the wait, if there is any."""
    wait = comparison.stall_ms[waited_for].difference
    if not wait:
        return ""
    same = {key: ms.difference / wait for key, ms in comparison.work_ms.items() if key[0] in _BEHIND[waited_for]}
    key = max(same, key=lambda key: same[key], default=None)
    if key is None or same[key] < _WORTH_NAMING:
        lanes = " and ".join(_BEHIND[waited_for])
        return f"work on {lanes} does not explain it: compare its starts and their order"
    return f"{key[1]} on {key[0]}: {_side_by_side(comparison.work_ms[key])}{_numbers(comparison.work_spans[key])}"


def _side_by_side(ms: Repeated) -> str:
    return f"{ms.predicted:.3g} ms predicted, {ms.median:.3g} measured ({ms.difference:+.2g})"


def _numbers(count: Repeated) -> str:
    if f"{count.predicted:.3g}" == f"{count.median:.3g}":
        return f", {count.median:.3g} of them each"
    return f", {count.predicted:.3g} of them predicted, {count.median:.3g} measured"
