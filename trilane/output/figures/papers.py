"""Simulated against published figures of papers: a panel for each paper, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.identity import identity_axes, identity_handles, point_handle
from trilane.output.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, legend_of, page
from trilane.study.papers.board import Scoreboard
from trilane.study.papers.scores import FAR, NEAR, FigureScore

_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
_BANDS = {FAR: "#F3F7F5", NEAR: "#DCEBE3"}
_BOUND: dict[str, Any] = {"marker": "^", "markersize": 4, "color": GREY, "markeredgecolor": INK}
_MOST_NAMES, _COLUMNS = 5, 3
_APART = 0.03  # of the height of a panel, between two names
_AT_EDGE = 0.2  # of its width: there is no room for a name to the left of the point


@default_settings
def plot_papers(board: Scoreboard) -> Figure:
    """A point a figure, hollow where it was put in; the bands are 15 and 30 %; the five furthest of a paper are named.

    Bounds are small grey triangles: on their side of the line they are met, however far from it they lie.

    Figures of another sign than published, and of 0, have no place on such axes. Raises PictureError without any.
    """
    shown = [score for score in board.scores if _drawable(score)]
    if not shown:
        raise PictureError("expected published figures that have been played, got none")
    names = list(dict.fromkeys(score.paper.name for score in shown))
    columns, rows = min(len(names), _COLUMNS), -(-len(names) // _COLUMNS)
    figure, part = page(4.6 * max(columns, 2), 4.6 * rows + 1.2, _headline(board), _about(board, len(shown)))
    axes = list(part.subplots(rows, columns, squeeze=False).flat)
    for ax, name, colour in zip(axes, names, _COLOURS * len(names), strict=False):
        _panel(ax, name, [score for score in shown if score.paper.name == name], colour)
    for ax in axes[len(names) :]:
        ax.set_axis_off()
    points = [
        point_handle("asked", marker="o", markersize=5, color=INK),
        point_handle("put in", marker="o", markersize=5, color=INK, markerfacecolor="white"),
        point_handle("a bound: met on its side", **_BOUND),
    ]
    _, *bands = identity_handles(_BANDS)
    legend_of(part, [*points, *reversed(bands)], 5)
    return figure


def _drawable(score: FigureScore) -> bool:
    published, simulated = score.figure.value, score.simulated
    return published is not None and simulated is not None and min(published, simulated) > 0


def _headline(board: Scoreboard) -> str:
    summary = board.summaries()[-1]
    shares = f"within {NEAR:.0%}, {summary.far:.0%} within {FAR:.0%}"
    return f"{summary.near:.0%} of {summary.figures} published figures come out {shares}"


def _about(board: Scoreboard, shown: int) -> str:
    lost = len(board.scores) - len(board.not_played) - shown
    rest = f" {lost} with another sign than published, or 0, are not drawn." if lost else ""
    return f"Each point is a figure of a paper, asked in the paper's own setting; units differ.{rest}"


def _panel(ax: Axes, name: str, scores: Sequence[FigureScore], colour: str) -> None:
    values = [value for score in scores for value in _point(score)]
    ends = (min(values) / 1.6, max(values) * 1.6)
    identity_axes(ax, ends, _BANDS)
    for score in scores:
        ax.plot(*_point(score), alpha=0.9, markeredgewidth=0.8, **_marker(score, colour))
    ax.set(title=name, aspect="equal", xlabel="published", ylabel="simulated")
    ax.tick_params(labelsize=8)
    _name_furthest(ax, scores)


def _marker(score: FigureScore, colour: str) -> dict[str, Any]:
    if score.figure.bound:
        return _BOUND
    edge, face = (colour, "white") if score.put_in else ("white", colour)
    return {"marker": "o", "markersize": 5, "markeredgecolor": edge, "markerfacecolor": face}


def _point(score: FigureScore) -> tuple[float, float]:
    assert score.figure.value is not None
    assert score.simulated is not None
    return score.figure.value, score.simulated


def _name_furthest(ax: Axes, scores: Sequence[FigureScore]) -> None:
    """Ids next to the points, on the side where the line is not; of points of one height, that of the furthest."""
    bottom, top = (log(end) for end in ax.get_ylim())
    named: list[FigureScore] = []
    for score in sorted((s for s in scores if s.counts and not s.within(FAR)), key=lambda s: -abs(s.log_ratio)):
        heights = [log(_point(other)[1]) for other in named]
        if all(abs(log(_point(score)[1]) - height) > _APART * (top - bottom) for height in heights):
            named.append(score)
    for score in named[:_MOST_NAMES]:
        left = score.log_ratio > 0
        offset, ha = ((-5, 0), "right") if left else ((5, 0), "left")
        if left and ax.transLimits.transform(ax.transScale.transform(_point(score)))[0] < _AT_EDGE:
            offset, ha = (-3, 8), "left"
        ax.annotate(score.figure.id.partition("-")[2], _point(score), offset, fontsize=6.5, color=INK,
                    textcoords="offset points", ha=ha, va="center")
