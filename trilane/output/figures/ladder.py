"""An ablation as bars: parts added one after the other, then the policy without each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
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
from trilane.output.figures.style import BLUE, GREY, VERMILLION, WHISKER, kind_handles, legend_of, page
from trilane.study.ablate import Ablation

Row = Mapping[str, Any]
_SAVES, _COSTS, _UNCLEAR, _BARE = BLUE, VERMILLION, GREY, "#555555"
_CLEAR = 0.01  # smaller differences are not coloured
_GAP = 0.7  # between the ladder and the bars below it, in bars


@default_settings
def plot_ladder(found: Ablation, about: str = "") -> Figure:
    """Bars of time per output token: parts added one after the other, then the policy without each of them.

    Blue: the part saves time in every draw; red: it costs some; grey: less than 1 %, or the draws disagree. Whiskers go
    from the lowest to the highest draw; a dashed line marks the whole policy. ``about`` says what was run. Raises
    PictureError without decode steps.
    """
    whole = found.ladder[-1]
    if whole["tpot_ms"] is None:
        raise PictureError("expected runs with decode steps to draw, got none")
    bars = list(_bars(found))
    figure, part = page(10, 2.1 + 0.45 * len(bars), _headline(found), about)
    ax = part.subplots()
    for place, row, colour in bars:
        _bar(ax, place, row, colour)
    ax.axvline(whole["tpot_ms"], color=WHISKER, linewidth=1, linestyle="--", zorder=0)
    style_bars(ax, [marked(row["label"], _kind(row)) for _, row, _ in bars], [place for place, _, _ in bars])
    style_tpot(ax, 1.03 * max(row.get("tpot_ms_max") or 0.0 for _, row, _ in bars))
    legend_of(part, _handles(found, {colour for _, _, colour in bars}))
    return figure


def _bars(found: Ablation) -> Iterator[tuple[float, Row, str]]:
    """Place, row and colour of every bar."""
    yield 0.0, found.ladder[0], _BARE
    for place, (before, row) in enumerate(pairwise(found.ladder), 1):
        yield float(place), row, _colour(before, row)
    for place, row in enumerate(found.all_but_one, len(found.ladder)):
        yield place + _GAP, row, _colour(row, found.ladder[-1])


def _colour(off: Row, on: Row) -> str:
    """What a part does, by the times of each draw without and with it."""
    if off["refused"] or on["refused"] or abs(on["tpot_ms"] / off["tpot_ms"] - 1) < _CLEAR:
        return _UNCLEAR
    times = [(without["tpot_ms"], by["tpot_ms"]) for without, by in zip(off["draws"], on["draws"], strict=True)]
    if all(without > by for without, by in times):
        return _SAVES
    return _COSTS if all(without < by for without, by in times) else _UNCLEAR


def _bar(ax: Axes, place: float, row: Row, colour: str) -> None:
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


def _kind(row: Row) -> PolicyKind:
    return kind_of(row.get("labels", ()))


def _headline(found: Ablation) -> str:
    first, last = found.ladder[0], found.ladder[-1]
    if first["refused"] or not last["parts"]:
        return f"{found.policy}: {last['tpot_ms']:.1f} ms per token"
    change = f"{last['speedup']:.1f}x faster" if last["speedup"] >= 1 else f"{1 / last['speedup']:.1f}x slower"
    return f"{found.policy}: {change} with all its parts, {first['tpot_ms']:.1f} to {last['tpot_ms']:.1f} ms per token"


def _handles(found: Ablation, colours: Collection[str]) -> Sequence[Patch | Line2D]:
    draws = len(found.ladder[-1]["draws"])
    meanings = {
        _SAVES: "the part saves time", _COSTS: "the part costs time", _UNCLEAR: "less than 1 %, or draws disagree",
    }
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=label) for colour, label in meanings.items() if colour in colours
    ]
    handles.append(Line2D([], [], color=WHISKER, linewidth=1, linestyle="--", label=f"all of {found.policy}"))
    if draws > 1:
        handles.append(whisker_handle(f"lowest to highest of {draws} draws"))
    return handles + kind_handles({_kind(row) for row in (*found.ladder, *found.all_but_one)})
