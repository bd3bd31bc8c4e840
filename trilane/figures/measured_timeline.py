"""A picture of one decode step, measured and predicted: every lane twice, one above the other, on one time axis."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sim.runs.metrics import step_times
from sim.runs.run import Run
from sim.runs.spans import LANES
from trilane.figures.gantt import median_decode_step
from trilane.figures.span_style import COLOURS, FAMILIES, LANE_NAMES
from trilane.study.validation.comparison import RunComparison

_HALF = 0.19  # of a row; measured above the lane's middle, predicted below
_SIDES = (("measured", -0.21), ("predicted", 0.21))
_DOTS = 1200  # across a panel: no bar is drawn thinner than one, or it would vanish


def overlay(comparison: RunComparison, zoom_layers: int = 3, about: str = "") -> Figure:
    """Draw the measured decode step of median duration, in the repeat of median TPOT, and the same step as predicted.

    Above the whole step from its beginning; below ``zoom_layers`` of its middle layers, each side from where it began
    them. ``about`` says what was run.
    """
    runs = (comparison.median_run, comparison.predicted)
    step = median_decode_step(runs[0].spans)
    steps = [_Step(run, step) for run in runs]
    figure = Figure(figsize=(13, 8.6), layout="constrained")
    above, below = figure.subplots(2, 1)
    layers = steps[0].middle_layers(zoom_layers)
    _panel(above, steps, [(each.begin, each.end) for each in steps])
    _ends(above, steps)
    above.set_xlabel("time since the step began (ms)")
    _panel(below, steps, [each.extent(layers) for each in steps])
    below.set_xlabel(f"time since layer {layers[0]} began on the GPU (ms)")
    figure.suptitle(_headline(runs[0].policy, step, *(each.ms for each in steps)), fontsize=14, fontweight="bold",
                    x=0.01, ha="left")  # fmt: skip
    above.set_title(f"{about}\nthe whole step" if about else "the whole step", fontsize=10, loc="left")
    below.set_title(f"layers {layers[0]} to {layers[1]} from close by", fontsize=10, loc="left")
    _legend(figure, {kind for each in steps for kind in each.spans["kind"]})
    return figure


class _Step:
    """One step of a run: its begin and end in ns, and the spans that take time in it."""

    def __init__(self, run: Run, step: int) -> None:
        times = step_times(run.spans).set_index("step").to_dict("index")[step]
        self.step = step
        self.begin: int = round(times["start_ms"] * 1e6)
        self.end: int = round(times["end_ms"] * 1e6)
        timed = run.spans[run.spans["end_ns"] > run.spans["start_ns"]].astype({"lane": str, "kind": str})
        self.spans = timed[(timed["end_ns"] > self.begin) & (timed["start_ns"] < self.end)]

    @property
    def ms(self) -> float:
        return (self.end - self.begin) / 1e6

    def busy_ms(self, lane: str, window: tuple[int, int]) -> float:
        """How long a lane works in a window of the step."""
        mine = self.spans[self.spans["lane"] == lane]
        inside = mine["end_ns"].clip(*window) - mine["start_ns"].clip(*window)
        return int(inside.sum()) / 1e6

    def middle_layers(self, count: int) -> tuple[int, int]:
        """First and last of ``count`` layers in the middle, or of all that there are."""
        last = int(self.spans.loc[self.spans["step"] == self.step, "layer"].max())
        first = max(0, (last + 1 - count) // 2)
        return first, min(last, first + count - 1)

    def extent(self, layers: tuple[int, int]) -> tuple[int, int]:
        """When the GPU began the first of the layers, and ended the last, in ns."""
        gpu = self.spans[(self.spans["lane"] == "gpu") & (self.spans["step"] == self.step)]
        mine = gpu[gpu["layer"].between(*layers)]
        return int(mine["start_ns"].min()), int(mine["end_ns"].max())


def _headline(policy: str, step: int, measured_ms: float, predicted_ms: float) -> str:
    off = predicted_ms / measured_ms - 1
    return f"{policy}: decode step {step} took {measured_ms:.2f} ms, {predicted_ms:.2f} ms were predicted ({off:+.1%})"


def _panel(ax: Axes, steps: list[_Step], windows: list[tuple[int, int]]) -> None:
    """Both sides of every lane, each from the start of its own window."""
    longest = max(end - begin for begin, end in windows)
    for (side, offset), step, window in zip(_SIDES, steps, windows, strict=True):
        for row, lane in enumerate(LANES):
            _bars(ax, step.spans[step.spans["lane"] == lane], row + offset, window, longest)
            ax.text(-0.004, row + offset, side, transform=ax.get_yaxis_transform(), ha="right", va="center",
                    fontsize=8, color="#555555")  # fmt: skip
    for row, lane in enumerate(LANES):
        busy = [step.busy_ms(lane, window) for step, window in zip(steps, windows, strict=True)]
        for (_, offset), text in zip(_SIDES, _busy_texts(*busy), strict=True):
            ax.text(1.004, row + offset, text, transform=ax.get_yaxis_transform(), va="center", fontsize=8)
    ax.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in LANES], fontsize=11, fontweight="bold")
    ax.tick_params(axis="y", length=0, pad=58)
    ax.set_ylim(len(LANES) - 0.5, -0.5)
    ax.set_xlim(0, 1.005 * longest / 1e6)
    for row in range(1, len(LANES)):
        ax.axhline(row - 0.5, color="#DDDDDD", linewidth=0.8)
    ax.spines[["right", "left", "top"]].set_visible(False)


def _busy_texts(measured_ms: float, predicted_ms: float) -> tuple[str, str]:
    """Busy time of a lane, and how far off it was predicted."""
    off = f" ({predicted_ms / measured_ms - 1:+.0%})" if measured_ms else ""
    return f"{measured_ms:.2f} ms busy", f"{predicted_ms:.2f} ms{off}".replace("-0%", "+0%")


def _bars(ax: Axes, spans: pd.DataFrame, row: float, window: tuple[int, int], longest: int) -> None:
    begin, end = window
    shown, dot = spans[(spans["end_ns"] > begin) & (spans["start_ns"] < end)], longest / _DOTS
    for kind, group in shown.groupby("kind"):
        starts = group["start_ns"].clip(lower=begin)
        lengths = (group["end_ns"].clip(upper=end) - starts).clip(lower=dot)
        bars = list(zip((starts - begin) / 1e6, lengths / 1e6, strict=True))
        edge = 0.5 if lengths.median() > 8 * dot else 0.0  # tells neighbours apart; would hide thin bars
        ax.broken_barh(bars, (row - _HALF, 2 * _HALF), facecolors=COLOURS[str(kind)], edgecolor="white",
                       linewidth=edge)  # fmt: skip


def _ends(ax: Axes, steps: list[_Step]) -> None:
    """Where the step ends, on either side."""
    sides = sorted(zip(steps, ("measured", "predicted"), ("-", "--"), strict=True), key=lambda side: side[0].ms)
    for (step, name, style), aligned, offset in zip(sides, ("right", "left"), (-3, 3), strict=True):
        ax.axvline(step.ms, color="black", linewidth=1.4, linestyle=style)
        ax.annotate(f"{name} end", (step.ms, 1), xycoords=("data", "axes fraction"), xytext=(offset, 3), ha=aligned,
                    textcoords="offset points", fontsize=8, annotation_clip=False)  # fmt: skip


def _legend(figure: Figure, kinds: set[str]) -> None:
    handles = [Patch(facecolor=f.colour, label=f.label) for f in FAMILIES if kinds.intersection(f.kinds)]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
