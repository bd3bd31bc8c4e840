"""Names at the ends of lines: kept apart, each as near to its line as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

_LINE = 1.3  # distance of labels over their size
_AWAY = 16  # points between the axes and their labels
_POINTS = 72  # an inch


class LineEnd(NamedTuple):
    """The end of a line, in data coordinates, and what is written next to it."""

    x: float
    y: float
    text: str
    colour: str
    bold: bool = True


def label_ends(ax: Axes, ends: Sequence[LineEnd], size: float = 10.0) -> None:
    """Write the labels to the right of the axes, in the colours of their lines and joined to their ends.

    Call it when the limits of the axes are final: their height on paper decides how far apart labels must be.
    """
    if not ends:
        return
    width, height = _points(ax)
    places = (ax.transData + ax.transAxes.inverted()).transform([(end.x, end.y) for end in ends])
    heights = apart(places[:, 1], _LINE * size / height)
    for (across, up), level, end in zip(places.tolist(), heights.tolist(), ends, strict=True):
        ax.annotate(
            end.text, (across, up), (1 + _AWAY / width, level), xycoords="axes fraction", textcoords="axes fraction",
            va="center", color=end.colour, fontsize=size, fontweight="bold" if end.bold else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1,
                        "shrinkB": 3, "relpos": (0, 0.5)},
        )


def apart(heights: Sequence[float] | NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Heights of labels in the same order, at least ``gap`` from each other, as near as possible to those wanted.

    Least squares: with ``gap`` times its rank taken from each, the heights must not fall. All of it stays within 0..1
    (the axes) if there is room.
    """
    wanted = np.asarray(heights, dtype=np.float64)
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    settled = isotonic_regression(wanted[order] - steps).x
    placed = np.empty_like(wanted)
    placed[order] = np.clip(settled, 0, max(0.0, 1 - steps[-1])) + steps
    return placed


def _points(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes on paper, in points."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # so that the layout is known
    box = ax.get_window_extent()
    return box.width / figure.dpi * _POINTS, box.height / figure.dpi * _POINTS
