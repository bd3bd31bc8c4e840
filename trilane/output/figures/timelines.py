"""Decode steps lane by lane: one of a run with a few of its layers in detail, or one measured and predicted."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sim.runs.metrics import step_times
from sim.runs.run import Run
from sim.runs.vocabulary import GPU_LANES, READS, Link, lanes_with
from trilane.output.figures.families import COLOURS, FAMILIES, IDLE, LANE_NAMES
from trilane.output.figures.figure_files import PictureError, default_settings, save_figure
from trilane.output.figures.style import legend_of, page
from trilane.study.validation.comparison import RunComparison

_DOTS = 1200  # across a panel: no bar is drawn narrower than one, or it would vanish
_EDGED = 8  # dots of a bar, from which on it has a white edge, which would hide narrower ones


class StepSpans:
    """One step of a run: its phase, its begin and end (ns), the spans that take time in it, and its layers.

    ``layers``: by layer, ``start`` and ``end`` of its work on the GPU. Raises PictureError for a step that is not in
    the spans.
    """

    def __init__(self, spans: pd.DataFrame, step: int) -> None:
        times: dict[Any, dict[Any, Any]] = step_times(spans).set_index("step").to_dict("index")
        if step not in times:
            raise PictureError(f"expected a step from 0 to {max(times)}, got {step}")
        self.phase: str = times[step]["phase"]
        self.begin: int = round(times[step]["start_ms"] * 1e6)
        self.end: int = round(times[step]["end_ms"] * 1e6)
        timed = spans[spans["end_ns"] > spans["start_ns"]].astype({"lane": str, "kind": str})
        self.spans = timed[(timed["end_ns"] > self.begin) & (timed["start_ns"] < self.end)]
        self.lanes = lanes_with(set(spans["lane"]))
        self.gpu = self.spans[self.spans["lane"].isin(GPU_LANES)]
        own = self.gpu[(self.gpu["step"] == step) & (self.gpu["layer"] >= 0)]
        self.layers = own.groupby("layer").agg(start=("start_ns", "min"), end=("end_ns", "max"))

    @property
    def ms(self) -> float:
        """Duration of the step."""
        return (self.end - self.begin) / 1e6


def median_decode_step(spans: pd.DataFrame) -> int:
    """The decode step of median duration (the earlier of two). Raises PictureError without decode steps."""
    times = step_times(spans).set_index("step").query("phase == 'decode'")
    if times.empty:
        raise PictureError("expected at least one decode step to draw, the run has none; set generated_tokens >= 1")
    ordered = (times["end_ms"] - times["start_ms"]).sort_values(kind="stable")
    return int(ordered.index[(len(ordered) - 1) // 2])


def within(spans: pd.DataFrame, window: tuple[int, int]) -> pd.DataFrame:
    """The spans in a window of time (ns), cut at its ends."""
    inside = spans[(spans["end_ns"] > window[0]) & (spans["start_ns"] < window[1])]
    return inside.assign(start_ns=inside["start_ns"].clip(*window), end_ns=inside["end_ns"].clip(*window))


def busy_ns(spans: pd.DataFrame, window: tuple[int, int]) -> int:
    """Time in which a lane with these spans works in a window."""
    inside = within(spans, window)
    return int((inside["end_ns"] - inside["start_ns"]).sum())


def draw_spans(ax: Axes, spans: pd.DataFrame, row: float, half: float, origin: int, width_ns: int) -> None:
    """Bars from ``row - half`` to ``row + half`` in ms since ``origin``, in a panel ``width_ns`` wide."""
    dot = width_ns / 1e6 / _DOTS
    for kind, group in spans.groupby("kind"):
        starts = (group["start_ns"] - origin) / 1e6
        lengths = ((group["end_ns"] - group["start_ns"]) / 1e6).clip(lower=dot)
        edges = [0.8 if length > _EDGED * dot else 0.0 for length in lengths]
        ax.broken_barh(list(zip(starts, lengths, strict=True)), (row - half, 2 * half),
                       facecolors=COLOURS[str(kind)], edgecolor="white", linewidth=edges)


def family_handles(kinds: Collection[str]) -> list[Patch]:
    """Entries of the legend for these kinds of spans."""
    return [Patch(facecolor=f.colour, label=f.label) for f in FAMILIES if set(kinds).intersection(f.kinds)]


# --- one step of a run ------------------------------------------------------------------------------------------------

_NUMBERED = ("expert", "deferred", "demand", "prefetch", "swap", "precompute", *READS)
_LETTER = 1 / 150  # of a panel's width: one letter on a bar


@default_settings
def plot_gantt(run: Run, step: int | None = None, zoom_layers: int = 3, about: str = "") -> Figure:
    """Draw one step of ``run`` (default: the decode step of median duration); ``about`` says what was run.

    Above the whole step; below ``zoom_layers`` consecutive layers in which the GPU waits about as long as in others.
    Raises PictureError for a step that the run does not have.
    """
    which = " (median step)" if step is None else ""
    number = median_decode_step(run.spans) if step is None else step
    shown = StepSpans(run.spans, number)
    window = _window(shown, zoom_layers)
    busy = busy_ns(shown.gpu, (shown.begin, shown.end)) / (shown.end - shown.begin)
    took = f"takes {shown.ms:.1f} ms, the GPU works {busy:.0%} of it"
    figure, part = page(13, 7.4, f"{run.policy}: {shown.phase} step {number}{which} {took}", about)
    above, below = part.subplots(2, 1, height_ratios=[1, 1.25])
    _draw(above, shown, (shown.begin, shown.end), detailed=False)
    _draw(below, shown, window, detailed=True)
    inside = shown.layers[(shown.layers["start"] >= window[0]) & (shown.layers["end"] <= window[1])].index
    detail = "numbers are experts; layer/expert on copies and on work for another layer"
    above.set_title(f"the whole step, {len(shown.layers)} MoE layers", fontsize=10, loc="left")
    below.set_title(f"layers {inside[0]} to {inside[-1]} in detail; {detail}", fontsize=10, loc="left")
    legend_of(part, [*family_handles(set(shown.spans["kind"])), Patch(facecolor=IDLE, label="GPU idle")], 5)
    return figure


def save_gantt(run: Run, path: str | Path, step: int | None = None, about: str = "") -> None:
    """Write the picture of ``plot_gantt``, in the format that the ending of the name says."""
    save_figure(plot_gantt(run, step, about=about), path)


def _window(step: StepSpans, count: int) -> tuple[int, int]:
    """The ``count`` layers in a row, not at an end if possible, in which the GPU waits nearest to the step's mean."""
    count = min(count, len(step.layers))
    starts, ends = step.layers["start"].tolist(), step.layers["end"].tolist()

    def waiting(first: int, last: int) -> int:
        return int(ends[last] - starts[first] - busy_ns(step.gpu, (starts[first], ends[last])))

    firsts = range(len(starts) - count + 1)
    mean = waiting(0, -1) * count / len(starts)
    first = min(firsts[1:-1] or firsts, key=lambda first: abs(waiting(first, first + count - 1) - mean))
    return starts[first], ends[first + count - 1]


def _draw(ax: Axes, step: StepSpans, window: tuple[int, int], *, detailed: bool) -> None:
    """One panel: lanes as rows, time to the right."""
    origin, width, spans = step.begin, window[1] - window[0], within(step.spans, window)
    lanes = step.lanes
    for lane in set(lanes).intersection(GPU_LANES):
        corner = ((window[0] - origin) / 1e6, lanes.index(lane) - 0.4)
        ax.add_patch(Rectangle(corner, width / 1e6, 0.8, facecolor=IDLE, linewidth=0))  # its spans cover it
    for row, lane in enumerate(lanes):
        of_lane = spans[spans["lane"] == lane]
        draw_spans(ax, of_lane, row, 0.4, origin, width)
        if detailed:
            _number(ax, of_lane, row, origin, width)
    _mark_layers(ax, step, window, every=1 if detailed else max(1, round(len(step.layers) / 13)))
    ax.set_yticks(range(len(lanes)), [LANE_NAMES[lane] for lane in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim((window[0] - origin) / 1e6, (window[1] - origin) / 1e6)
    ax.set_xlabel("time since the step began (ms)")
    ax.tick_params(axis="y", length=0)
    ax.spines[["right", "left"]].set_visible(False)


def _number(ax: Axes, spans: pd.DataFrame, row: int, origin: int, width_ns: int) -> None:
    """Write the expert on bars that have room for it, with its layer where that is not the layer at work."""
    for span in spans[spans["kind"].isin(_NUMBERED)].to_dict("records"):
        layer = span["target_layer"] if span["target_layer"] >= 0 else span["layer"]
        elsewhere = span["lane"].startswith((Link.H2D, Link.DISK)) or layer != span["layer"]
        text = f"{layer}/{span['expert']}" if elsewhere else str(span["expert"])
        if span["end_ns"] - span["start_ns"] >= len(text) * _LETTER * width_ns:
            middle = (span["start_ns"] + span["end_ns"]) / 2
            ax.text((middle - origin) / 1e6, row, text, ha="center", va="center", fontsize=8,
                    color="black" if span["kind"] == "precompute" else "white")


def _mark_layers(ax: Axes, step: StepSpans, window: tuple[int, int], every: int) -> None:
    """A line where each layer begins and the layer's number above it."""
    shown = step.layers[step.layers["start"].between(window[0], window[1], inclusive="left")]
    begins = ((shown["start"] - step.begin) / 1e6).tolist()
    for begin in begins:
        ax.axvline(begin, color="black", linewidth=0.5, alpha=0.35, zorder=0.5)
    top = ax.secondary_xaxis("top")
    labels = [f"layer {layer}" if every == 1 else f"L{layer}" for layer in shown.index[::every]]
    top.set_xticks(begins[::every], labels, fontsize=8, horizontalalignment="left")
    top.tick_params(length=2)


# --- measured and predicted -------------------------------------------------------------------------------------------

_SIDES = (("measured", -0.21), ("predicted", 0.21))  # above and below the middle of a lane's row
_HALF = 0.19  # of a bar's height


@default_settings
def plot_measured_timeline(comparison: RunComparison, zoom_layers: int = 3, about: str = "") -> Figure:
    """Draw the measured decode step of median duration, in the repeat of median TPOT, and the same step as predicted.

    Above the whole step from its beginning; below ``zoom_layers`` of its middle layers, each side from where it began
    them. ``about`` says what was run.
    """
    runs = (comparison.median_run, comparison.predicted)
    step = median_decode_step(runs[0].spans)
    steps = [StepSpans(run.spans, step) for run in runs]
    last = int(steps[0].layers.index[-1])
    first = max(0, (last + 1 - zoom_layers) // 2)
    layers = (first, min(last, first + zoom_layers - 1))
    measured_ms, predicted_ms = (shown.ms for shown in steps)
    took = f"took {measured_ms:.2f} ms, {predicted_ms:.2f} ms were predicted ({predicted_ms / measured_ms - 1:+.1%})"
    figure, part = page(13, 8.6, f"{runs[0].policy}: decode step {step} {took}", about)
    above, below = part.subplots(2, 1)
    _panel(above, steps, [(shown.begin, shown.end) for shown in steps])
    _ends(above, steps)
    above.set_xlabel("time since the step began (ms)")
    detailed = [shown.layers.loc[layers[0] : layers[1]] for shown in steps]  # when the GPU worked on them
    _panel(below, steps, [(int(mine["start"].min()), int(mine["end"].max())) for mine in detailed])
    below.set_xlabel(f"time since layer {layers[0]} began on the GPU (ms)")
    above.set_title("the whole step", fontsize=10, loc="left")
    below.set_title(f"layers {layers[0]} to {layers[1]} in detail", fontsize=10, loc="left")
    legend_of(part, family_handles({kind for shown in steps for kind in shown.spans["kind"]}), 5)
    return figure


def _panel(ax: Axes, steps: list[StepSpans], windows: list[tuple[int, int]]) -> None:
    """Both sides of every lane, each from the start of its own window."""
    longest = max(end - begin for begin, end in windows)
    lanes = max((step.lanes for step in steps), key=len)
    margin: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 8}
    for row, lane in enumerate(lanes):
        busy = []
        for (side, offset), step, window in zip(_SIDES, steps, windows, strict=True):
            mine = step.spans[step.spans["lane"] == lane]
            draw_spans(ax, within(mine, window), row + offset, _HALF, window[0], longest)
            ax.text(-0.004, row + offset, side, ha="right", color="#555555", **margin)
            busy.append(busy_ns(mine, window) / 1e6)
        for (_, offset), text in zip(_SIDES, _busy_texts(*busy), strict=True):
            ax.text(1.004, row + offset, text, **margin)
    ax.set_yticks(range(len(lanes)), [LANE_NAMES[lane] for lane in lanes], fontsize=11, fontweight="bold")
    ax.tick_params(axis="y", length=0, pad=58)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, 1.005 * longest / 1e6)
    for row in range(1, len(lanes)):
        ax.axhline(row - 0.5, color="#DDDDDD", linewidth=0.8)
    ax.spines[["right", "left", "top"]].set_visible(False)


def _busy_texts(measured_ms: float, predicted_ms: float) -> tuple[str, str]:
    """Busy time of a lane, and how far off it was predicted."""
    off = f" ({predicted_ms / measured_ms - 1:+.0%})" if measured_ms else ""
    return f"{measured_ms:.2f} ms busy", f"{predicted_ms:.2f} ms{off}".replace("-0%", "+0%")


def _ends(ax: Axes, steps: list[StepSpans]) -> None:
    """Mark the end of the step, on either side."""
    sides = sorted(zip(steps, ("measured", "predicted"), ("-", "--"), strict=True), key=lambda side: side[0].ms)
    for (step, name, style), aligned, offset in zip(sides, ("right", "left"), (-3, 3), strict=True):
        ax.axvline(step.ms, color="black", linewidth=1.4, linestyle=style)
        ax.annotate(f"{name} end", (step.ms, 1), xycoords=("data", "axes fraction"), xytext=(offset, 3), ha=aligned,
                    textcoords="offset points", fontsize=8, annotation_clip=False)
