"""A Gantt picture of one decode step: the whole step, and a few of its layers from close by."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sim.runs.run import Run
from sim.runs.spans import LANES
from trilane.figures.figure_files import PictureError, save_figure
from trilane.figures.span_style import COLOURS, FAMILIES, LANE_NAMES

_IDLE = "#FBE3D6"  # the GPU has nothing to do: what an offloading policy is there to avoid
_DOTS = 1200  # across a panel: no bar is drawn thinner than one, or it would vanish
_NUMBERED = ("expert", "demand", "prefetch", "swap", "precompute")


def median_decode_step(spans: pd.DataFrame) -> int:
    """The decode step of median duration (the earlier of two)."""
    _, bounds = _steps(spans)
    decode = bounds[bounds["phase"] == "decode"]
    if decode.empty:
        raise PictureError("expected at least one decode step to draw, the run has none; set generated_tokens >= 1")
    ordered = (decode["end"] - decode["start"]).sort_values(kind="stable")
    return int(ordered.index[(len(ordered) - 1) // 2])


def gantt(run: Run, step: int | None = None, zoom_layers: int = 3, about: str = "") -> Figure:
    """Draw one step of ``run`` (default: the decode step of median duration); ``about`` says what was run.

    Above the whole step; below ``zoom_layers`` consecutive layers in which the GPU waits about as long as in others.
    """
    which = " (the median one)" if step is None else ""
    step = median_decode_step(run.spans) if step is None else step
    timed, bounds = _steps(run.spans)
    if step not in bounds.index:
        raise PictureError(f"expected a step from 0 to {bounds.index.max()}, got {step}")
    start, end, phase = (bounds[name].to_dict()[step] for name in ("start", "end", "phase"))
    inside = timed[(timed["end_ns"] > start) & (timed["start_ns"] < end)]
    layers = _layers(inside, step)
    figure = Figure(figsize=(13, 7.2), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[1, 1.25])
    _draw(above, inside, layers, start, (start, end), numbers=False)
    gpu = inside[inside["lane"] == "gpu"]
    window = _window(layers, gpu, zoom_layers)
    _draw(below, inside, layers, start, window, numbers=True)
    busy = 1 - _waiting(gpu, start, end) / (end - start)
    figure.suptitle(
        f"{run.policy}: {phase} step {step}{which} takes {(end - start) / 1e6:.1f} ms, the GPU works {busy:.0%} of it",
        fontsize=15, fontweight="bold",
    )  # fmt: skip
    first, last = _visible(layers, window)
    whole = f"the whole step, {len(layers)} MoE layers"
    above.set_title(f"{about}\n{whole}" if about else whole, fontsize=10, loc="left")
    below.set_title(f"layers {first} to {last} from close by; numbers are experts", fontsize=10, loc="left")
    _legend(figure, set(inside["kind"]))
    return figure


def save_gantt(run: Run, path: str | Path, step: int | None = None, about: str = "") -> None:
    """Write the picture of ``gantt`` as PNG (or what the name's ending says)."""
    save_figure(gantt(run, step, about=about), path)


def _steps(spans: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Spans that take time, and when each step's own work on host and GPU starts and ends."""
    timed = spans[spans["end_ns"] > spans["start_ns"]].astype({"lane": str, "kind": str, "phase": str})
    own = timed[timed["lane"].isin(("host", "gpu")) & (timed["step"] >= 0)]
    bounds = own.groupby("step").agg(start=("start_ns", "min"), end=("end_ns", "max"), phase=("phase", "first"))
    return timed, bounds


def _layers(inside: pd.DataFrame, step: int) -> pd.DataFrame:
    """Start and end of every MoE layer on the GPU."""
    own = inside[(inside["step"] == step) & (inside["lane"] == "gpu") & (inside["layer"] >= 0)]
    return own.groupby("layer").agg(start=("start_ns", "min"), end=("end_ns", "max"))


def _window(layers: pd.DataFrame, gpu: pd.DataFrame, count: int) -> tuple[int, int]:
    """The ``count`` layers in a row, none at an edge if possible, in which the GPU waits nearest to the step's mean."""
    count = min(count, len(layers))
    starts, ends = layers["start"].tolist(), layers["end"].tolist()
    places = range(len(layers) - count + 1)
    mean = _waiting(gpu, starts[0], ends[-1]) * count / len(layers)

    def oddness(place: int) -> float:
        return abs(_waiting(gpu, starts[place], ends[place + count - 1]) - mean)

    place = min(places[1:-1] or places, key=oddness)
    return starts[place], ends[place + count - 1]


def _waiting(gpu: pd.DataFrame, start: int, end: int) -> float:
    """How long the GPU does nothing from ``start`` to ``end``, in ns."""
    inside = gpu[(gpu["end_ns"] > start) & (gpu["start_ns"] < end)]
    return end - start - float((inside["end_ns"].clip(upper=end) - inside["start_ns"].clip(lower=start)).sum())


def _visible(layers: pd.DataFrame, window: tuple[int, int]) -> tuple[int, int]:
    shown = layers[(layers["start"] >= window[0]) & (layers["end"] <= window[1])].index
    return int(shown[0]), int(shown[-1])


def _draw(
    ax: Axes, spans: pd.DataFrame, layers: pd.DataFrame, origin: int, window: tuple[int, int], *, numbers: bool
) -> None:
    """One panel: lanes as rows, time to the right."""
    shown = spans[(spans["end_ns"] > window[0]) & (spans["start_ns"] < window[1])]
    dot = (window[1] - window[0]) / 1e6 / _DOTS
    ax.add_patch(_background(window, origin))
    for row, lane in enumerate(LANES):
        of_lane = shown[shown["lane"] == lane]
        for kind, group in of_lane.groupby("kind"):
            starts = (group["start_ns"] - origin) / 1e6
            lengths = ((group["end_ns"] - group["start_ns"]) / 1e6).clip(lower=dot)
            bars = list(zip(starts, lengths, strict=True))
            # A white edge tells neighbours apart from close by; it would hide thin bars, and a whole step is full of
            # them.
            edges = [0.8 if numbers and length > 5 * dot else 0.0 for length in lengths]
            ax.broken_barh(bars, (row - 0.4, 0.8), facecolors=COLOURS[str(kind)], edgecolor="white", linewidth=edges)
        if numbers:
            _number(ax, of_lane, row, origin, window)
    _mark_layers(ax, layers, origin, window, every=1 if numbers else max(1, round(len(layers) / 13)))
    ax.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in LANES])
    ax.set_ylim(len(LANES) - 0.5, -0.5)
    ax.set_xlim((window[0] - origin) / 1e6, (window[1] - origin) / 1e6)
    ax.set_xlabel("time since the step began (ms)")
    ax.tick_params(axis="y", length=0)
    ax.spines[["right", "left"]].set_visible(False)


def _background(window: tuple[int, int], origin: int) -> Rectangle:
    """The GPU's row in the colour of idleness, for its spans to cover."""
    row = LANES.index("gpu")
    corner = ((window[0] - origin) / 1e6, row - 0.4)
    return Rectangle(corner, (window[1] - window[0]) / 1e6, 0.8, facecolor=_IDLE, linewidth=0)


def _number(ax: Axes, spans: pd.DataFrame, row: int, origin: int, window: tuple[int, int]) -> None:
    """Write expert numbers on bars that have room for them."""
    room = (window[1] - window[0]) / 75  # ns that two digits take
    shown = spans[spans["kind"].isin(_NUMBERED)]
    starts, ends = shown["start_ns"].clip(lower=window[0]).tolist(), shown["end_ns"].clip(upper=window[1]).tolist()
    for start, end, kind, expert in zip(starts, ends, shown["kind"].tolist(), shown["expert"].tolist(), strict=True):
        if end - start >= room:
            ax.text(((start + end) / 2 - origin) / 1e6, row, str(expert), ha="center", va="center", fontsize=8,
                    color="black" if kind == "precompute" else "white")  # fmt: skip


def _mark_layers(ax: Axes, layers: pd.DataFrame, origin: int, window: tuple[int, int], every: int) -> None:
    """A line where each layer begins and the layer's number above it."""
    shown = layers[(layers["start"] >= window[0]) & (layers["start"] < window[1])]
    begins = ((shown["start"] - origin) / 1e6).tolist()
    for begin in begins:
        ax.axvline(begin, color="black", linewidth=0.5, alpha=0.35, zorder=0.5)
    top = ax.secondary_xaxis("top")
    labels = [f"layer {layer}" if every == 1 else f"L{layer}" for layer in shown.index[::every]]
    top.set_xticks(begins[::every], labels, fontsize=8)
    top.tick_params(length=2)
    for label in top.get_xticklabels():
        label.set_horizontalalignment("left")


def _legend(figure: Figure, kinds: set[str]) -> None:
    handles = [Patch(facecolor=f.colour, label=f.label) for f in FAMILIES if kinds.intersection(f.kinds)]
    handles.append(Patch(facecolor=_IDLE, label="GPU idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
