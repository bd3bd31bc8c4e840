"""Hit rate against the size of a cache: of a sweep, by its share of all experts and in GB, and of replayed caches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from policies.protocols import PolicyKind
from trilane.common.units import GB
from trilane.output.figures.figure_files import Picture, PictureError, default_settings
from trilane.output.figures.lines import MOST, LineEnd, label_ends, policy_lines
from trilane.output.figures.marks import BLUE, GREEN, ORANGE, PURPLE, VERMILLION, marked
from trilane.output.figures.panels import Panel, axes_of_panels, page_size, panels_of
from trilane.output.figures.style import kinds_in_words, page, tidy
from trilane.output.figures.sweep_means import SweepMeans, clairvoyant
from trilane.output.figures.words import tally
from trilane.study.cache_curve import unit_of

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
