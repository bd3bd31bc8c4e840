"""The picture of a comparison: a bar for each policy, best first, split by what the GPU did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trilane.figures.figure_files import PictureError
from trilane.figures.marks import mark
from trilane.figures.style import BLUE, GREY, ORANGE, PURPLE, VERMILLION, meanings_of, page, style_tpot_axis

_PARTS = (
    ("GPU works", "gpu", BLUE),
    ("GPU waits for copies", "h2d", VERMILLION),
    ("GPU waits for the CPU", "cpu", ORANGE),
    ("GPU waits for the host", "host", GREY),
)
_BOUND, _NULL, _WHISKER = "black", PURPLE, "#222222"
_CUT = 2.5  # an axis is at most so many times as long as the median bar
_MOST = 24  # bars in a picture: those of the fastest
_FEW = 12  # bars that there is room for marks about
_ROOM = 1.17  # for labels, beyond the longest bar


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
    height = 2.1 + (0.5 if few else 0.3) * len(shown)
    figure, part = page(10, height, _headline(ranked), about, _named(ranked[_MOST:]))
    ax = part.subplots()
    longest = _longest(shown)
    for place, row in enumerate(shown):
        _bar(ax, place, row)
        _label(ax, place, row, longest)
    _style_bars(ax, [row["policy"] + _mark(row) for row in shown], longest)
    part.legend(handles=_handles(shown), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _mark(row: Mapping[str, Any]) -> str:
    return mark(row["labels"])


def _named(slower: Sequence[Mapping[str, Any]]) -> str:
    """Those that there is no room for."""
    if not slower:
        return ""
    names = ", ".join(row["policy"] + _mark(row) for row in slower)
    times = f"{slower[0]['tpot_ms']:,.0f} to {slower[-1]['tpot_ms']:,.0f} ms"
    return f"{len(slower)} more, slower ({times}): {names}"


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
    return handles + meanings_of([_mark(row) for row in shown])


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
