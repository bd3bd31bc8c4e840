"""Bars of time per output token: of compared policies, the fastest first, and of a policy's parts.

Names stand to the left of bars, values to the right, and whiskers go from the lowest to the highest of several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from policies.protocols import PolicyKind
from trilane.output.figures.families import STEP_PARTS, step_parts_ms
from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREY, PURPLE, VERMILLION, WHISKER, kind_of_row, marked
from trilane.output.figures.style import kind_handles, legend_of, page, tidy
from trilane.study.ablate import Ablation

Row = Mapping[str, Any]


def style_bars(ax: Axes, names: Sequence[str], places: Sequence[float] | None = None) -> None:
    """Axes of horizontal bars, the first at the top: names without ticks, a grid behind."""
    at = range(len(names)) if places is None else places
    ax.set_yticks(at, names, fontsize=11)
    ax.set_ylim(at[-1] + 0.6, -0.6)
    ax.tick_params(axis="y", length=0)
    tidy(ax, "x")
    ax.spines["left"].set_visible(False)


def style_tpot(ax: Axes, end_ms: float) -> None:
    """A horizontal axis of times per token, from 0."""
    ax.set_xlim(0, end_ms)
    ax.set_xlabel("time per output token, TPOT (ms); shorter is better")


def write_value(ax: Axes, place: float, text: str, *, bold: bool = True) -> None:
    """The value of a bar, in a column to the right of the axes, where neither whiskers nor marks can cover it."""
    ax.annotate(text, (1, place), xycoords=ax.get_yaxis_transform(), xytext=(8, 0), textcoords="offset points",
                va="center", fontsize=10, fontweight="bold" if bold else "normal", annotation_clip=False)


def whisker(ax: Axes, place: float, low: float, high: float) -> None:
    """From the lowest to the highest of several values of a bar."""
    ax.plot([low, high], [place, place], color=WHISKER, linewidth=1.5, marker="|", markersize=9, zorder=5)


def whisker_handle(label: str) -> Line2D:
    """An entry of the legend for ``whisker``."""
    return Line2D([], [], color=WHISKER, linewidth=1.5, marker="|", markersize=9, label=label)


# --- a comparison -----------------------------------------------------------------------------------------------------

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


def _name(row: Row) -> str:
    return marked(row["policy"], kind_of_row(row))


def _slower(rows: Sequence[Row]) -> str:
    """The policies that there is no room for."""
    if not rows:
        return ""
    times = f"{rows[0]['tpot_ms']:,.0f} to {rows[-1]['tpot_ms']:,.0f} ms"
    return f"{len(rows)} more, slower ({times}): {', '.join(map(_name, rows))}"


def _handles(shown: Sequence[Row]) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [Patch(facecolor=colour, label=label) for label, _, colour in STEP_PARTS]
    if any(row.get("lower_bound_tpot_ms") is not None for row in shown):
        label = "lower bound of policies that keep the routing"
        handles.append(Line2D([], [], color="black", linewidth=2, label=label))
    if any(row.get("null_model_tpot_ms") is not None for row in shown):
        handles.append(Line2D([], [], linestyle="", marker="D", color=_NULL, markeredgecolor="white", markersize=8,
                              label="null model (bandwidths alone)"))
    if any(map(_spreads, shown)):
        handles.append(whisker_handle(f"lowest to highest of {len(shown[0]['draws'])} draws"))
    return handles + kind_handles(set(map(kind_of_row, shown)))


def _end(ranked: Sequence[Row]) -> float:
    """End of the axis in ms: bars much longer than most are cut, or the others could not be read."""
    names = ("tpot_ms", "tpot_ms_max", "null_model_tpot_ms")
    median = float(ranked[len(ranked) // 2]["tpot_ms"])
    return 1.03 * min(max(row.get(name) or 0.0 for row in ranked for name in names), _CUT * median)


def _bar(ax: Axes, place: int, row: Row, end: float) -> None:
    """One run: its time, split, its reference marks, and the number."""
    clairvoyant = kind_of_row(row) is PolicyKind.CLAIRVOYANT
    left = 0.0
    for width, (_, _, colour) in zip(step_parts_ms(row), STEP_PARTS, strict=True):
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
    """True for a mean of draws that differ."""
    return bool(row.get("tpot_ms_min") != row.get("tpot_ms_max"))


def _headline(ranked: Sequence[Row]) -> str:
    """The fastest policy, and how it compares with the slowest of few, or with the median of many."""
    real = [row for row in ranked if kind_of_row(row) is not PolicyKind.CLAIRVOYANT]
    if len(real) < 2:
        return f"{_name(ranked[0])}: {ranked[0]['tpot_ms']:.1f} ms per output token"
    best, few = real[0], len(real) < 8
    other = real[-1] if few else real[len(real) // 2]
    average = " on average" if any(map(_spreads, real)) else ""
    name = " ".join([best["policy"], *(f"({label})" for label in best["labels"])])
    ratio = f"{other['tpot_ms'] / best['tpot_ms']:.1f}x faster than {other['policy'] if few else 'the median'}"
    return f"{name} is fastest{average}: {best['tpot_ms']:.1f} ms per token, {ratio}"


# --- an ablation ------------------------------------------------------------------------------------------------------

_SAVES, _COSTS, _UNCLEAR, _BARE = BLUE, VERMILLION, GREY, "#555555"
_CLEAR = 0.01  # smaller differences are not coloured
_GAP = 0.7  # between the ladder and the bars below it, in bars


@default_settings
def plot_ladder(ablation: Ablation, about: str = "") -> Figure:
    """Bars of time per output token: parts added one after the other, then the policy without each of them.

    Blue: the part saves time in every draw; red: it costs some; grey: less than 1 %, or the draws disagree. Whiskers go
    from the lowest to the highest draw; a dashed line marks the whole policy. ``about`` says what was run. Raises
    PictureError without decode steps.
    """
    whole = ablation.ladder[-1]
    if whole["tpot_ms"] is None:
        raise PictureError("expected runs with decode steps to draw, got none")
    bars = list(_part_rows(ablation))
    figure, part = page(10, 2.1 + 0.45 * len(bars), _whole_and_bare(ablation), about)
    ax = part.subplots()
    for place, row, colour in bars:
        _part_bar(ax, place, row, colour)
    ax.axvline(whole["tpot_ms"], color=WHISKER, linewidth=1, linestyle="--", zorder=0)
    style_bars(ax, [marked(row["label"], kind_of_row(row)) for _, row, _ in bars], [place for place, _, _ in bars])
    style_tpot(ax, 1.03 * max(row.get("tpot_ms_max") or 0.0 for _, row, _ in bars))
    legend_of(part, _part_handles(ablation, {colour for _, _, colour in bars}))
    return figure


def _part_rows(ablation: Ablation) -> Iterator[tuple[float, Row, str]]:
    """Place, row and colour of every bar."""
    yield 0.0, ablation.ladder[0], _BARE
    for place, (before, row) in enumerate(pairwise(ablation.ladder), 1):
        yield float(place), row, _colour(before, row)
    for place, row in enumerate(ablation.all_but_one, len(ablation.ladder)):
        yield place + _GAP, row, _colour(row, ablation.ladder[-1])


def _colour(off: Row, on: Row) -> str:
    """Colour of a part's effect, by the times of each draw without and with it."""
    if off["refused"] or on["refused"] or abs(on["tpot_ms"] / off["tpot_ms"] - 1) < _CLEAR:
        return _UNCLEAR
    times = [(without["tpot_ms"], by["tpot_ms"]) for without, by in zip(off["draws"], on["draws"], strict=True)]
    if all(without > by for without, by in times):
        return _SAVES
    return _COSTS if all(without < by for without, by in times) else _UNCLEAR


def _part_bar(ax: Axes, place: float, row: Row, colour: str) -> None:
    if row["refused"]:
        ax.annotate("cannot run without the rest", (0, place), xytext=(6, 0), textcoords="offset points", va="center",
                    fontsize=10, color="#666666")
        return
    low, high = row["tpot_ms_min"], row["tpot_ms_max"]
    ax.barh(place, row["tpot_ms"], height=0.62, color=colour, linewidth=0)
    if low != high:
        whisker(ax, place, low, high)
    faster = "" if row["speedup"] in (None, 1) else f"   {row['speedup']:.2f}x"
    write_value(ax, place, f"{row['tpot_ms']:.1f} ms{faster}")


def _whole_and_bare(ablation: Ablation) -> str:
    first, last = ablation.ladder[0], ablation.ladder[-1]
    if first["refused"] or not last["parts"]:
        return f"{ablation.policy}: {last['tpot_ms']:.1f} ms per token"
    change = f"{last['speedup']:.1f}x faster" if last["speedup"] >= 1 else f"{1 / last['speedup']:.1f}x slower"
    times = f"{first['tpot_ms']:.1f} to {last['tpot_ms']:.1f} ms per token"
    return f"{ablation.policy}: {change} with all its parts, {times}"


def _part_handles(ablation: Ablation, colours: Collection[str]) -> Sequence[Patch | Line2D]:
    draws = len(ablation.ladder[-1]["draws"])
    meanings = {
        _SAVES: "the part saves time", _COSTS: "the part costs time", _UNCLEAR: "less than 1 %, or draws disagree",
    }
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=label) for colour, label in meanings.items() if colour in colours
    ]
    handles.append(Line2D([], [], color=WHISKER, linewidth=1, linestyle="--", label=f"all of {ablation.policy}"))
    if draws > 1:
        handles.append(whisker_handle(f"lowest to highest of {draws} draws"))
    return handles + kind_handles({kind_of_row(row) for row in (*ablation.ladder, *ablation.all_but_one)})
