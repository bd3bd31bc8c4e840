"""A Gantt chart of one decode step: the whole step, and a few of its layers in detail."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sim.runs.run import Run
from sim.runs.vocabulary import LANES
from trilane.output.figures.figure_files import default_settings, save_figure
from trilane.output.figures.lanes import (
    LANE_NAMES,
    StepSpans,
    busy_ns,
    draw_spans,
    family_handles,
    median_decode_step,
    within,
)
from trilane.output.figures.style import legend_of, page

_IDLE = "#FBE3D6"  # the GPU does nothing, which is what offloading policies try to avoid
_NUMBERED = ("expert", "deferred", "demand", "prefetch", "swap", "precompute")
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
    legend_of(part, [*family_handles(set(shown.spans["kind"])), Patch(facecolor=_IDLE, label="GPU idle")], 5)
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
    corner = ((window[0] - origin) / 1e6, LANES.index("gpu") - 0.4)
    ax.add_patch(Rectangle(corner, width / 1e6, 0.8, facecolor=_IDLE, linewidth=0))  # its spans cover it
    for row, lane in enumerate(LANES):
        of_lane = spans[spans["lane"] == lane]
        draw_spans(ax, of_lane, row, 0.4, origin, width)
        if detailed:
            _number(ax, of_lane, row, origin, width)
    _mark_layers(ax, step, window, every=1 if detailed else max(1, round(len(step.layers) / 13)))
    ax.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in LANES])
    ax.set_ylim(len(LANES) - 0.5, -0.5)
    ax.set_xlim((window[0] - origin) / 1e6, (window[1] - origin) / 1e6)
    ax.set_xlabel("time since the step began (ms)")
    ax.tick_params(axis="y", length=0)
    ax.spines[["right", "left"]].set_visible(False)


def _number(ax: Axes, spans: pd.DataFrame, row: int, origin: int, width_ns: int) -> None:
    """Write the expert on bars that have room for it, with its layer where that is not the layer at work."""
    for span in spans[spans["kind"].isin(_NUMBERED)].to_dict("records"):
        layer = span["target_layer"] if span["target_layer"] >= 0 else span["layer"]
        elsewhere = span["lane"] == "h2d" or layer != span["layer"]
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
