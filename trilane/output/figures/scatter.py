"""Predicted against measured times of validations: points on two axes of one range, and the errors by policy.

``draw_dots`` makes every such picture; on its line both values of a point are equal, and the bands about it are errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from trilane.output.figures.style import legend_of, page, round_ticks, tidy
from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.engine_validation import WORST_AIM, EngineRow, EngineSummary

Bands = Mapping[float, str]  # colours by error, a fraction
BAND = "#E3F1EA"
_NULL_MODEL, _WHISKER = "#9A9A9A", "#444444"
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#000000")
_SHAPES = "os^DvPX" * 9
_NEAR = 0.10  # the band of plot_agreement
_LOG_FROM = 5.0  # highest over lowest time, from which on its axes are logarithmic


class Dot(NamedTuple):
    """A measured and a predicted value of one unit, the look of its marker as matplotlib names it, what the null model
    predicts (a grey cross), and the repeats of the measurement (a whisker from the lowest to the highest).
    """

    measured: float
    predicted: float
    look: Mapping[str, Any]
    null: float | None = None
    repeats: Sequence[float] = ()

    @property
    def values(self) -> list[float]:
        """All that must lie within the axes."""
        return [*(self.repeats or [self.measured]), self.predicted, *([self.null] if self.null else [])]


def draw_dots(
    ax: Axes, dots: Sequence[Dot], bands: Bands, margin: float, *, linear_up_to: float = 0.0, null_size: float = 5.0
) -> None:
    """Points in axes that end ``margin`` times beyond the furthest values.

    The axes are logarithmic unless the highest value is at most ``linear_up_to`` times the lowest.
    """
    values = [value for dot in dots for value in dot.values]
    low, high = min(values), max(values)
    if high <= linear_up_to * low:
        _identity_axes(ax, (max(0.0, low - 0.1 * high), 1.1 * high), bands)
    else:
        ends = (low / margin, high * margin)
        _identity_axes(ax, ends, bands)
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (ax.xaxis, ax.yaxis):
            round_ticks(axis, *ends)
    for dot in dots:
        if dot.null is not None:
            ax.plot(dot.measured, dot.null, "x", color=_NULL_MODEL, markersize=null_size, zorder=2)
        repeats = dot.repeats or [dot.measured]
        _mark(ax, (min(repeats), dot.measured, max(repeats)), dot.predicted, dot.look, whisker=bool(dot.repeats))


def _identity_axes(ax: Axes, ends: tuple[float, float], bands: Bands) -> None:
    for error, colour in bands.items():
        low, high = ([(1 + side * error) * end for end in ends] for side in (-1, 1))
        ax.fill_between(ends, low, high, color=colour, linewidth=0)
    ax.plot(ends, ends, color="black", linewidth=1)
    ax.set(xlim=ends, ylim=ends)
    tidy(ax)


def _mark(ax: Axes, xs: tuple[float, float, float], y: float, look: Mapping[str, Any], *, whisker: bool) -> None:
    """A point at the middle one of three places, with a whisker from the first to the last."""
    if whisker:
        ax.plot(xs[::2], [y] * 2, color=_WHISKER, linewidth=1.2, marker="|", markersize=6, zorder=3)
    ax.plot(xs[1], y, linestyle="", **look)


def point_handle(label: str, **look: Any) -> Line2D:
    """An entry of the legend for points that look so."""
    return Line2D([], [], linestyle="", label=label, **look)


def band_handles(bands: Bands) -> list[Patch]:
    """Entries of the legend for the bands."""
    return [Patch(facecolor=colour, label=f"within {error:.0%}") for error, colour in bands.items()]


def line_handle() -> Line2D:
    """The entry of the legend for the line."""
    return Line2D([], [], color="black", linewidth=1, label="predicted = measured")


# --- an engine --------------------------------------------------------------------------------------------------------


@default_settings
def plot_engine(rows: Sequence[EngineRow], about: str = "") -> Figure:
    """A point a scenario: colours are models, shapes kinds of work, the band is the aim of the worst error.

    Raises PictureError without rows.
    """
    if not rows:
        raise PictureError("expected at least one scenario, measured and predicted, got none")
    summary, bands = EngineSummary.of(rows), {WORST_AIM: BAND}
    title = (
        f"Predicted times are {summary.median_error:.1%} off (median of {summary.rows}), "
        f"at worst {summary.worst_error:.0%}"
    )
    figure, part = page(8.2, 7.4, title, about)
    models = dict(zip(dict.fromkeys(row.model for row in rows), _COLOURS * 9, strict=False))
    works = dict(zip(dict.fromkeys(row.work for row in rows), _SHAPES, strict=False))
    look: dict[str, Any] = {"markersize": 6.5, "markeredgecolor": "white", "zorder": 3}
    dots = [
        Dot(row.measured_ms, row.predicted_ms, {"marker": works[row.work], "color": models[row.model], **look},
            row.null_ms)
        for row in rows
    ]
    ax = part.subplots()
    draw_dots(ax, dots, bands, 1.3, null_size=4.0)
    ax.set(xlabel="measured (ms of a step)", ylabel="predicted (ms)")
    colours = [point_handle(name, marker="o", color=colour) for name, colour in models.items()]
    shapes = [point_handle(work, marker=shape, color="#555555") for work, shape in works.items()]
    legend_of(part, [*colours, *shapes, point_handle("null model", marker="x", color=_NULL_MODEL),
                     *band_handles(bands)], 4)
    return figure


# --- policies ---------------------------------------------------------------------------------------------------------


@default_settings
def plot_agreement(agreement: Agreement, about: str = "") -> Figure:
    """On the left predicted against measured TPOT of every scenario, on the right the errors by policy.

    Colours are policies, shapes are batches, whiskers go from the lowest to the highest repeat, grey marks are the null
    model, the band is 10 % wide on either side. ``about`` says what was run, and where.
    """
    bands = {_NEAR: BAND}
    batches = sorted({comparison.predicted.scenario.batch for comparison in agreement.comparisons})
    shapes = dict(zip(batches, _SHAPES, strict=False))
    colours = _colours_of(agreement.names)
    looks = [
        {"marker": shapes[comparison.predicted.scenario.batch], **colours[name]}
        for name, comparison in zip(agreement.names, agreement.comparisons, strict=True)
    ]
    figure, part = page(12.5, max(6.4, 2.4 + 0.38 * len(colours)), _headline(agreement), about)
    times, errors = part.subplots(1, 2, width_ratios=[1.15, 1])
    dots = [
        Dot(one.tpot_ms.median, one.tpot_ms.predicted, {"markersize": 8, "zorder": 4, **look}, one.null_tpot_ms,
            one.tpot_ms.measured)
        for one, look in zip(agreement.comparisons, looks, strict=True)
    ]
    draw_dots(times, dots, bands, 1.15, linear_up_to=_LOG_FROM)
    per_token = "TPOT (ms per output token)"
    times.set(aspect="equal", xlabel=f"measured {per_token}", ylabel=f"predicted {per_token}")
    _errors(errors, agreement, looks, colours)
    points = [point_handle(f"batch {n}", marker=shape, color="#555555", markersize=8) for n, shape in shapes.items()]
    repeats = Line2D([], [], color=_WHISKER, linewidth=1.2, marker="|", markersize=6, label="lowest to highest repeat")
    null = point_handle("null model (arrow: beyond axis)", marker="x", color=_NULL_MODEL, markersize=5)
    legend_of(part, [*points, repeats, null, line_handle(), *band_handles(bands)], 6)
    return figure


def _headline(agreement: Agreement) -> str:
    summary = agreement.summary
    tau = "" if summary.tau is None else f", Kendall's tau {summary.tau:.2f}"
    return (
        f"Predicted times per token are {summary.median_error:.1%} off (median of {summary.scenarios}), "
        f"at worst {summary.worst_error:.0%}{tau}"
    )


def _colours_of(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colours of the face and the edge of each policy's marks; those of every second seven policies are hollow."""
    colours = {}
    for place, name in enumerate(dict.fromkeys(names)):
        colour, hollow = _COLOURS[place % len(_COLOURS)], place // len(_COLOURS) % 2
        face, edge = ("white", colour) if hollow else (colour, "white")
        colours[name] = {"color": colour, "markerfacecolor": face, "markeredgecolor": edge}
    return colours


def _errors(
    ax: Axes, agreement: Agreement, looks: Sequence[Mapping[str, Any]], colours: Mapping[str, Mapping[str, str]]
) -> None:
    """A row a policy, its scenarios by their error; errors beyond the axis are drawn at its edge."""
    edge = 1.25 * max(0.16, agreement.summary.worst_error)
    ax.axvspan(-_NEAR, _NEAR, color=BAND, linewidth=0)
    ax.axvline(0, color="black", linewidth=1)
    for comparison, height, look in zip(agreement.comparisons, _heights(agreement.names), looks, strict=True):
        _error_marks(ax, comparison, height, look, edge)
    for row in range(1, len(colours)):
        ax.axhline(row - 0.5, color="#DDDDDD", linewidth=0.8)
    ax.set_yticks(range(len(colours)), list(colours), fontsize=10)
    for label, look in zip(ax.get_yticklabels(), colours.values(), strict=True):
        label.set_color(look["color"])
    ax.set(xlim=(-edge, edge), ylim=(len(colours) - 0.5, -0.5), xlabel="TPOT error: predicted / measured - 1")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
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


def _error_marks(ax: Axes, comparison: RunComparison, row: float, look: Mapping[str, Any], edge: float) -> None:
    tpot, null = comparison.tpot_ms, comparison.null_error
    if null is not None:
        side = "x" if abs(null) < edge else ">" if null > 0 else "<"
        ax.plot(max(-edge, min(edge, null)), row, marker=side, color=_NULL_MODEL, markersize=4.5, linestyle="",
                clip_on=False)
    highest, middle, lowest = (tpot.predicted / ms - 1 for ms in (max(tpot.measured), tpot.median, min(tpot.measured)))
    _mark(ax, (highest, middle, lowest), row, {"markersize": 7, "zorder": 4, **look}, whisker=True)
