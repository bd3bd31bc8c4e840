"""What timelines share: steps of a run, names of lanes, colours by kind of span, bars and the legend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sim.runs.metrics import step_times
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

_DOTS = 1200  # across a panel: no bar is drawn narrower than one, or it would vanish
_EDGED = 8  # dots of a bar, from which on it has a white edge, which would hide narrower ones


class Family(NamedTuple):
    """Kinds of spans that share a colour."""

    label: str
    colour: str
    kinds: tuple[str, ...]


FAMILIES = (
    Family("expert on GPU or CPU", BLUE, ("expert", "deferred")),
    Family("attention, gate, shared experts, combine", "#9A9A9A", ("attention", "gate", "shared", "combine")),
    Family("load that the layer waits for", VERMILLION, ("demand",)),
    Family("prefetch", GREEN, ("prefetch",)),
    Family("cache swap, write-back", PURPLE, ("swap", "writeback")),
    Family("routing, activations, results", SKY, ("routing", "activations", "result")),
    Family("planning", ORANGE, ("plan", "foresee", "observe")),
    Family("speculation", "#F0E442", ("speculate", "precompute", "draft")),
    Family("launch", "#C8C8C8", ("launch", "program")),
    Family("host waits for the routing", "#EDEDED", ("wait",)),
)
_COLOURS = {kind: family.colour for family in FAMILIES for kind in family.kinds}
LANE_NAMES = {
    "host": "host thread",
    "gpu": "GPU",
    "cpu": "CPU experts",
    "h2d": "copies to GPU",
    "d2h": "copies to host",
}


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
        self.gpu = self.spans[self.spans["lane"] == "gpu"]
        own = self.gpu[(self.gpu["step"] == step) & (self.gpu["layer"] >= 0)]
        self.layers = own.groupby("layer").agg(start=("start_ns", "min"), end=("end_ns", "max"))

    @property
    def ms(self) -> float:
        """How long the step takes."""
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
    """How long a lane with these spans works in a window."""
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
                       facecolors=_COLOURS[str(kind)], edgecolor="white", linewidth=edges)


def family_handles(kinds: Collection[str]) -> list[Patch]:
    """Entries of the legend for these kinds of spans."""
    return [Patch(facecolor=f.colour, label=f.label) for f in FAMILIES if set(kinds).intersection(f.kinds)]
