"""A comparison as bars: one for each policy, the fastest first, split by what the GPU did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from policies.protocols import PolicyKind
from sim.runs.vocabulary import kind_of
from trilane.output.figures.bars import style_bars, style_tpot, whisker, whisker_handle, write_value
from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import marked
from trilane.output.figures.style import BLUE, GREY, ORANGE, PURPLE, VERMILLION, kind_handles, legend_of, page

Row = Mapping[str, Any]
_PARTS = (
    ("GPU works", "gpu", BLUE),
    ("GPU waits for copies", "h2d", VERMILLION),
    ("GPU waits for the CPU", "cpu", ORANGE),
    ("GPU waits for the host", "host", GREY),
)
_NULL = PURPLE
_CUT = 2.5  # the axis is at most this many times as long as the median bar
_MOST = 24  # bars in a picture
_FEW = 12  # bars that leave room for the null model's marks


@default_settings
def plot_tpot_bars(rows: Sequence[Row], about: str = "", remark: str = "") -> Figure:
    """Bars of time per output token, the fastest first.

    ``rows`` are ``Run.to_dict()`` of runs that decoded, or means of such (``Comparison.rows()``); those with
    ``tpot_ms_min`` and ``tpot_ms_max`` get a whisker. ``about`` says what was run, ``remark`` stands at the foot.

    Each bar is split into what the GPU did. A black line marks the lower bound, a diamond the null model where bars are
    few; clairvoyant runs (*), which no real system can have, are pale; ~ changes the routing. Of very many policies the
    slowest are only named. Raises PictureError if no run decoded.
    """
    decoded = [row for row in rows if row["tpot_ms"] is not None]
    ranked = sorted(decoded, key=lambda row: (row["tpot_ms"], row["policy"]))
    if not ranked:
        raise PictureError("expected at least one run with decode steps to draw, got none")
    shown, few = ranked[:_MOST], len(ranked) <= _FEW
    if not few:
        shown = [{**row, "null_model_tpot_ms": None} for row in shown]
    height = 2.1 + (0.5 if few else 0.3) * len(shown)
    below = "\n".join(filter(None, [_slower(ranked[_MOST:]), remark]))
    figure, part = page(10, height, _headline(ranked), about, below)
    ax, end = part.subplots(), _end(shown)
    for place, row in enumerate(shown):
        _bar(ax, place, row, end)
    style_bars(ax, [_name(row) for row in shown])
    style_tpot(ax, end)
    legend_of(part, _handles(shown))
    return figure


def _kind(row: Row) -> PolicyKind:
    return kind_of(row["labels"])


def _name(row: Row) -> str:
    return marked(row["policy"], _kind(row))


def _slower(rows: Sequence[Row]) -> str:
    """The policies that there is no room for."""
    if not rows:
        return ""
    times = f"{rows[0]['tpot_ms']:,.0f} to {rows[-1]['tpot_ms']:,.0f} ms"
    return f"{len(rows)} more, slower ({times}): {', '.join(map(_name, rows))}"


def _handles(shown: Sequence[Row]) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [Patch(facecolor=colour, label=label) for label, _, colour in _PARTS]
    if any(row.get("lower_bound_tpot_ms") is not None for row in shown):
        label = "lower bound of policies that keep the routing"
        handles.append(Line2D([], [], color="black", linewidth=2, label=label))
    if any(row.get("null_model_tpot_ms") is not None for row in shown):
        handles.append(Line2D([], [], linestyle="", marker="D", color=_NULL, markeredgecolor="white", markersize=8,
                              label="null model (bandwidths alone)"))
    if any(map(_spreads, shown)):
        handles.append(whisker_handle(f"lowest to highest of {len(shown[0]['draws'])} draws"))
    return handles + kind_handles(set(map(_kind, shown)))


def _end(ranked: Sequence[Row]) -> float:
    """Where the axis ends, ms: bars much longer than most are cut, or the others could not be read."""
    names = ("tpot_ms", "tpot_ms_max", "null_model_tpot_ms")
    median = float(ranked[len(ranked) // 2]["tpot_ms"])
    return 1.03 * min(max(row.get(name) or 0.0 for row in ranked for name in names), _CUT * median)


def _bar(ax: Axes, place: int, row: Row, end: float) -> None:
    """One run: its time, split, its reference marks, and the number."""
    clairvoyant = _kind(row) is PolicyKind.CLAIRVOYANT
    left = 0.0
    for width, colour in zip(_split(row), (colour for _, _, colour in _PARTS), strict=True):
        ax.barh(place, width, left=left, height=0.62, color=colour, alpha=0.4 if clairvoyant else 1.0, linewidth=0)
        left += width
    if (bound := row.get("lower_bound_tpot_ms")) is not None:
        ax.plot([bound, bound], [place - 0.42, place + 0.42], color="black", linewidth=2, zorder=3)
    if (null := row.get("null_model_tpot_ms")) is not None:
        ax.plot(null, place, marker="D", color=_NULL, markeredgecolor="white", markersize=7, zorder=4)
    if _spreads(row):
        whisker(ax, place, row["tpot_ms_min"], row["tpot_ms_max"])
    cut = " \N{RIGHTWARDS ARROW}" if row["tpot_ms"] > end else ""
    write_value(ax, place, f"{row['tpot_ms']:,.1f} ms{cut}", bold=not clairvoyant)


def _spreads(row: Row) -> bool:
    """Whether the row is a mean of draws that differ."""
    return bool(row.get("tpot_ms_min") != row.get("tpot_ms_max"))


def _split(row: Row) -> tuple[float, ...]:
    """Milliseconds of each of _PARTS in one mean decode step; the GPU's work is what no stall takes."""
    stalls = [row["stall_h2d_ms"] or 0.0, row["stall_cpu_ms"] or 0.0, row["stall_host_ms"] or 0.0]
    return (row["tpot_ms"] - sum(stalls), *stalls)


def _headline(ranked: Sequence[Row]) -> str:
    """The fastest policy, and how it compares with the slowest of few, or with the median of many."""
    real = [row for row in ranked if _kind(row) is not PolicyKind.CLAIRVOYANT]
    if len(real) < 2:
        return f"{_name(ranked[0])}: {ranked[0]['tpot_ms']:.1f} ms per output token"
    best, few = real[0], len(real) < 8
    other = real[-1] if few else real[len(real) // 2]
    average = " on average" if any(map(_spreads, real)) else ""
    name = " ".join([best["policy"], *(f"({label})" for label in best["labels"])])
    ratio = f"{other['tpot_ms'] / best['tpot_ms']:.1f}x faster than {other['policy'] if few else 'the median'}"
    return f"{name} is fastest{average}: {best['tpot_ms']:.1f} ms per token, {ratio}"
