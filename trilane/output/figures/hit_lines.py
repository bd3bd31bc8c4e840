"""Hit rate against capacity: a line for each policy, by the share of experts that the cache holds and in GB."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from trilane.common.units import GB
from trilane.output.figures.figure_files import Picture, PictureError, default_settings
from trilane.output.figures.line_labels import label_ends
from trilane.output.figures.marks import marked
from trilane.output.figures.panels import Panel, axes_of_panels, page_size, panels_of
from trilane.output.figures.policy_lines import MOST, policy_lines
from trilane.output.figures.style import kinds_in_words, page, tidy
from trilane.output.figures.sweep_means import SweepMeans, clairvoyant
from trilane.output.figures.winners import tally

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
    figure, part = page(*page_size(len(panels)), _headline(real, panels, sizes), means.about, _below(means, best))
    for place, (panel, ax) in enumerate(axes_of_panels(part, panels)):
        mine = panel.of(rows)
        _style(ax, mine, first=place == 0)
        ends = policy_lines(ax, mine, _SHARE, _HITS, best[:MOST], lambda last: f"{last[_HITS]:.0%}")
        label_ends(ax, ends, 10 if len(panels) == 1 else 8.5)
    columns = ["policy", *means.axes, _SHARE, "cache_bytes", _HITS, "draws"]
    return Picture(figure, rows[columns].reset_index(drop=True).astype({"cache_bytes": "int64"}))


def _headline(real: pd.DataFrame, panels: Sequence[Panel], sizes: Sequence[str]) -> str:
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


def _below(means: SweepMeans, best: Sequence[str]) -> str:
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
