"""A validation as a scatter plot: predicted against measured times per token, and the error of each scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from trilane.output.figures.figure_files import default_settings
from trilane.output.figures.identity import (
    BAND,
    COLOURS,
    NULL_MODEL,
    SHAPES,
    identity_axes,
    identity_handles,
    point_handle,
)
from trilane.output.figures.style import legend_of, page, tidy
from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import RunComparison

_WHISKER = "#444444"
_NEAR = 0.10  # the band
_BANDS = {_NEAR: BAND}
_LOG_FROM = 5.0  # highest over lowest time, from which on the axes are logarithmic


class _Look(NamedTuple):
    """Colour of a policy's marks, and whether they are hollow."""

    colour: str
    hollow: bool


@default_settings
def plot_agreement(agreement: Agreement, about: str = "") -> Figure:
    """On the left predicted against measured TPOT of every scenario, on the right the errors by policy.

    Colours are policies, shapes are batches, whiskers go from the lowest to the highest repeat, grey marks are the null
    model, the band is 10 % wide on either side. ``about`` says what was run, and where.
    """
    batches = sorted({comparison.predicted.scenario.batch for comparison in agreement.comparisons})
    looks, shapes = _looks(agreement.names), dict(zip(batches, SHAPES * 9, strict=False))
    figure, part = page(12.5, max(6.4, 2.4 + 0.38 * len(looks)), _headline(agreement), about)
    times, errors = part.subplots(1, 2, width_ratios=[1.15, 1])
    _identity(times, _range(agreement.comparisons))
    for name, comparison in zip(agreement.names, agreement.comparisons, strict=True):
        _point(times, comparison, looks[name], shapes[comparison.predicted.scenario.batch])
    _errors(errors, agreement, looks, shapes)
    points = [point_handle(f"batch {n}", marker=shape, color="#555555", markersize=8) for n, shape in shapes.items()]
    repeats = Line2D([], [], color=_WHISKER, linewidth=1.2, marker="|", markersize=6, label="lowest to highest repeat")
    null = point_handle("null model (arrow: beyond axis)", marker="x", color=NULL_MODEL, markersize=5)
    legend_of(part, [*points, repeats, null, *identity_handles(_BANDS)], 6)
    return figure


def _headline(agreement: Agreement) -> str:
    found = agreement.summary
    tau = "" if found.tau is None else f", Kendall's tau {found.tau:.2f}"
    return (
        f"Predicted times per token are {found.median_error:.1%} off (median of {found.scenarios}), "
        f"at worst {found.worst_error:.0%}{tau}"
    )


def _looks(names: Sequence[str]) -> dict[str, _Look]:
    return {
        name: _Look(COLOURS[place % len(COLOURS)], hollow=place % (2 * len(COLOURS)) >= len(COLOURS))
        for place, name in enumerate(dict.fromkeys(names))
    }


def _range(comparisons: Sequence[RunComparison]) -> tuple[float, float]:
    """Lowest and highest time in the picture, ms."""
    measured = [ms for comparison in comparisons for ms in comparison.tpot_ms.measured]
    predicted = [comparison.tpot_ms.predicted for comparison in comparisons]
    null = [comparison.null_tpot_ms for comparison in comparisons if comparison.null_tpot_ms]
    return min(*measured, *predicted, *null), max(*measured, *predicted, *null)


def _identity(ax: Axes, between: tuple[float, float]) -> None:
    """Logarithmic axes where times differ much."""
    low, high = between
    linear = high <= _LOG_FROM * low
    ends = (max(0.0, low - 0.1 * high), 1.1 * high) if linear else (low / 1.15, high * 1.15)
    identity_axes(ax, ends, _BANDS, linear=linear)
    per_token = "TPOT (ms per output token)"
    ax.set(aspect="equal", xlabel=f"measured {per_token}", ylabel=f"predicted {per_token}")


def _point(ax: Axes, comparison: RunComparison, look: _Look, shape: str) -> None:
    tpot = comparison.tpot_ms
    if comparison.null_tpot_ms is not None:
        ax.plot(tpot.median, comparison.null_tpot_ms, "x", color=NULL_MODEL, markersize=5, zorder=2)
    _mark(ax, (min(tpot.measured), tpot.median, max(tpot.measured)), tpot.predicted, look, shape, 8)


def _mark(ax: Axes, xs: tuple[float, float, float], y: float, look: _Look, shape: str, size: float) -> None:
    """A point at the middle one of three places, with a whisker from the first to the last."""
    ax.plot(xs[::2], [y] * 2, color=_WHISKER, linewidth=1.2, marker="|", markersize=6, zorder=3)
    ax.plot(xs[1], y, shape, markersize=size, markerfacecolor="white" if look.hollow else look.colour,
            markeredgecolor=look.colour if look.hollow else "white", zorder=4)


def _errors(ax: Axes, agreement: Agreement, looks: dict[str, _Look], shapes: dict[int, str]) -> None:
    """A row a policy, its scenarios by their error; errors beyond the axis are drawn at its edge."""
    edge = 1.25 * max(0.16, agreement.summary.worst_error)
    rows, heights = list(looks), _heights(agreement.names)
    ax.axvspan(-_NEAR, _NEAR, color=BAND, linewidth=0)
    ax.axvline(0, color="black", linewidth=1)
    for name, comparison, height in zip(agreement.names, agreement.comparisons, heights, strict=True):
        _error_marks(ax, comparison, height, looks[name], shapes[comparison.predicted.scenario.batch], edge)
    for row in range(1, len(rows)):
        ax.axhline(row - 0.5, color="#DDDDDD", linewidth=0.8)
    ax.set_yticks(range(len(rows)), rows, fontsize=10)
    for label, look in zip(ax.get_yticklabels(), looks.values(), strict=True):
        label.set_color(look.colour)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(-edge, edge)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("TPOT error: predicted / measured - 1")
    ax.tick_params(axis="y", length=0, pad=10)  # clear of the arrows at the edge
    tidy(ax, "x")
    ax.spines["left"].set_visible(False)


def _heights(names: Sequence[str]) -> list[float]:
    """The height of each scenario's marks: in the row of its policy, one below the other."""
    rows, seen = list(dict.fromkeys(names)), Counter[str]()
    heights = []
    for name in names:
        heights.append(rows.index(name) - 0.5 + (seen[name] + 1) / (names.count(name) + 1))
        seen[name] += 1
    return heights


def _error_marks(ax: Axes, comparison: RunComparison, row: float, look: _Look, shape: str, edge: float) -> None:
    tpot = comparison.tpot_ms
    if comparison.null_error is not None:
        inside = abs(comparison.null_error) < edge
        side = "x" if inside else ">" if comparison.null_error > 0 else "<"
        ax.plot(max(-edge, min(edge, comparison.null_error)), row, marker=side, color=NULL_MODEL, markersize=4.5,
                linestyle="", clip_on=False)
    highest, middle, lowest = (tpot.predicted / ms - 1 for ms in (max(tpot.measured), tpot.median, min(tpot.measured)))
    _mark(ax, (highest, middle, lowest), row, look, shape, 7)
