"""Predicted against measured speeds of other people's machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.engines.accuracy.errors import QUANTITIES, REGIMES, Quantity, Regime, errors_of, measured, regime_of_row
from trilane.engines.accuracy.measured_rows import MeasuredRow
from trilane.engines.accuracy.scores import HELD_OUT, Scores
from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from trilane.output.figures.scatter import BAND, Dot, band_handles, draw_dots, line_handle, point_handle
from trilane.output.figures.style import legend_of, page

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
