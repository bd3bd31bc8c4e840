"""One decode step, measured and predicted: every lane twice, one above the other, on one time axis."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.runs.vocabulary import LANES
from trilane.output.figures.figure_files import default_settings
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
from trilane.study.validation.comparison import RunComparison

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
    measured_ms, predicted_ms = (each.ms for each in steps)
    took = f"took {measured_ms:.2f} ms, {predicted_ms:.2f} ms were predicted ({predicted_ms / measured_ms - 1:+.1%})"
    figure, part = page(13, 8.6, f"{runs[0].policy}: decode step {step} {took}", about)
    above, below = part.subplots(2, 1)
    _panel(above, steps, [(each.begin, each.end) for each in steps])
    _ends(above, steps)
    above.set_xlabel("time since the step began (ms)")
    detailed = [each.layers.loc[layers[0] : layers[1]] for each in steps]  # when the GPU worked on them
    _panel(below, steps, [(int(mine["start"].min()), int(mine["end"].max())) for mine in detailed])
    below.set_xlabel(f"time since layer {layers[0]} began on the GPU (ms)")
    above.set_title("the whole step", fontsize=10, loc="left")
    below.set_title(f"layers {layers[0]} to {layers[1]} in detail", fontsize=10, loc="left")
    legend_of(part, family_handles({kind for each in steps for kind in each.spans["kind"]}), 5)
    return figure


def _panel(ax: Axes, steps: list[StepSpans], windows: list[tuple[int, int]]) -> None:
    """Both sides of every lane, each from the start of its own window."""
    longest = max(end - begin for begin, end in windows)
    margin: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 8}
    for row, lane in enumerate(LANES):
        busy = []
        for (side, offset), step, window in zip(_SIDES, steps, windows, strict=True):
            mine = step.spans[step.spans["lane"] == lane]
            draw_spans(ax, within(mine, window), row + offset, _HALF, window[0], longest)
            ax.text(-0.004, row + offset, side, ha="right", color="#555555", **margin)
            busy.append(busy_ns(mine, window) / 1e6)
        for (_, offset), text in zip(_SIDES, _busy_texts(*busy), strict=True):
            ax.text(1.004, row + offset, text, **margin)
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


def _ends(ax: Axes, steps: list[StepSpans]) -> None:
    """Where the step ends, on either side."""
    sides = sorted(zip(steps, ("measured", "predicted"), ("-", "--"), strict=True), key=lambda side: side[0].ms)
    for (step, name, style), aligned, offset in zip(sides, ("right", "left"), (-3, 3), strict=True):
        ax.axvline(step.ms, color="black", linewidth=1.4, linestyle=style)
        ax.annotate(f"{name} end", (step.ms, 1), xycoords=("data", "axes fraction"), xytext=(offset, 3), ha=aligned,
                    textcoords="offset points", fontsize=8, annotation_clip=False)
