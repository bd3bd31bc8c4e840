"""The comparison of one scenario's measured runs with its predicted run, number by number.

It does not depend on how a run was measured: both sides are spans, and every number has a single definition, in
``sim.runs.metrics``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from sim.runs.columns import columns_of
from sim.runs.hits import layer_frame
from sim.runs.metrics import step_times
from sim.runs.run import Run
from sim.runs.stalls import STALL_LANES
from sim.runs.vocabulary import COPIES, FURTHER_LANES, INSTANT, LANES, SPAN_KINDS
from trilane.common.errors import TrilaneError
from trilane.study.validation.parity import Parity

K = TypeVar("K")
_ALIKE = {lane: (lane, *(own for own in FURTHER_LANES if own.rstrip("123") == lane)) for lane in LANES}  # of all GPUs
_MAY_DIFFER = ("hardware", "hardware_overrides")  # the machine itself, and the profile that stands for it


@dataclass(frozen=True)
class Repeated:
    """One number of a run: as measured in each repeat, and as predicted."""

    measured: tuple[float, ...]
    predicted: float

    @property
    def median(self) -> float:
        return float(np.median(self.measured))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the repeats, interpolated."""
        low, high = np.percentile(self.measured, [25, 75])
        return float(low), float(high)

    @property
    def half_iqr(self) -> float | None:
        """Half the interquartile range of the repeats; None for a single one, which has no spread."""
        low, high = self.quartiles
        return (high - low) / 2 if len(self.measured) > 1 else None

    @property
    def spread(self) -> float | None:
        """The noise floor for judging an error: half the interquartile range over the median."""
        return None if self.half_iqr is None or not self.median else self.half_iqr / self.median

    @property
    def difference(self) -> float:
        """Predicted - measured, in the number's own unit."""
        return self.predicted - self.median

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None if the measured value is 0."""
        return self.predicted / self.median - 1 if self.median else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every repeat, and the statistics."""
        low, high = self.quartiles
        return {
            "repeats": list(self.measured), "median": self.median, "lowest": min(self.measured),
            "highest": max(self.measured), "first_quartile": low, "third_quartile": high, "spread": self.spread,
            "predicted": self.predicted, "error": self.error,
        }


class AgreementError(TrilaneError):
    """Runs that cannot be compared; the message says how they differ, or what they lack."""


class Work(NamedTuple):
    """A lane's work of one kind in a mean decode step."""

    ms: float  # within the decode window
    spans: float  # number of spans of decode steps


@dataclass(frozen=True)
class RunComparison:
    """Repeated measured runs of one scenario, its predicted run, and the parity of their logs if it was checked.

    Raises AgreementError if they are not of one scenario (except for the hardware's name) or have no decode steps.
    """

    measured: tuple[Run, ...]
    predicted: Run
    parity: Parity | None = None

    def __post_init__(self) -> None:
        if not self.measured:
            raise AgreementError(f"{self.predicted.policy}: expected at least one measured run, got none")
        for run in self.measured:
            _check_same(run, self.predicted)
        if not self.predicted.metrics.decode_steps:
            raise AgreementError(f"{self.predicted.policy}: expected decode steps, got none; set generated_tokens >= 1")

    @cached_property
    def scenario(self) -> Mapping[str, Any]:
        """The scenario of the prediction, which names its profile, by key."""
        return self.predicted.scenario.to_dict()

    @cached_property
    def tpot_ms(self) -> Repeated:
        return self._metrics["tpot_ms"]

    @property
    def tpot_error(self) -> float:
        """Absolute error of TPOT, as a fraction of the measured value."""
        return abs(self.tpot_ms.error or 0.0)

    @cached_property
    def ttft_ms(self) -> Repeated | None:
        """Time to first token; None without a prefill."""
        return None if self.predicted.metrics.ttft_ms is None else self._metrics["ttft_ms"]

    @property
    def null_tpot_ms(self) -> float | None:
        """The prediction of the null model, if the run has it."""
        return self.predicted.bounds.get("null_model_tpot_ms")

    @property
    def null_error(self) -> float | None:
        """null model / measured TPOT - 1."""
        return None if self.null_tpot_ms is None else self.null_tpot_ms / self.tpot_ms.median - 1

    @cached_property
    def lane_ms(self) -> dict[str, Repeated]:
        """Busy time of each lane in a mean decode step."""
        return _repeated([_busy_ms(run) for run in self._runs])

    def lane_points(self, lane: str) -> float:
        """Error of a lane's busy time as a fraction of the measured TPOT."""
        return self.lane_ms[lane].difference / self.tpot_ms.median

    @cached_property
    def stall_ms(self) -> dict[str, Repeated]:
        """Time of a mean decode step without GPU work, by the lane that the GPU waited for (``sim.runs.stalls``)."""
        return {lane: self._metrics[f"stall_{lane}_ms"] for lane in STALL_LANES}

    @cached_property
    def work_ms(self) -> dict[tuple[str, str], Repeated]:
        """Busy time of a mean decode step by lane and kind of span."""
        return _repeated([{key: work.ms for key, work in works.items()} for works in self._works])

    @cached_property
    def work_spans(self) -> dict[tuple[str, str], Repeated]:
        """Spans of a mean decode step by lane and kind."""
        return _repeated([{key: work.spans for key, work in works.items()} for works in self._works])

    @cached_property
    def memory(self) -> dict[str, Repeated]:
        """The subject of law 10, counted in the spans: hits and hit rate, expert copies by kind, their bytes."""
        return _repeated([_memory(run) for run in self._runs])

    @cached_property
    def median_run(self) -> Run:
        """The repeat with the median TPOT (the faster of two), to be shown for all."""
        ranked = sorted(self.measured, key=lambda run: run.metrics.tpot_ms or 0.0)
        return ranked[(len(ranked) - 1) // 2]

    @property
    def _runs(self) -> tuple[Run, ...]:
        return (*self.measured, self.predicted)

    @cached_property
    def _works(self) -> list[dict[tuple[str, str], Work]]:
        return [work_of(run.spans) for run in self._runs]

    @cached_property
    def _metrics(self) -> dict[str, Repeated]:
        return _repeated([{name: value or 0.0 for name, value in run.metrics.to_dict().items()} for run in self._runs])


def work_of(spans: pd.DataFrame) -> dict[tuple[str, str], Work]:
    """The lanes' work in the decode window, by (lane, kind)."""
    c, steps = columns_of(spans), step_times(spans).query("phase == 'decode'")
    window = round(steps["start_ms"].min() * 1e6), round(steps["end_ms"].max() * 1e6)
    inside = np.clip(c.end, *window) - np.clip(c.start, *window)
    kinds = [kind for kind in SPAN_KINDS if kind not in INSTANT]
    on = {lane: np.logical_or.reduce(list(map(c.on, alike))) for lane, alike in _ALIKE.items()}
    masks = {(lane, kind): on[lane] & c.of(kind) for lane, kind in product(LANES, kinds)}
    return {
        key: Work(int(inside[mask].sum()) / 1e6 / len(steps), int((mask & c.decode).sum()) / len(steps))
        for key, mask in masks.items() if mask.any()
    }


def _check_same(run: Run, predicted: Run) -> None:
    """Raises AgreementError unless both are runs of one scenario."""
    mine, other = run.scenario.to_dict(), predicted.scenario.to_dict()
    for key in (key for key in other if key in mine and key not in _MAY_DIFFER):
        if mine[key] != other[key]:
            raise AgreementError(
                f"{predicted.policy}: expected one scenario, measured and predicted; {key} was {mine[key]!r} when "
                f"measured and {other[key]!r} when predicted"
            )
    if run.trace_checksum != predicted.trace_checksum:
        raise AgreementError(f"{predicted.policy}: the trace has changed between measurement and prediction")
    if run.metrics.decode_steps != predicted.metrics.decode_steps:
        raise AgreementError(
            f"{predicted.policy}: expected as many decode steps measured as predicted, got "
            f"{run.metrics.decode_steps} and {predicted.metrics.decode_steps}"
        )


def _repeated(runs: Sequence[Mapping[K, float]]) -> dict[K, Repeated]:
    """The numbers of runs by their names, 0 where a run has none; the last run is the predicted one."""
    names = dict.fromkeys(name for run in runs for name in run)
    *measured, predicted = runs
    return {name: Repeated(tuple(run.get(name, 0.0) for run in measured), predicted.get(name, 0.0)) for name in names}


def _busy_ms(run: Run) -> dict[str, float]:
    shares, tpot_ms = run.metrics.busy_share, run.metrics.tpot_ms or 0.0
    return {lane: sum(shares.get(own) or 0.0 for own in alike) * tpot_ms for lane, alike in _ALIKE.items()}


def _memory(run: Run) -> dict[str, float]:
    copies = run.spans[run.spans["kind"].isin(COPIES)]
    return {
        "decode_resident_hit_rate": float(run.metrics.decode_resident_hit_rate or 0.0),
        "hits": int(layer_frame(run.spans)["hits"].sum()),
        **{f"{kind}_copies": int((copies["kind"] == kind).sum()) for kind in COPIES},
        "copied_bytes": int(copies["bytes"].sum()),
    }


# --- the parts of an error --------------------------------------------------------------------------------------------

_BEHIND = {"h2d": ("h2d",), "cpu": ("cpu", "d2h"), "host": ("host", "d2h")}  # lanes whose work may cause a wait
_MOST = 3  # parts that are named
_WORTH_NAMING = 0.1  # least share of the TPOT error, or of the wait to be explained


@dataclass(frozen=True)
class ErrorPart:
    """A part of a decode step, measured and predicted: the GPU's work of one kind, or its waits for one lane (``kind``
    is None). ``behind``: the lane and kind of the work that likely causes a wait's error; None where none does."""

    lane: str
    kind: str | None
    ms: Repeated
    behind: tuple[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "lane": self.lane, "kind": self.kind, "measured_ms": self.ms.median, "predicted_ms": self.ms.predicted,
            "difference_ms": self.ms.difference, "work_behind": self.behind and list(self.behind),
        }


def parts_of(comparison: RunComparison) -> list[ErrorPart]:
    """All parts of a mean decode step: the GPU's work by kind, and its waits by lane.

    They add up to its TPOT, except that medians over repeats do not add up exactly.
    """
    work = [ErrorPart(lane, kind, ms) for (lane, kind), ms in comparison.work_ms.items() if lane == "gpu"]
    return work + [ErrorPart(lane, None, ms, _behind(comparison, lane)) for lane, ms in comparison.stall_ms.items()]


def error_parts(comparison: RunComparison) -> list[ErrorPart]:
    """The parts that differ most, in either direction, largest first; without those that are small compared with the
    error of the whole.

    Parts may differ more than the whole: errors that cancel out are errors.
    """
    parts = sorted(parts_of(comparison), key=lambda part: -abs(part.ms.difference))
    least = _WORTH_NAMING * abs(comparison.tpot_ms.difference)
    return [part for part in parts[:_MOST] if part.ms.difference and abs(part.ms.difference) >= least]


def lanes_behind(waited_for: str) -> tuple[str, ...]:
    """The lanes whose work may cause the GPU's wait for a lane."""
    return _BEHIND[waited_for]


def _behind(comparison: RunComparison, waited_for: str) -> tuple[str, str] | None:
    """The work of the awaited lane with an error in the same direction as that of the wait, if there is any."""
    wait = comparison.stall_ms[waited_for].difference
    if not wait:
        return None
    same = {key: ms.difference / wait for key, ms in comparison.work_ms.items() if key[0] in _BEHIND[waited_for]}
    key = max(same, key=lambda key: same[key], default=None)
    return None if key is None or same[key] < _WORTH_NAMING else key
