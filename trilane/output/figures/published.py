"""Predicted against published values: speeds that other people measured, and figures of papers."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.engines.accuracy.errors import QUANTITIES, REGIMES, Quantity, Regime, errors_of, measured, regime_of_row
from trilane.engines.accuracy.measured_rows import MeasuredRow
from trilane.engines.accuracy.scores import HELD_OUT, Scores
from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION
from trilane.output.figures.scatter import BAND, Dot, band_handles, draw_dots, line_handle, point_handle
from trilane.output.figures.style import legend_of, page
from trilane.study.papers.scores import FAR, NEAR, FigureScore, Scoreboard

# --- speeds of other people's machines --------------------------------------------------------------------------------

_COLOURS: dict[Regime, str] = dict(
    zip(REGIMES, (BLUE, GREEN, ORANGE, VERMILLION, PURPLE, "#000000", SKY, "#8C564B"), strict=True)
)
_SHAPES: dict[Regime, str] = dict(zip(REGIMES, "os^DvPX*", strict=True))
_FAR_OFF, _MOST_SPEEDS = 0.5, 9  # the rows that are named
_UNITS: dict[Quantity, str] = {"decode": "tokens a second of one sequence", "prompts": "prompt tokens a second"}


@default_settings
def plot_accuracy(scores: Scores) -> Figure:
    """A point a row: predicted, held out where there are such predictions, against measured speeds; coloured by regime.

    Decode is on the left, prompts on the right. The band is 20 % on either side, as the table counts; rows that are
    more than 1.5 times too fast or too slow are named, nine at most.
    Raises PictureError without any rows.
    """
    panels = {quantity: dots for quantity in QUANTITIES if (dots := _dots(scores, quantity))}
    if not panels:
        raise PictureError("expected rows with a measured speed that can be predicted, got none")
    figure, part = page(6.6 * max(len(panels), 1.4), 6.9, _errors_in_words(scores), _about_speeds(scores))
    axes, bands = part.subplots(1, len(panels), squeeze=False)[0], {0.2: BAND}
    for ax, (quantity, dots) in zip(axes, panels.items(), strict=True):
        draw_dots(ax, [dot for _, dot in dots], bands, 1.4)
        ax.set(aspect="equal", xlabel=f"measured: {_UNITS[quantity]}", ylabel=f"predicted: {_UNITS[quantity]}")
        ax.tick_params(labelsize=8.5)
        _name_rows(ax, scores, quantity, dots)
    drawn = set(map(regime_of_row, scores.rows))
    regimes = [
        point_handle(regime, marker=_SHAPES[regime], color=_COLOURS[regime], markersize=6)
        for regime in REGIMES if regime in drawn
    ]
    legend_of(part, [*regimes, line_handle(), *band_handles(bands)], 5)
    return figure


def _dots(scores: Scores, quantity: Quantity) -> list[tuple[MeasuredRow, Dot]]:
    return [
        (row, Dot(speed, predicted, _look(row))) for row in scores.rows
        if (speed := measured(row).of(quantity)) is not None
        and (predicted := scores.first[row.id].of(quantity)) is not None
    ]


def _look(row: MeasuredRow) -> dict[str, Any]:
    """Hollow for a row that is only a sanity check."""
    regime = regime_of_row(row)
    edge, face = (_COLOURS[regime], "white") if row.quality == "C" else ("white", _COLOURS[regime])
    return {"marker": _SHAPES[regime], "markersize": 6, "markeredgewidth": 0.8, "alpha": 0.9, "markeredgecolor": edge,
            "markerfacecolor": face}


def _errors_in_words(scores: Scores) -> str:
    """Median errors of the rows that count."""
    by_quantity = {quantity: errors_of(scores.counted, scores.first, quantity) for quantity in QUANTITIES}
    texts = [
        f"{quantity} {errors.median:.0%} ({errors.rows} speed{'s' * (errors.rows > 1)}, "
        f"{errors.machines} machine{'s' * (errors.machines > 1)})"
        for quantity, errors in by_quantity.items() if errors
    ]
    return f"Median error: {', '.join(texts)}" if texts else "Predicted against measured speeds"


def _about_speeds(scores: Scores) -> str:
    held_out = next(iter(scores.predictions)) == HELD_OUT
    how = "with numbers fitted to other machines' rows" if held_out else "with the numbers of the program"
    hollow = "; hollow: rows that are a sanity check" if len(scores.counted) < len(scores.rows) else ""
    return f"Each point is a speed that was measured by its source, and is predicted {how}{hollow}."


def _name_rows(ax: Axes, scores: Scores, quantity: Quantity, dots: Sequence[tuple[MeasuredRow, Dot]]) -> None:
    """Ids of rows that are far off next to their points, and what they are in the corners where there are no points:
    too fast top left, too slow bottom right.
    """
    far = {row.id for row, _ in scores.furthest(quantity, _FAR_OFF)[:_MOST_SPEEDS]}
    named = sorted(((row, dot) for row, dot in dots if row.id in far), key=lambda pair: pair[1].measured)
    for place, (row, dot) in enumerate(named):  # neighbours above and below, in turns
        ax.annotate(row.id, (dot.measured, dot.predicted), (0, -11 if place % 2 else 6), ha="center",
                    textcoords="offset points", fontsize=7.5, color=INK)
    fast = [_named(row, dot) for row, dot in named if dot.predicted > dot.measured]
    slow = [_named(row, dot) for row, dot in named if dot.predicted < dot.measured]
    ax.text(0.02, 0.98, "\n".join(fast), transform=ax.transAxes, ha="left", va="top", fontsize=7.5, color=INK)
    ax.text(0.98, 0.02, "\n".join(slow), transform=ax.transAxes, ha="right", va="bottom", fontsize=7.5, color=INK)


def _named(row: MeasuredRow, dot: Dot) -> str:
    """Id, model, the GPU or, without one, the CPU, and the error."""
    parts = row.machine.split("+")
    processor = parts[-1] if parts[0] == "none" else parts[0]
    return f"{row.id}: {row.model} on {processor}, {dot.predicted / dot.measured - 1:+.0%}"


# --- figures of papers ------------------------------------------------------------------------------------------------

_PAPER_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
_PAPER_BANDS = {FAR: "#F3F7F5", NEAR: "#DCEBE3"}
_BOUND: dict[str, Any] = {"marker": "^", "markersize": 4, "color": GREY, "markeredgecolor": INK}
_MOST_FIGURES, _COLUMNS = 5, 3
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
    figure, part = page(4.6 * max(columns, 2), 4.6 * rows + 1.2, _shares(board), _about_figures(board, len(shown)))
    axes = list(part.subplots(rows, columns, squeeze=False).flat)
    for ax, name, colour in zip(axes, names, _PAPER_COLOURS * len(names), strict=False):
        _panel(ax, name, [score for score in shown if score.paper.name == name], colour)
    for ax in axes[len(names) :]:
        ax.set_axis_off()
    points = [
        point_handle("asked", marker="o", markersize=5, color=INK),
        point_handle("put in", marker="o", markersize=5, color=INK, markerfacecolor="white"),
        point_handle("a bound: met on its side", **_BOUND),
    ]
    legend_of(part, [*points, *reversed(band_handles(_PAPER_BANDS))], 5)
    return figure


def _drawable(score: FigureScore) -> bool:
    published, simulated = score.figure.value, score.simulated
    return published is not None and simulated is not None and min(published, simulated) > 0


def _shares(board: Scoreboard) -> str:
    summary = board.summaries()[-1]
    shares = f"within {NEAR:.0%}, {summary.far:.0%} within {FAR:.0%}"
    return f"{summary.near:.0%} of {summary.figures} published figures come out {shares}"


def _about_figures(board: Scoreboard, shown: int) -> str:
    lost = len(board.scores) - len(board.not_played) - shown
    rest = f" {lost} with another sign than published, or 0, are not drawn." if lost else ""
    return f"Each point is a figure of a paper, asked in the paper's own setting; units differ.{rest}"


def _panel(ax: Axes, name: str, scores: Sequence[FigureScore], colour: str) -> None:
    dots = [Dot(*_point(score), {"alpha": 0.9, "markeredgewidth": 0.8, **_marker(score, colour)}) for score in scores]
    draw_dots(ax, dots, _PAPER_BANDS, 1.6)
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
    for score in named[:_MOST_FIGURES]:
        left = score.log_ratio > 0
        offset, ha = ((-5, 0), "right") if left else ((5, 0), "left")
        if left and ax.transLimits.transform(ax.transScale.transform(_point(score)))[0] < _AT_EDGE:
            offset, ha = (-3, 8), "left"
        ax.annotate(score.figure.id.partition("-")[2], _point(score), offset, fontsize=6.5, color=INK,
                    textcoords="offset points", ha=ha, va="center")
