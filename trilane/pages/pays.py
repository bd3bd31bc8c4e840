"""The page of ``trilane pays``: whether an idea pays here, what decides, where the break-even is, and the map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trilane.common.units import MIB
from trilane.figures.marks import marked
from trilane.pages.output import heading, number, pairs, percent, table
from trilane.study.pays.remarks import other_caches, remarks_of
from trilane.study.pays.words import NamedSide, answer_of, break_even, gain_text, shown_text, using_side, without_side

if TYPE_CHECKING:
    from trilane.study.pays.gain_map import Cell, GainMap
    from trilane.study.pays.played_map import PlayedSide


_COLUMNS = ("tokens/s", "on the GPU\nwhen needed", "copied\nMiB/token", "GPU waits\nfor the CPU", "\nfor copies")


def pays_page(found: GainMap) -> list[Text | Table | str]:
    """The answer first, then its reasons."""
    return [
        heading(answer_of(found)), *remarks_of(found), *other_caches(found), found.about, "",
        pairs([("what decides", ", ".join(_standing(found))), *break_even(found)]), "",
        _sides(found), "", *_map(found),
    ]  # fmt: skip


def _standing(found: GainMap) -> list[str]:
    """Where the machine is on the two axes."""
    idea, cell = found.question.idea, found.cell
    return [
        f"{dimension.label}: {shown_text(dimension, value)} here"
        for dimension, value in ((idea.x, cell.x), (idea.y, cell.y))
    ]


def _sides(found: GainMap) -> Table:
    """What the two sides do on the machine."""
    without, using = _name(without_side(found)), _name(using_side(found))
    lines = [_side(f"without: {without}", found.cell.without), _side(f"with it: {using}", found.cell.using)]
    return table(["here", *_COLUMNS], lines)


def _name(side: NamedSide) -> str:
    return ", ".join([marked(side.policy, side.kind), *side.values])


def _side(name: str, side: PlayedSide) -> list[str]:
    facts, moved = side.facts, side.facts["pcie_bytes_per_token"]
    shares = [percent(facts[fact]) for fact in ("decode_served_hit_rate", "stall_cpu_share", "stall_h2d_share")]
    copied = number(None if moved is None else moved / MIB)
    return [name, number(side.mean_tokens_per_s), shares[0], copied, *shares[1:]]


def _map(found: GainMap) -> list[Text | Table | str]:
    """The gain at each place; the machine's row and column are marked."""
    idea, (column, row) = found.question.idea, found.here
    xs = [f"{shown_text(idea.x, cell.x)}{' <' * (place == column)}" for place, cell in enumerate(found.rows[0])]
    lines = [
        [f"{shown_text(idea.y, cells[0].y)}{' <' * (place == row)}", *_gains(cells)]
        for place, cells in reversed(list(enumerate(found.rows)))
    ]
    what = f"gain in tokens/s; across: {idea.x.label}; down: {idea.y.label}; <: here"
    return [heading(what), table(["", *xs], lines), *_reasons(found)]


def _gains(cells: Sequence[Cell]) -> list[str]:
    return ["-" if cell.gain is None else gain_text(cell.gain) for cell in cells]


def _reasons(found: GainMap) -> list[str]:
    """Why places are empty: the first reason."""
    reasons = [cell.without.reason or cell.using.reason for cells in found.rows for cell in cells if not cell.gains]
    return [f"\n-  cannot run: {reasons[0]}"] if reasons else []
