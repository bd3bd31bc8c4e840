"""An engine's validation: predicted against measured times of steps, and of the null model."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trilane.figures.figure_files import PictureError, default_settings
from trilane.figures.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, legend_of, page, round_ticks, tidy
from trilane.study.validation.engine_rows import WORST_AIM, EngineRow, EngineSummary

_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#000000")
_SHAPES = "os^DvPX"
_NULL, _BAND = "#9A9A9A", "#E3F1EA"


@default_settings
def plot_engine(rows: Sequence[EngineRow], about: str = "") -> Figure:
    """A point a scenario: colours are models, shapes kinds of work, the band is the aim of the worst error.

    Raises PictureError without rows.
    """
    if not rows:
        raise PictureError("expected at least one scenario, measured and predicted, got none")
    found = EngineSummary.of(rows)
    title = (
        f"Predicted times are {found.median_error:.1%} off (median of {found.rows}), at worst {found.worst_error:.0%}"
    )
    figure, part = page(8.2, 7.4, title, about)
    ax = part.subplots()
    models = dict(zip(dict.fromkeys(row.model for row in rows), _COLOURS * 9, strict=False))
    works = dict(zip(dict.fromkeys(row.work for row in rows), _SHAPES * 9, strict=False))
    times = [ms for row in rows for ms in (row.measured_ms, row.predicted_ms, row.null_ms)]
    ends = (min(times) / 1.3, max(times) * 1.3)
    low, high = ([(1 + side * WORST_AIM) * end for end in ends] for side in (-1, 1))
    ax.fill_between(ends, low, high, color=_BAND, linewidth=0)
    ax.plot(ends, ends, color="black", linewidth=1)
    for row in rows:
        ax.plot(row.measured_ms, row.null_ms, "x", color=_NULL, markersize=4, zorder=2)
        ax.plot(row.measured_ms, row.predicted_ms, works[row.work], color=models[row.model], markersize=6.5,
                markeredgecolor="white", zorder=3)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured (ms of a step)", ylabel="predicted (ms)")
    for axis in (ax.xaxis, ax.yaxis):
        round_ticks(axis, *ends)
    tidy(ax)
    legend_of(part, _handles(models, works), 4)
    return figure


def _handles(models: dict[str, str], works: dict[str, str]) -> list[Line2D | Patch]:
    return [
        *(Line2D([], [], linestyle="", marker="o", color=colour, label=name) for name, colour in models.items()),
        *(Line2D([], [], linestyle="", marker=shape, color="#555555", label=work) for work, shape in works.items()),
        Line2D([], [], linestyle="", marker="x", color=_NULL, label="null model"),
        Patch(facecolor=_BAND, label=f"within {WORST_AIM:.0%}"),
    ]
