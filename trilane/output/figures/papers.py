"""Simulated against published figures: how many come out within how much, by what is known of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, GREY, INK, ORANGE
from trilane.output.figures.scatter import Dot, band_handles, draw_dots, point_handle
from trilane.output.figures.style import legend_of, page, tidy
from trilane.study.papers.blind import BlindRecord
from trilane.study.papers.board import Scoreboard
from trilane.study.papers.paper import AskingWay
from trilane.study.papers.scores import FAR, NEAR, FigureScore

_COLOURS = {AskingWay.STUDIED: BLUE, AskingWay.ONE_NUMBER: GREEN, AskingWay.NOTHING: ORANGE}
_BANDS = {FAR: "#F3F7F5", NEAR: "#DCEBE3"}
_BOUND: dict[str, Any] = {"marker": "^", "markersize": 4, "color": GREY, "markeredgecolor": INK}
_MOST_NAMED, _COLUMNS, _FURTHEST = 5, 3, 1.0
_APART = 0.03  # of the height of a panel, between two names
_AT_EDGE = 0.2  # of its width: there is no room for a name to the left of the point
_BLIND = "blind, first run"

Scores = Sequence[FigureScore]


@default_settings
def plot_papers(board: Scoreboard, record: BlindRecord) -> Figure:
    """Above, the share of figures that come out within an error, a line a way of asking; below, a point a figure.

    Figures that were put in, and in the lines those that follow from such, do not count. Points that do not count are
    hollow; bounds are small grey triangles: on their side of the line they are met. The five furthest are named.
    Figures of another sign than published, and of 0, have no place on the axes below. Raises PictureError without any.
    """
    groups = {title: {way: board.of(way, names) for way in AskingWay} for title, names in board.groups.items()}
    if record.runs and len(board.names) > 1:
        groups[_BLIND] = {way: record.scores(way) for way in (AskingWay.ONE_NUMBER, AskingWay.NOTHING)}
    lines = {title: ways for title, ways in groups.items() if any(_counted(scores) for scores in ways.values())}
    clouds = _clouds(groups)
    if not lines or not clouds:
        raise PictureError("expected published figures that have been played, got none")
    rows = 1 + -(-len(clouds) // _COLUMNS)
    figure, part = page(4.6 * _COLUMNS, 4.4 * rows + 1.0, _headline(lines), _about(groups))
    axes = list(part.subplots(rows, _COLUMNS, squeeze=False).flat)
    for ax, (title, ways) in zip(axes, lines.items(), strict=False):
        _lines(ax, title, ways)
    for ax, (title, scores) in zip(axes[_COLUMNS:], clouds.items(), strict=False):
        _cloud(ax, title, scores)
    for ax in (*axes[len(lines):_COLUMNS], *axes[_COLUMNS + len(clouds):]):
        ax.set_axis_off()
    legend_of(part, _handles(), 4)
    return figure


def _handles() -> list[Any]:
    ways = [Line2D([], [], color=colour, linewidth=2, label=way.value) for way, colour in _COLOURS.items()]
    points = [
        point_handle("counted", marker="o", markersize=5, color=INK),
        point_handle("put in, or follows", marker="o", markersize=5, color=INK, markerfacecolor="white"),
        point_handle("a bound: met on its side", **_BOUND),
    ]
    return [*ways, *points, *reversed(band_handles(_BANDS))]


def _headline(lines: Mapping[str, Mapping[AskingWay, Scores]]) -> str:
    """Shares of the last group: the blind figures where there are any, else further sources."""
    title, ways = list(lines.items())[-1]
    shares = (f"{_share(scores, FAR):.0%} of {len(_counted(scores))} figures ({way.value})"
              for way, scores in ways.items() if _counted(scores))
    return f"{title[:1].upper()}{title[1:]}: within {FAR:.0%} come {', '.join(shares)}"


def _about(groups: Mapping[str, Mapping[AskingWay, Scores]]) -> str:
    played = {one.figure.id: one for ways in groups.values() for own in ways.values() for one in own if one.played}
    lost = sum(not _drawable(one) for one in played.values())
    rest = f" {lost} refused, of another sign than published, or 0, are not drawn below." if lost else ""
    return f"Each figure is asked in its source's own setting, by what is known of the program; units differ.{rest}"


# --- shares within an error -------------------------------------------------------------------------------------------


def _counted(scores: Scores) -> list[FigureScore]:
    return [score for score in scores if score.counts]


def _share(scores: Scores, band: float) -> float:
    return float(np.mean([score.within(band) for score in _counted(scores)]))


def _lines(ax: Axes, title: str, ways: Mapping[AskingWay, Scores]) -> None:
    for way, scores in ways.items():
        if counted := _counted(scores):
            errors = sorted(abs(exp(one.log_ratio) - 1) for one in counted)
            shares = np.arange(1, len(errors) + 1) / len(errors)
            ax.step([0, *errors, 9], [0, *shares, shares[-1]], where="post", color=_COLOURS[way], linewidth=2)
    for band, colour in _BANDS.items():
        ax.axvspan(0, band, color=colour, zorder=0)
    ax.set(title=title, xlim=(0, _FURTHEST), ylim=(0, 1), xlabel="off by at most", ylabel="share of figures")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.tick_params(labelsize=8)
    tidy(ax)


# --- a point a figure -------------------------------------------------------------------------------------------------


def _clouds(groups: Mapping[str, Mapping[AskingWay, Scores]]) -> dict[str, Scores]:
    """As studied and with one number, as far as there are figures to draw; of further sources the latter alone."""
    found = {f"{title}, {way.value}": [one for one in ways.get(way, ()) if _drawable(one)]
             for title, ways in groups.items() if title != _BLIND for way in (AskingWay.STUDIED, AskingWay.ONE_NUMBER)}
    found.pop("further sources, as studied", None)
    return {title: scores for title, scores in found.items() if scores}


def _drawable(score: FigureScore) -> bool:
    published, simulated = score.figure.value, score.simulated
    return published is not None and simulated is not None and min(published, simulated) > 0


def _cloud(ax: Axes, title: str, scores: Scores) -> None:
    dots = [Dot(*_point(score), {"alpha": 0.8, "markeredgewidth": 0.7, **_marker(score)}) for score in scores]
    draw_dots(ax, dots, _BANDS, 1.6)
    ax.set(title=title, aspect="equal", xlabel="published", ylabel="simulated")
    ax.tick_params(labelsize=8)
    _name_furthest(ax, scores)


def _marker(score: FigureScore) -> dict[str, Any]:
    if score.figure.bound:
        return _BOUND
    colour = _COLOURS[score.way]
    edge, face = ("white", colour) if score.counts else (colour, "white")
    return {"marker": "o", "markersize": 5, "markeredgecolor": edge, "markerfacecolor": face}


def _point(score: FigureScore) -> tuple[float, float]:
    assert score.figure.value is not None
    assert score.simulated is not None
    return score.figure.value, score.simulated


def _name_furthest(ax: Axes, scores: Scores) -> None:
    """Ids next to the points, on the side where the line is not; of points of one height, that of the furthest."""
    bottom, top = (log(end) for end in ax.get_ylim())
    named: list[FigureScore] = []
    for score in sorted((s for s in scores if s.counts and not s.within(FAR)), key=lambda s: -abs(s.log_ratio)):
        heights = [log(_point(other)[1]) for other in named]
        if all(abs(log(_point(score)[1]) - height) > _APART * (top - bottom) for height in heights):
            named.append(score)
    for score in named[:_MOST_NAMED]:
        left = score.log_ratio > 0
        offset, ha = ((-5, 0), "right") if left else ((5, 0), "left")
        if left and ax.transLimits.transform(ax.transScale.transform(_point(score)))[0] < _AT_EDGE:
            offset, ha = (-3, 8), "left"
        ax.annotate(score.figure.id, _point(score), offset, fontsize=6.5, color=INK, textcoords="offset points", ha=ha,
                    va="center")
