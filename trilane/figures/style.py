"""What pictures share: colours, the page with its headline, axes without clutter."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from trilane.figures.marks import MEANINGS

# Okabe-Ito colours: readers with any colour vision can tell them apart. Yellow is left out, white paper swallows it.
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
ORANGE, SKY, PURPLE = "#E69F00", "#56B4E9", "#CC79A7"
INK, GREY, GRID = "#444444", "#BBBBBB", "#E5E5E5"
IMPOSSIBLE = "#E8E8E8"  # where the lower bound says that nobody can be
_LARGEST, _SMALLEST = 14.0, 11.5  # points of a headline
_LETTER = 0.6  # width of a bold letter over its size, with some to spare
_POINTS = 72  # an inch


def page(width: float, height: float, headline: str, about: str = "", below: str = "") -> tuple[Figure, SubFigure]:
    """A figure (inches) that says its finding in bold and what was run under it, and the part of it to draw into.

    ``below``: remarks at the foot, broken into lines that fit.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    part = figure.add_subfigure(figure.add_gridspec()[0])
    size = min(_LARGEST, width * _POINTS / (_LETTER * max(1, len(headline))))
    if size < _SMALLEST:
        size, headline = 13.0, _broken(headline, width, 13.0)
    figure.suptitle(headline, fontsize=size, fontweight="bold", x=0.01, ha="left")
    if about:
        part.suptitle(_broken(about, width, 9.0), fontsize=9.5, x=0.01, ha="left", color=INK)
    if below:
        figure.supxlabel(_broken(below, width, 8.5), fontsize=9, x=0.01, ha="left", color=INK)
    return figure, part


def _broken(text: str, width: float, size: float) -> str:
    """``text`` on lines that fit into ``width`` inches with letters of ``size`` points; its own lines are kept."""
    letters = max(20, int(width * _POINTS / (_LETTER * size)))
    return "\n".join(fill(line, letters, break_on_hyphens=False, break_long_words=False) for line in text.split("\n"))


def tidy(ax: Axes, grid: str = "both") -> None:
    """No box around the data, and a pale grid behind it (``x``, ``y`` or ``both``)."""
    ax.grid(axis=grid, color=GRID)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.spines[["right", "top"]].set_visible(False)


def style_tpot_axis(ax: Axes, room_ms: float) -> None:
    """An axis of horizontal bars that show times per token, up to ``room_ms``."""
    ax.set_xlim(0, room_ms)
    ax.set_xlabel("time per output token, TPOT (ms); shorter is better")
    style_bar_axis(ax)


def style_bar_axis(ax: Axes) -> None:
    """Axes of horizontal bars: names without ticks, a grid behind."""
    ax.tick_params(axis="y", length=0)
    tidy(ax, "x")
    ax.spines["left"].set_visible(False)


def marks_in_words(marks: Iterable[str]) -> list[str]:
    """What the marks (`` *``, `` ~``) mean that are there."""
    there = {mark.strip() for mark in marks}
    return [f"{sign} {text}" for sign, text in MEANINGS.items() if sign in there]


def meanings_of(marks: Iterable[str]) -> list[Line2D]:
    """A line of the legend for each of the marks that is there."""
    return [Line2D([], [], linestyle="", label=text) for text in marks_in_words(marks)]
