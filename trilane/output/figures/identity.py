"""Two axes of one range, on which a point lies on the line if both its values are equal, and their legend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trilane.output.figures.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, round_ticks, tidy

BAND, NULL_MODEL = "#E3F1EA", "#9A9A9A"  # colours
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#000000")  # of points, by what they are
SHAPES = "os^DvPX"


def identity_axes(ax: Axes, ends: tuple[float, float], bands: Mapping[float, str], *, linear: bool = False) -> None:
    """Axes between these ends, logarithmic unless ``linear``, with the line, and the ``bands`` about it: errors, as
    fractions, with their colours.
    """
    for error, colour in bands.items():
        low, high = ([(1 + side * error) * end for end in ends] for side in (-1, 1))
        ax.fill_between(ends, low, high, color=colour, linewidth=0)
    ax.plot(ends, ends, color="black", linewidth=1)
    if not linear:
        ax.set(xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            round_ticks(axis, *ends)
    ax.set(xlim=ends, ylim=ends)
    tidy(ax)


def point_handle(label: str, **look: Any) -> Line2D:
    """An entry of the legend for points that look so."""
    return Line2D([], [], linestyle="", label=label, **look)


def identity_handles(bands: Mapping[float, str]) -> list[Line2D | Patch]:
    """Entries of the legend for the line and the bands."""
    line = Line2D([], [], color="black", linewidth=1, label="predicted = measured")
    return [line, *(Patch(facecolor=colour, label=f"within {error:.0%}") for error, colour in bands.items())]
