"""Horizontal bars: names to their left, values to their right, whiskers from the lowest to the highest of several."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from trilane.output.figures.style import WHISKER, tidy


def style_bars(ax: Axes, names: Sequence[str], places: Sequence[float] | None = None) -> None:
    """Axes of horizontal bars, the first at the top: names without ticks, a grid behind."""
    at = range(len(names)) if places is None else places
    ax.set_yticks(at, names, fontsize=11)
    ax.set_ylim(at[-1] + 0.6, -0.6)
    ax.tick_params(axis="y", length=0)
    tidy(ax, "x")
    ax.spines["left"].set_visible(False)


def style_tpot(ax: Axes, end_ms: float) -> None:
    """A horizontal axis of times per token, from 0."""
    ax.set_xlim(0, end_ms)
    ax.set_xlabel("time per output token, TPOT (ms); shorter is better")


def write_value(ax: Axes, place: float, text: str, *, bold: bool = True) -> None:
    """The value of a bar, in a column to the right of the axes, where neither whiskers nor marks can cover it."""
    ax.annotate(text, (1, place), xycoords=ax.get_yaxis_transform(), xytext=(8, 0), textcoords="offset points",
                va="center", fontsize=10, fontweight="bold" if bold else "normal", annotation_clip=False)


def whisker(ax: Axes, place: float, low: float, high: float) -> None:
    """From the lowest to the highest of several values of a bar."""
    ax.plot([low, high], [place, place], color=WHISKER, linewidth=1.5, marker="|", markersize=9, zorder=5)


def whisker_handle(label: str) -> Line2D:
    """An entry of the legend for ``whisker``."""
    return Line2D([], [], color=WHISKER, linewidth=1.5, marker="|", markersize=9, label=label)
