"""A cache curve: hit rate against cache size, a line for each cache policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from policies.protocols import PolicyKind
from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.line_labels import LineEnd, label_ends
from trilane.output.figures.marks import marked
from trilane.output.figures.style import BLUE, GREEN, ORANGE, PURPLE, VERMILLION, kinds_in_words, page, tidy
from trilane.study.cache_curve import unit_of

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
    figure, part = page(10, 5.6, _headline(points), about, "; ".join(kinds_in_words(kinds.values())))
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


def _headline(points: Sequence[Mapping[str, Any]]) -> str:
    """The policy with most hits in the largest cache, of those that do not know the future if there are any."""
    real = [point for point in points if _kind(point["policy"]) is PolicyKind.KEEPS] or points
    best = max(real, key=lambda point: (point["capacity_bytes"], point["hit_rate"]))
    rates = [p["hit_rate"] for p in sorted(real, key=lambda p: p["capacity_bytes"]) if p["policy"] == best["policy"]]
    name = marked(best["policy"], _kind(best["policy"]))
    return f"{name} hits most in the largest cache: {rates[-1]:.0%} of lookups, {rates[0]:.0%} in the smallest"
