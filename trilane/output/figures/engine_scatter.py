"""An engine's validation: predicted against measured times of steps, and of the null model."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.identity import (
    BAND,
    COLOURS,
    NULL_MODEL,
    SHAPES,
    identity_axes,
    identity_handles,
    point_handle,
)
from trilane.output.figures.style import legend_of, page
from trilane.study.validation.engine_rows import WORST_AIM, EngineRow, EngineSummary

_BANDS = {WORST_AIM: BAND}


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
    models = dict(zip(dict.fromkeys(row.model for row in rows), COLOURS * 9, strict=False))
    works = dict(zip(dict.fromkeys(row.work for row in rows), SHAPES * 9, strict=False))
    times = [ms for row in rows for ms in (row.measured_ms, row.predicted_ms, row.null_ms)]
    ends = (min(times) / 1.3, max(times) * 1.3)
    identity_axes(ax, ends, _BANDS)
    for row in rows:
        ax.plot(row.measured_ms, row.null_ms, "x", color=NULL_MODEL, markersize=4, zorder=2)
        ax.plot(row.measured_ms, row.predicted_ms, works[row.work], color=models[row.model], markersize=6.5,
                markeredgecolor="white", zorder=3)
    ax.set(xlabel="measured (ms of a step)", ylabel="predicted (ms)")
    colours = [point_handle(name, marker="o", color=colour) for name, colour in models.items()]
    shapes = [point_handle(work, marker=shape, color="#555555") for work, shape in works.items()]
    null = point_handle("null model", marker="x", color=NULL_MODEL)
    legend_of(part, [*colours, *shapes, null, *identity_handles(_BANDS)[1:]], 4)
    return figure
