"""Time per output token along an axis: a line for each policy, above the lower bound and the clairvoyant run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from trilane.output.figures.figure_files import Picture, default_settings
from trilane.output.figures.line_labels import LineEnd, label_ends
from trilane.output.figures.panels import Panel, axes_of_panels, page_size, panels_of
from trilane.output.figures.policy_lines import MOST, policy_lines
from trilane.output.figures.style import IMPOSSIBLE, kinds_in_words, page, places, round_ticks, style_values, tidy
from trilane.output.figures.sweep_means import BOUND, SweepMeans, clairvoyant, fastest_first
from trilane.output.figures.winners import best_of, fastest, hardly_matters, tally, times_table
from trilane.output.figures.words import value_text

_LOG_FROM = 6.0  # highest over lowest coloured time, from which on the axis is logarithmic


@default_settings
def plot_tpot_lines(means: SweepMeans, x: str) -> Picture:
    """TPOT (ms) against the axis ``x``, a panel for each setting of the other axes.

    Lines are means over the draws, with a band from the lowest to the highest; of many policies the slower are thin and
    grey. ``means`` come from ``means_of``. Raises PictureError if ``x`` has no values or the other axes too many.
    """
    where = places(means.axis(x))
    panels = panels_of(means, [x])
    coloured = fastest_first(means.real)[:MOST]
    figure, part = page(*page_size(len(panels)), _headline(means, panels, x), means.about, _below(means, coloured))
    for place, (panel, ax) in enumerate(axes_of_panels(part, panels)):
        style_values(ax, x, list(where))
        tidy(ax)
        _style_times(ax, means, coloured, first=place == 0)
        bound = _bound(ax, panel.of(means.bounds), x, where)
        ends = _lines(ax, panel.of(means.rows), x, where, coloured)
        label_ends(ax, [*ends, *bound], 10 if len(panels) == 1 else 8.5)
    return Picture(figure, means.frame())


def _headline(means: SweepMeans, panels: Sequence[Panel], x: str) -> str:
    """The fastest policy along the axis; of several panels, in how many settings."""
    tables = [times_table(panel.of(means.real), x, means.axis(x)) for panel in panels]
    if len(tables) > 1:
        return tally(policy for times in tables for policy in best_of(times))
    return "; ".join(filter(None, [fastest(tables[0]), hardly_matters(tables[0]).partition(":")[0]]))


def _below(means: SweepMeans, coloured: Sequence[str]) -> str:
    """The marks, the grey lines, and what was left out."""
    grey = [name for name in fastest_first(means.real) if name not in coloured]
    named = f"thin and grey, slower: {', '.join(grey)}" if grey else ""
    impossible = "grey area: below the lower bound, out of reach of any policy that keeps the routing"
    return "\n".join(filter(None, ["; ".join([*kinds_in_words(means.kinds), impossible]), named, *means.notes]))


def _style_times(ax: Axes, means: SweepMeans, coloured: Collection[str], *, first: bool) -> None:
    """A vertical axis for the coloured lines, the same in all panels; grey lines may leave it."""
    shown = means.rows[means.rows["policy"].isin(coloured) | clairvoyant(means.rows)]
    low = min([shown["tpot_ms"].min(), *means.bounds["tpot_ms"]])
    high = shown["tpot_ms_max"].max()
    if high > _LOG_FROM * low:
        ax.set_yscale("log")
        ax.set_ylim(0.8 * low, 1.15 * high)
        round_ticks(ax.yaxis, 0.8 * low, 1.15 * high)
    else:
        ax.set_ylim(0, 1.06 * high)
    if first:
        ax.set_ylabel("time per output token, TPOT (ms)")


def _lines(
    ax: Axes, rows: pd.DataFrame, x: str, where: Mapping[Any, float], coloured: Collection[str]
) -> list[LineEnd]:
    """A line for each policy, broken where it could not run and others could; returns the ends to label."""
    end = max(where.values())

    def words(last: pd.Series) -> str:
        early = "" if last.name == end else f" at {value_text(x, last[x])}"
        return f"{last['tpot_ms']:.1f}{early}"

    placed = rows.assign(across=rows[x].map(where))
    return policy_lines(ax, placed, "across", "tpot_ms", coloured, words, placed["across"].unique().tolist())


def _bound(ax: Axes, bounds: pd.DataFrame, x: str, where: Mapping[Any, float]) -> list[LineEnd]:
    """The lower bound, and the area below it; a single value across the whole panel. Returns its end to label."""
    times = bounds.set_index(bounds[x].map(where))["tpot_ms"].sort_index()
    if times.empty:
        return []
    end = LineEnd(float(times.index[-1]), times.iloc[-1], f"{BOUND}  {times.iloc[-1]:.1f}", "black")
    if len(times) == 1:
        times = pd.Series([times.iloc[0]] * 2, index=ax.get_xlim())
    ax.fill_between(times.index, ax.get_ylim()[0], times, facecolor=IMPOSSIBLE, linewidth=0, zorder=1)
    ax.plot(times.index, times, color="black", linewidth=2, zorder=4)
    return [end]
