"""Predicted against measured speeds: decode on the left, prompts on the right, coloured by regime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.engines.accuracy.errors import QUANTITIES, Quantity, errors_of, measured
from trilane.engines.accuracy.measured_rows import MeasuredRow
from trilane.engines.accuracy.regimes import REGIMES, Regime, regime_of_row
from trilane.engines.accuracy.scores import HELD_OUT, Scores
from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.identity import BAND, identity_axes, identity_handles, point_handle
from trilane.output.figures.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, legend_of, page

_COLOURS: dict[Regime, str] = dict(
    zip(REGIMES, (BLUE, GREEN, ORANGE, VERMILLION, PURPLE, "#000000", SKY, "#8C564B"), strict=True)
)
_SHAPES: dict[Regime, str] = dict(zip(REGIMES, "os^DvPX*", strict=True))
_BANDS = {0.2: BAND}
_FAR_OFF, _MOST_NAMES = 0.5, 9
_UNITS: dict[Quantity, str] = {"decode": "tokens a second of one sequence", "prompts": "prompt tokens a second"}


class _Point(NamedTuple):
    row: MeasuredRow
    measured: float
    predicted: float


@default_settings
def plot_accuracy(scores: Scores) -> Figure:
    """A point a row: predicted, held out where there are such predictions, against measured; both axes logarithmic.

    The band is 20 % on either side, as the table counts; rows that are more than 1.5 times too fast or too slow are
    named, nine at most.
    Raises PictureError without any rows.
    """
    name = next(iter(scores.predictions))
    panels = {quantity: points for quantity in QUANTITIES if (points := _points(scores, quantity))}
    if not panels:
        raise PictureError("expected rows with a measured speed that can be predicted, got none")
    figure, part = page(6.6 * max(len(panels), 1.4), 6.9, _headline(scores), _about(name, scores))
    axes = part.subplots(1, len(panels), squeeze=False)[0]
    for ax, (quantity, points) in zip(axes, panels.items(), strict=True):
        _panel(ax, quantity, points)
        _names(ax, scores, quantity, points)
    there = set(map(regime_of_row, scores.rows))
    regimes = [
        point_handle(regime, marker=_SHAPES[regime], color=_COLOURS[regime], markersize=6)
        for regime in REGIMES if regime in there
    ]
    legend_of(part, [*regimes, *identity_handles(_BANDS)], 5)
    return figure


def _points(scores: Scores, quantity: Quantity) -> list[_Point]:
    return [
        _Point(row, speed, predicted) for row in scores.rows
        if (speed := measured(row).of(quantity)) is not None
        and (predicted := scores.first[row.id].of(quantity)) is not None
    ]


def _headline(scores: Scores) -> str:
    """Median errors of the rows that count."""
    found = {quantity: errors_of(scores.counted, scores.first, quantity) for quantity in QUANTITIES}
    texts = [
        f"{quantity} {errors.median:.0%} ({errors.rows} speed{'s' * (errors.rows > 1)}, "
        f"{errors.machines} machine{'s' * (errors.machines > 1)})"
        for quantity, errors in found.items() if errors
    ]
    return f"Median error: {', '.join(texts)}" if texts else "Predicted against measured speeds"


def _about(name: str, scores: Scores) -> str:
    how = "with numbers fitted to other machines' rows" if name == HELD_OUT else "with the numbers of the program"
    hollow = "; hollow: rows that are a sanity check" if len(scores.counted) < len(scores.rows) else ""
    return f"Each point is a speed that was measured by its source, and is predicted {how}{hollow}."


def _panel(ax: Axes, quantity: Quantity, points: Sequence[_Point]) -> None:
    values = [value for point in points for value in (point.measured, point.predicted)]
    ends = (min(values) / 1.4, max(values) * 1.4)
    identity_axes(ax, ends, _BANDS)
    for point in points:
        regime = regime_of_row(point.row)
        counts = point.row.quality != "C"
        ax.plot(point.measured, point.predicted, _SHAPES[regime], markersize=6, markeredgewidth=0.8, alpha=0.9,
                markeredgecolor="white" if counts else _COLOURS[regime],
                markerfacecolor=_COLOURS[regime] if counts else "white")
    ax.set(aspect="equal", xlabel=f"measured: {_UNITS[quantity]}", ylabel=f"predicted: {_UNITS[quantity]}")
    ax.tick_params(labelsize=8.5)


def _names(ax: Axes, scores: Scores, quantity: Quantity, points: Sequence[_Point]) -> None:
    """Ids of rows that are far off next to their points, and what they are in the corners where there are no points:
    too fast top left, too slow bottom right.
    """
    far = {row.id for row, _ in scores.furthest(quantity, _FAR_OFF)[:_MOST_NAMES]}
    named = sorted((point for point in points if point.row.id in far), key=lambda point: point.measured)
    for place, point in enumerate(named):  # neighbours above and below, in turns
        ax.annotate(point.row.id, (point.measured, point.predicted), (0, -11 if place % 2 else 6), ha="center",
                    textcoords="offset points", fontsize=7.5, color=INK)
    fast = [_name(point) for point in named if point.predicted > point.measured]
    slow = [_name(point) for point in named if point.predicted < point.measured]
    ax.text(0.02, 0.98, "\n".join(fast), transform=ax.transAxes, ha="left", va="top", fontsize=7.5, color=INK)
    ax.text(0.98, 0.02, "\n".join(slow), transform=ax.transAxes, ha="right", va="bottom", fontsize=7.5, color=INK)


def _name(point: _Point) -> str:
    """Id, model, the GPU or, without one, the CPU, and the error."""
    row, parts = point.row, point.row.machine.split("+")
    processor = parts[-1] if parts[0] == "none" else parts[0]
    return f"{row.id}: {row.model} on {processor}, {point.predicted / point.measured - 1:+.0%}"
