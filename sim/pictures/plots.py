"""Pictures of results: policies ranked by time per token, and hit rate against cache size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from sim.cache_curve import unit_of
from sim.pictures.figure_files import PictureError, style_tpot_axis

# Okabe-Ito colours: readers with any colour vision can tell them apart.
_PARTS = (
    ("GPU works", "gpu", "#0072B2"),
    ("GPU waits for copies", "h2d", "#D55E00"),
    ("GPU waits for the CPU", "cpu", "#E69F00"),
    ("GPU waits for the host", "host", "#BBBBBB"),
)
_BOUND, _NULL, _WHISKER = "black", "#CC79A7", "#222222"
_CUT = 2.5  # an axis is at most so many times as long as the median bar
_MOST = 24  # bars in a picture: those of the fastest
_FEW = 12  # bars that there is room for marks about
_ROOM = 1.17  # for labels, beyond the longest bar
_CURVES: Mapping[str, tuple[str, str, str]] = {  # colour, line, marker
    "belady-bypass": ("black", "--", "^"),
    "belady": ("#666666", "--", "v"),
    "lru": ("#0072B2", "-", "o"),
    "lfu": ("#D55E00", "-", "s"),
    "layer-lru": ("#009E73", "-", "D"),
    "random": ("#CC79A7", ":", "X"),
}
_OTHER_CURVE = ("#E69F00", "-.", "P")


def tpot_bars(rows: Sequence[Mapping[str, Any]], about: str = "") -> Figure:
    """Bars of time per output token, best first; ``rows`` are ``Run.to_dict()`` of runs that decoded, or means of such.

    Each bar is split into what the GPU did. A black line marks the lower bound, and where bars are few a diamond the
    null model; clairvoyant runs (*), which no real system can have, are pale; ~ changes the routing. Rows with
    ``tpot_ms_min`` and ``tpot_ms_max`` get a whisker from the one to the other. Of very many, the slowest are only
    named. ``about`` says what was run.
    """
    decoded = [row for row in rows if row["tpot_ms"] is not None]
    ranked = sorted(decoded, key=lambda row: (row["tpot_ms"], row["policy"]))
    if not ranked:
        raise PictureError("expected at least one run with decode steps to draw, got none")
    shown, few = ranked[:_MOST], len(ranked) <= _FEW
    if not few:
        shown = [{**row, "null_model_tpot_ms": None} for row in shown]
    figure = Figure(figsize=(10, 2.1 + (0.5 if few else 0.3) * len(shown)), layout="constrained")
    ax = figure.subplots()
    longest = _longest(shown)
    for place, row in enumerate(shown):
        _bar(ax, place, row)
        _label(ax, place, row, longest)
    _style_bars(ax, [row["policy"] + _mark(row) for row in shown], longest)
    headline = _headline(ranked)
    figure.suptitle(headline, fontsize=min(14, 1100 / len(headline)), fontweight="bold", x=0.01, ha="left")
    if about:
        ax.set_title(about, fontsize=9.5, loc="left", color="#444444")
    if slower := ranked[_MOST:]:
        ax.set_xlabel(f"{ax.get_xlabel()}\n\n{_named(slower)}")
    figure.legend(handles=_handles(shown), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _mark(row: Mapping[str, Any]) -> str:
    return " *" if "clairvoyant" in row["labels"] else " ~" if "changes routing" in row["labels"] else ""


def _named(slower: Sequence[Mapping[str, Any]]) -> str:
    """Those that there is no room for, on lines that fit."""
    names = ", ".join(row["policy"] + _mark(row) for row in slower)
    times = f"{slower[0]['tpot_ms']:,.0f} to {slower[-1]['tpot_ms']:,.0f} ms"
    return fill(f"{len(slower)} more, slower ({times}): {names}", 110, break_on_hyphens=False)


def _handles(shown: Sequence[Mapping[str, Any]]) -> list[Patch | Line2D]:
    """What the legend explains: the parts of bars, and the marks that there are."""
    handles: list[Patch | Line2D] = [Patch(facecolor=colour, label=label) for label, _, colour in _PARTS]
    if any(row.get("lower_bound_tpot_ms") is not None for row in shown):
        handles.append(Line2D([], [], color=_BOUND, linewidth=2, label="lower bound (no policy can be faster)"))
    if any(row.get("null_model_tpot_ms") is not None for row in shown):
        handles.append(_diamond("null model (bandwidths alone)"))
    if any(map(_spreads, shown)):
        label = f"lowest to highest of {len(shown[0]['draws'])} draws"
        handles.append(Line2D([], [], color=_WHISKER, linewidth=1.5, marker="|", markersize=9, label=label))
    meanings = {" *": "* knows the future", " ~": "~ changes the routing"}
    marks = {_mark(row) for row in shown}
    return handles + [Line2D([], [], linestyle="", label=label) for mark, label in meanings.items() if mark in marks]


def _longest(ranked: Sequence[Mapping[str, Any]]) -> float:
    """Where the axis ends, ms: bars far longer than most are cut, or the others could not be read."""
    names = ("tpot_ms", "tpot_ms_max", "null_model_tpot_ms")
    median = float(ranked[len(ranked) // 2]["tpot_ms"])
    return min(max(row.get(name) or 0.0 for row in ranked for name in names), _CUT * median)


def _bar(ax: Axes, place: int, row: Mapping[str, Any]) -> None:
    """One run: its time, split, and its two reference marks."""
    clairvoyant = "clairvoyant" in row["labels"]
    left = 0.0
    for width, colour in zip(_split(row), (colour for _, _, colour in _PARTS), strict=True):
        ax.barh(place, width, left=left, height=0.62, color=colour, alpha=0.4 if clairvoyant else 1.0, linewidth=0)
        left += width
    if (bound := row.get("lower_bound_tpot_ms")) is not None:
        ax.plot([bound, bound], [place - 0.42, place + 0.42], color=_BOUND, linewidth=2, zorder=3)
    if (null := row.get("null_model_tpot_ms")) is not None:
        ax.plot(null, place, marker="D", color=_NULL, markeredgecolor="white", markersize=7, zorder=4)
    if _spreads(row):
        ends = [row["tpot_ms_min"], row["tpot_ms_max"]]
        ax.plot(ends, [place, place], color=_WHISKER, linewidth=1.5, marker="|", markersize=9, zorder=5)


def _spreads(row: Mapping[str, Any]) -> bool:
    """Whether the row is a mean of draws that differ."""
    return bool(row.get("tpot_ms_min") != row.get("tpot_ms_max"))


def _label(ax: Axes, place: int, row: Mapping[str, Any], longest: float) -> None:
    """The time beside its bar and whisker, or beside the diamond where that stands in the way; in a bar that is cut."""
    end, null = row.get("tpot_ms_max") or row["tpot_ms"], row.get("null_model_tpot_ms") or 0.0
    start = max(null, end) if end - 0.02 * longest < null < end + 0.13 * longest else end
    text, offset, side, colour = f"{row['tpot_ms']:,.1f} ms", 9, "left", "black"
    if end > 1.01 * longest:
        text += " \N{RIGHTWARDS ARROW}" if end > _ROOM * longest else ""
        start, offset, side, colour = min(row.get("tpot_ms_min") or end, _ROOM * longest), -6, "right", "white"
    weight = "normal" if "clairvoyant" in row["labels"] else "bold"
    ax.annotate(text, (start, place), xytext=(offset, 0), textcoords="offset points", va="center", ha=side,
                color=colour, fontsize=10, fontweight=weight)  # fmt: skip


def _split(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Milliseconds of each of _PARTS in one mean decode step; the GPU's work is what no stall takes."""
    stalls = [row["stall_h2d_ms"] or 0.0, row["stall_cpu_ms"] or 0.0, row["stall_host_ms"] or 0.0]
    return (row["tpot_ms"] - sum(stalls), *stalls)


def _headline(ranked: Sequence[Mapping[str, Any]]) -> str:
    """What the picture says, in a line."""
    real = [row for row in ranked if "clairvoyant" not in row["labels"]]
    if len(real) < 2:
        return f"{ranked[0]['policy']}: {ranked[0]['tpot_ms']:.1f} ms per output token"
    best, few = real[0], len(real) < 8
    other = real[-1] if few else real[len(real) // 2]
    average = " on average" if any(map(_spreads, real)) else ""
    name = " ".join([best["policy"], *(f"({label})" for label in best["labels"])])
    ratio = f"{other['tpot_ms'] / best['tpot_ms']:.1f}x faster than {other['policy'] if few else 'the median'}"
    return f"{name} is fastest{average}: {best['tpot_ms']:.1f} ms per token, {ratio}"


def _style_bars(ax: Axes, policies: Sequence[str], longest: float) -> None:
    ax.set_yticks(range(len(policies)), policies, fontsize=11)
    ax.set_ylim(len(policies) - 0.4, -0.6)
    style_tpot_axis(ax, longest * _ROOM)


def _diamond(label: str) -> Line2D:
    return Line2D([], [], linestyle="", marker="D", color=_NULL, markeredgecolor="white", markersize=8, label=label)


def cache_curve(points: Sequence[Mapping[str, Any]], about: str = "") -> Figure:
    """Hit rate against cache size, a line a policy; clairvoyant ones are dashed.

    ``points`` hold policy, capacity_bytes, hit_rate and hit_rate_decode.
    """
    if not points:
        raise PictureError("expected at least one point to draw, got none")
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    ax = figure.subplots()
    ends: list[tuple[float, str, str]] = []
    unit, factor = unit_of(min(point["capacity_bytes"] for point in points))
    for policy in dict.fromkeys(point["policy"] for point in points):
        mine = sorted((p for p in points if p["policy"] == policy), key=lambda point: point["capacity_bytes"])
        sizes, rates = [p["capacity_bytes"] / factor for p in mine], [p["hit_rate"] for p in mine]
        colour, line, marker = _CURVES.get(policy, _OTHER_CURVE)
        ax.plot(sizes, rates, color=colour, linestyle=line, marker=marker, markersize=5, linewidth=2)
        ends.append((rates[-1], policy, colour))
    _style_curve(ax, [point["capacity_bytes"] / factor for point in points], ends)
    ax.set_xlabel(f"cache size ({unit})")
    figure.suptitle("Hit rate of one expert cache, by its size", fontsize=14, fontweight="bold", x=0.01, ha="left")
    if about:
        ax.set_title(about, fontsize=9.5, loc="left", color="#444444")
    return figure


def _style_curve(ax: Axes, sizes: Sequence[float], ends: list[tuple[float, str, str]]) -> None:
    room = (max(sizes) - min(sizes)) or max(sizes)
    ax.set_xlim(max(0.0, min(sizes) - 0.05 * room), max(sizes) + 0.18 * room)
    ax.set_ylim(0, 1.02)
    for height, (rate, policy, colour) in zip(_apart([end[0] for end in ends], 0.045), ends, strict=True):
        text = f"{policy}  {rate:.1%}"
        ax.annotate(text, (max(sizes), height), xytext=(10, 0), textcoords="offset points", va="center", color=colour,
                    fontsize=10, fontweight="bold", annotation_clip=False)  # fmt: skip
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel("hit rate, prefill and decode (share of lookups)")
    ax.grid(color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["right", "top"]].set_visible(False)


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights of labels in the same order, at least ``gap`` from each other, near where they belong.

    The mean of "each moved up, away from the one below" and "each moved down, away from the one above".
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    up, down = list(heights), list(heights)
    for low, high in pairwise(order):
        up[high] = max(up[high], up[low] + gap)
    for low, high in reversed(list(pairwise(order))):
        down[low] = min(down[low], down[high] - gap)
    return [(high + low) / 2 for high, low in zip(up, down, strict=True)]
