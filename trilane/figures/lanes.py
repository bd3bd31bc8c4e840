"""How lanes and their spans look in timelines: names, colours by kind of span, bars and the legend."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from trilane.figures.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

_DOTS = 1200  # across a panel: no bar is drawn narrower than one, or it would vanish
_EDGED = 8  # dots of a bar, from which on it has a white edge, which would hide narrower ones


class Family(NamedTuple):
    """Kinds of spans that share a colour."""

    label: str
    colour: str
    kinds: tuple[str, ...]


FAMILIES = (
    Family("expert on GPU or CPU", BLUE, ("expert",)),
    Family("attention, gate, shared experts, combine", "#9A9A9A", ("attention", "gate", "shared", "combine")),
    Family("load that the layer waits for", VERMILLION, ("demand",)),
    Family("prefetch", GREEN, ("prefetch",)),
    Family("cache swap, write-back", PURPLE, ("swap", "writeback")),
    Family("routing, activations, results", SKY, ("routing", "activations", "result")),
    Family("planning", ORANGE, ("plan", "foresee")),
    Family("speculation", "#F0E442", ("speculate", "precompute")),
    Family("launch", "#C8C8C8", ("launch",)),
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
                       facecolors=_COLOURS[str(kind)], edgecolor="white", linewidth=edges)  # fmt: skip


def family_handles(kinds: Collection[str]) -> list[Patch]:
    """Entries of the legend for these kinds of spans."""
    return [Patch(facecolor=f.colour, label=f.label) for f in FAMILIES if set(kinds).intersection(f.kinds)]
