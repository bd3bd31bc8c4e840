"""Lines with names at their ends: time per token along an axis, and hit rate against the size of a cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from policies.protocols import PolicyKind
from trilane.common.units import GB
from trilane.output.figures.figure_files import Picture, PictureError, default_settings
from trilane.output.figures.marks import (
    ALSO_RAN,
    BLUE,
    GREEN,
    IMPOSSIBLE,
    ORANGE,
    PURPLE,
    VERMILLION,
    Look,
    look_of,
    marked,
)
from trilane.output.figures.style import (
    Panel,
    axes_of_panels,
    kinds_in_words,
    page,
    page_size,
    panels_of,
    places,
    round_ticks,
    style_values,
    tidy,
)
from trilane.output.figures.sweep_means import BOUND, SweepMeans, clairvoyant, fastest_first
from trilane.output.figures.words import best_of, fastest, hardly_matters, tally, times_table, value_text
from trilane.study.cache_curve import unit_of

# --- names at the ends of lines ---------------------------------------------------------------------------------------

_LINE = 1.3  # distance of labels over their size
_AWAY = 16  # points between the axes and their labels
_POINTS = 72  # an inch


class LineEnd(NamedTuple):
    """The end of a line, in data coordinates, and what is written next to it."""

    x: float
    y: float
    text: str
    colour: str
    bold: bool = True


def label_ends(ax: Axes, ends: Sequence[LineEnd], size: float = 10.0) -> None:
    """Write the labels to the right of the axes, in the colours of their lines and joined to their ends.

    Call it when the limits of the axes are final: their height on paper decides how far apart labels must be.
    """
    if not ends:
        return
    width, height = _points(ax)
    places = (ax.transData + ax.transAxes.inverted()).transform([(end.x, end.y) for end in ends])
    heights = apart(places[:, 1], _LINE * size / height)
    for (across, up), level, end in zip(places.tolist(), heights.tolist(), ends, strict=True):
        ax.annotate(
            end.text, (across, up), (1 + _AWAY / width, level), xycoords="axes fraction", textcoords="axes fraction",
            va="center", color=end.colour, fontsize=size, fontweight="bold" if end.bold else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1,
                        "shrinkB": 3, "relpos": (0, 0.5)},
        )


def apart(heights: Sequence[float] | NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Heights of labels in the same order, at least ``gap`` from each other, as near as possible to those wanted.

    Least squares: with ``gap`` times its rank taken from each, the heights must not fall. All of it stays within 0..1
    (the axes) if there is room.
    """
    wanted = np.asarray(heights, dtype=np.float64)
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    settled = isotonic_regression(wanted[order] - steps).x
    placed = np.empty_like(wanted)
    placed[order] = np.clip(settled, 0, max(0.0, 1 - steps[-1])) + steps
    return placed


def _points(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes on paper, in points."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # so that the layout is known
    box = ax.get_window_extent()
    return box.width / figure.dpi * _POINTS, box.height / figure.dpi * _POINTS


# --- a line a policy --------------------------------------------------------------------------------------------------

MOST = 8  # policies in colour: the best
_MARKERS = 12  # on a line; more would hide it


def policy_lines(
    ax: Axes, rows: pd.DataFrame, across: str, up: str, coloured: Collection[str], words: Callable[[pd.Series], str],
    places: Sequence[float] = (),
) -> list[LineEnd]:
    """Draw column ``up`` against column ``across``; returns the ends of coloured lines, with ``words`` of the last row.

    A line is broken at those of ``places`` at which its policy has no row. Columns ``UP_min`` and ``UP_max``, if there
    are any, make a band.
    """
    ends = []
    for key, mine in rows.groupby(["policy", "kind"], sort=False):
        policy, kind = str(key[0]), PolicyKind(str(key[1]))
        clairvoyant = kind == PolicyKind.CLAIRVOYANT
        look = look_of(policy, kind) if clairvoyant or policy in coloured else ALSO_RAN
        points = mine.set_index(across).sort_index()
        _line(ax, points, up, look, places)
        if look is not ALSO_RAN:
            last = points.iloc[-1]
            text = f"{marked(policy, kind)}  {words(last)}"
            ends.append(LineEnd(float(points.index[-1]), float(last[up]), text, look.colour, bold=not clairvoyant))
    return ends


def _line(ax: Axes, points: pd.DataFrame, up: str, look: Look, places: Sequence[float]) -> None:
    thick, alone = look is not ALSO_RAN, len(points) == 1
    marker, size = (look.marker, 5) if look.marker or not alone else ("_", 14)
    style: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "marker": marker, "markersize": size}
    inside = [place for place in places if points.index[0] < place < points.index[-1]]
    points = points.reindex(points.index.union(inside))
    ax.plot(points.index, points[up], markevery=1 + len(points) // _MARKERS, linewidth=2 if thick else 0.8,
            zorder=3 if thick else 2, **style)
    if thick and f"{up}_min" in points:
        _band(ax, points[f"{up}_min"], points[f"{up}_max"], look.colour, alone=alone)


def _band(ax: Axes, low: pd.Series, high: pd.Series, colour: str, *, alone: bool) -> None:
    """From the lowest to the highest; a stroke for a single point."""
    if (low.dropna() == high.dropna()).all():
        return
    if alone:
        ax.vlines(low.index, low, high, color=colour, linewidth=1.5)
    else:
        ax.fill_between(low.index, low, high, color=colour, alpha=0.12, linewidth=0)


# --- TPOT along an axis -----------------------------------------------------------------------------------------------

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


# --- hit rates of the policies of a sweep -----------------------------------------------------------------------------

# --- of the policies of a sweep ---------------------------------------------------------------------------------------

CAPACITIES = ("cached_share", "gpu_memory_gb")  # axes that change the size of the cache
_HITS, _SHARE = "decode_resident_hit_rate", "cache_share"


@default_settings
def plot_hit_lines(means: SweepMeans) -> Picture:
    """Resident hit rate in decode steps (share of active experts) against capacity, a panel for each other setting.

    Raises PictureError if neither the cached share nor the GPU's memory varies, or all else has too many values.
    """
    sizes = [name for name in CAPACITIES if name in means.axes]
    rows = means.rows.dropna(subset=[_HITS])
    real = rows[~clairvoyant(rows)]
    if not sizes or len(real[sizes].drop_duplicates()) < 2:
        raise PictureError(f"expected caches of different sizes: vary {' or '.join(CAPACITIES)}")
    panels = panels_of(means, sizes)
    rates = real.groupby("policy")[_HITS].mean()  # without clairvoyant runs, which are always drawn
    best = rates.sort_values(ascending=False, kind="stable").index.tolist()
    headline, below = _most_hits(real, panels, sizes), _marks_and_notes(means, best)
    figure, part = page(*page_size(len(panels)), headline, means.about, below)
    for place, (panel, ax) in enumerate(axes_of_panels(part, panels)):
        mine = panel.of(rows)
        _style(ax, mine, first=place == 0)
        ends = policy_lines(ax, mine, _SHARE, _HITS, best[:MOST], lambda last: f"{last[_HITS]:.0%}")
        label_ends(ax, ends, 10 if len(panels) == 1 else 8.5)
    columns = ["policy", *means.axes, _SHARE, "cache_bytes", _HITS, "draws"]
    return Picture(figure, rows[columns].reset_index(drop=True).astype({"cache_bytes": "int64"}))


def _most_hits(real: pd.DataFrame, panels: Sequence[Panel], sizes: Sequence[str]) -> str:
    """The policy with most hits in the smallest and in the largest cache; of several panels, in how many settings."""
    if len(panels) == 1:
        return _first_and_last(_leaders(panels[0].of(real), sizes))
    leaders = [row for panel in panels for row in _leaders(panel.of(real), sizes)]
    return tally(((row["policy"], row["kind"]) for row in leaders), "hits most")


def _leaders(real: pd.DataFrame, sizes: Sequence[str]) -> list[dict[Hashable, Any]]:
    """The row with most hits of each setting of the sizes, from the smallest cache on."""
    ranked = real.sort_values(_HITS, kind="stable").drop_duplicates(list(sizes), keep="last")
    return ranked.sort_values(_SHARE, kind="stable").to_dict("records")


def _first_and_last(leaders: Sequence[Mapping[Hashable, Any]]) -> str:
    least, most = leaders[0], leaders[-1]
    texts = [f"{row[_HITS]:.0%} with {row[_SHARE]:.0%} cached" for row in (least, most)]
    names = [marked(row["policy"], row["kind"]) for row in (least, most)]
    if names[0] == names[1]:
        return f"{names[0]} hits most: {texts[0]}, {texts[1]}"
    return f"{names[0]} hits most in the smallest cache, {texts[0]}; {names[1]} in the largest, {texts[1]}"


def _marks_and_notes(means: SweepMeans, best: Sequence[str]) -> str:
    grey = f"thin and grey, fewer hits: {', '.join(best[MOST:])}" if best[MOST:] else ""
    return "\n".join(filter(None, ["; ".join(kinds_in_words(means.kinds)), grey, *means.notes]))


def _style(ax: Axes, rows: pd.DataFrame, *, first: bool) -> None:
    """Shares below, GB above, hit rates to the left."""
    ax.set_xlim(max(0.0, rows[_SHARE].min() - 0.03), min(1.0, rows[_SHARE].max()) + 0.03)
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("cache: share of all experts that it holds")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if first:
        ax.set_ylabel("hit rate in decode steps (on the GPU when routed)")
    tidy(ax)
    filled = rows[rows[_SHARE] > 0]
    whole = float((filled["cache_bytes"] / filled[_SHARE]).median()) / GB  # GB of all experts
    if whole > 0:
        above = ax.secondary_xaxis("top", functions=(partial(np.multiply, whole), partial(np.multiply, 1 / whole)))
        above.set_xlabel("cache (GB)", fontsize=9)


# --- of replayed caches -----------------------------------------------------------------------------------------------

_CLAIRVOYANT = ("belady-bypass", "belady")
_CURVES: Mapping[str, tuple[str, str, str]] = {  # colour, line, marker
    "belady-bypass": ("black", "--", "^"),
    "belady": ("#666666", "--", "v"),
    "lru": (BLUE, "-", "o"),
    "lfu": (VERMILLION, "-", "s"),
    "layer-lru": (GREEN, "-", "D"),
    "random": (PURPLE, ":", "X"),
}
_OTHER_CURVE = (ORANGE, "-.", "P")


@default_settings
def plot_hit_rate_curve(points: Sequence[Mapping[str, Any]], about: str = "") -> Figure:
    """Hit rate against cache size, a line for each policy; those of clairvoyant policies are dashed.

    ``points`` hold ``policy``, ``capacity_bytes`` and ``hit_rate``, as ``trilane cache-curve --json`` writes them.
    Raises PictureError without any.
    """
    if not points:
        raise PictureError("expected at least one point to draw, got none")
    kinds = {point["policy"]: _kind(point["policy"]) for point in points}
    figure, part = page(10, 5.6, _largest_cache(points), about, "; ".join(kinds_in_words(kinds.values())))
    ax = part.subplots()
    ends: list[LineEnd] = []
    unit, factor = unit_of(min(point["capacity_bytes"] for point in points))
    for policy, kind in kinds.items():
        mine = sorted((p for p in points if p["policy"] == policy), key=lambda point: point["capacity_bytes"])
        sizes, rates = [p["capacity_bytes"] / factor for p in mine], [p["hit_rate"] for p in mine]
        colour, line, marker = _CURVES.get(policy, _OTHER_CURVE)
        ax.plot(sizes, rates, color=colour, linestyle=line, marker=marker, markersize=5, linewidth=2)
        ends.append(LineEnd(sizes[-1], rates[-1], f"{marked(policy, kind)}  {rates[-1]:.1%}", colour))
    ax.margins(x=0.03)
    ax.set(ylim=(0, 1.02), xlabel=f"cache size ({unit})", ylabel="hit rate, prefill and decode (share of lookups)")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    tidy(ax)
    label_ends(ax, ends)
    return figure


def _kind(policy: str) -> PolicyKind:
    return PolicyKind.CLAIRVOYANT if policy in _CLAIRVOYANT else PolicyKind.KEEPS


def _largest_cache(points: Sequence[Mapping[str, Any]]) -> str:
    """The policy with most hits in the largest cache, of those that do not know the future if there are any."""
    real = [point for point in points if _kind(point["policy"]) is PolicyKind.KEEPS] or points
    best = max(real, key=lambda point: (point["capacity_bytes"], point["hit_rate"]))
    rates = [p["hit_rate"] for p in sorted(real, key=lambda p: p["capacity_bytes"]) if p["policy"] == best["policy"]]
    name = marked(best["policy"], _kind(best["policy"]))
    return f"{name} hits most in the largest cache: {rates[-1]:.0%} of lookups, {rates[0]:.0%} in the smallest"
