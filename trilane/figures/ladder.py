"""The picture of an ablation: a bar for each rung, blue where the part saves time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trilane.figures.figure_files import PictureError
from trilane.figures.marks import mark
from trilane.figures.style import BLUE, GREY, VERMILLION, meanings_of, page, style_tpot_axis
from trilane.study.ablate import Ablation

Row = Mapping[str, Any]
_SAVES, _COSTS, _UNCLEAR, _BARE, _WHISKER = BLUE, VERMILLION, GREY, "#555555", "#222222"
_CLEAR = 0.01  # a difference that is smaller is none to speak of
_GAP = 0.7  # between the ladder and what stands below it, in bars


def ladder(found: Ablation, about: str = "") -> Figure:
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
    ax.axvline(whole["tpot_ms"], color=_WHISKER, linewidth=1, linestyle="--", zorder=0)
    _style(ax, bars)
    handles = _legend(found, {colour for _, _, colour in bars})
    part.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
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
                    fontsize=10, color="#666666")  # fmt: skip
        return
    low, high = row["tpot_ms_min"], row["tpot_ms_max"]
    ax.barh(place, row["tpot_ms"], height=0.62, color=colour, linewidth=0)
    if low != high:
        ax.plot([low, high], [place, place], color=_WHISKER, linewidth=1.5, marker="|", markersize=9)
    faster = "" if row["speedup"] in (None, 1) else f"   {row['speedup']:.2f}x"
    ax.annotate(f"{row['tpot_ms']:.1f} ms{faster}", (high, place), xytext=(8, 0), textcoords="offset points",
                va="center", fontsize=10, fontweight="bold")  # fmt: skip


def _style(ax: Axes, bars: Sequence[tuple[float, Row, str]]) -> None:
    ax.set_yticks([place for place, _, _ in bars], [row["label"] + _mark(row) for _, row, _ in bars], fontsize=11)
    ax.set_ylim(bars[-1][0] + 0.6, -0.6)
    style_tpot_axis(ax, 1.22 * max(row.get("tpot_ms_max") or 0.0 for _, row, _ in bars))


def _mark(row: Row) -> str:
    return mark(row.get("labels", ()))


def _headline(found: Ablation) -> str:
    """What the picture says, in a line."""
    first, last = found.ladder[0], found.ladder[-1]
    if first["refused"] or not last["parts"]:
        return f"{found.policy}: {last['tpot_ms']:.1f} ms per token"
    change = f"{last['speedup']:.1f}x faster" if last["speedup"] >= 1 else f"{1 / last['speedup']:.1f}x slower"
    return f"{found.policy}: {change} with all its parts, {first['tpot_ms']:.1f} to {last['tpot_ms']:.1f} ms per token"


def _legend(found: Ablation, colours: Collection[str]) -> list[Patch | Line2D]:
    draws = len(found.ladder[-1]["draws"])
    meanings = {_SAVES: "the part saves time", _COSTS: "it costs time", _UNCLEAR: "less than 1 %, or draws disagree"}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=label) for colour, label in meanings.items() if colour in colours
    ]
    handles.append(Line2D([], [], color=_WHISKER, linewidth=1, linestyle="--", label=f"all of {found.policy}"))
    if draws > 1:
        label = f"lowest to highest of {draws} draws"
        handles.append(Line2D([], [], color=_WHISKER, linewidth=1.5, marker="|", markersize=9, label=label))
    return handles + meanings_of([_mark(row) for row in (*found.ladder, *found.all_but_one)])
