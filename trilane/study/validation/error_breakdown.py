"""Causes: what a TPOT error is made of, in ms of a decode step and in words.

A step is what the GPU does, kind by kind, and what it waits for; both sides add up to their TPOT, so that their
differences add up to its error (but for what medians over repeats do not add up to).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.repeated import Repeated

_WAITS = {"h2d": "the GPU waits for copies", "cpu": "the GPU waits for the CPU", "host": "the GPU waits for the host"}
_BEHIND = {"h2d": ("h2d",), "cpu": ("cpu", "d2h"), "host": ("host", "d2h")}  # lanes whose work a wait may come from
_WORTH_NAMING = 0.1  # of the TPOT error, or of the wait that is to be explained


@dataclass(frozen=True)
class ErrorPart:
    """A part of a decode step that was predicted otherwise than measured; ``behind``: what lies under a wait."""

    what: str
    ms: Repeated
    behind: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: {_side_by_side(self.ms)}"
        return f"{text}; {self.behind}" if self.behind else text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "what": self.what, "measured_ms": self.ms.median, "predicted_ms": self.ms.predicted,
            "difference_ms": self.ms.difference, "behind": self.behind,
        }  # fmt: skip


def parts_of(comparison: RunComparison) -> list[ErrorPart]:
    """All parts of a mean decode step: the GPU's work by kind, and its waits."""
    work = [ErrorPart(f"{kind} on the GPU", ms) for (lane, kind), ms in comparison.work_ms.items() if lane == "gpu"]
    return work + [ErrorPart(_WAITS[lane], ms, _behind(comparison, lane)) for lane, ms in comparison.stall_ms.items()]


def error_breakdown(comparison: RunComparison, most: int = 3) -> list[ErrorPart]:
    """The parts that differ most, largest first, whichever way; none that is small beside the error of the whole.

    Parts may differ more than the whole: errors that cancel out are errors.
    """
    parts = sorted(parts_of(comparison), key=lambda part: -abs(part.ms.difference))
    least = _WORTH_NAMING * abs(comparison.tpot_ms.difference)
    return [part for part in parts[:most] if part.ms.difference and abs(part.ms.difference) >= least]


def _behind(comparison: RunComparison, waited_for: str) -> str:
    """The work of the lane waited for that was mispredicted the same way as the wait, if any was."""
    wait = comparison.stall_ms[waited_for].difference
    if not wait:
        return ""
    same = {key: ms.difference / wait for key, ms in comparison.work_ms.items() if key[0] in _BEHIND[waited_for]}
    key = max(same, key=lambda key: same[key], default=None)
    if key is None or same[key] < _WORTH_NAMING:
        lanes = " and ".join(_BEHIND[waited_for])
        return f"work on {lanes} does not explain it: see when, and in which order, it starts"
    return f"{key[1]} on {key[0]}: {_side_by_side(comparison.work_ms[key])}{_numbers(comparison.work_spans[key])}"


def _side_by_side(ms: Repeated) -> str:
    return f"{ms.predicted:.3g} ms predicted, {ms.median:.3g} measured ({ms.difference:+.2g})"


def _numbers(count: Repeated) -> str:
    if f"{count.predicted:.3g}" == f"{count.median:.3g}":
        return f", {count.median:.3g} of them each"
    return f", {count.predicted:.3g} of them predicted, {count.median:.3g} measured"
