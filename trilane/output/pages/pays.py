"""The page of ``trilane pays``: whether an idea pays here, what decides, where the break-even is, and the map."""

from __future__ import annotations

from trilane.output.figures.marks import marked
from trilane.output.figures.pays_words import (
    NamedSide,
    answer_of,
    break_even,
    gain_text,
    other_caches,
    remarks_of,
    shown_text,
    using_side,
    without_side,
)
from trilane.output.pages.output import Part, heading, mebibytes, number, pairs, percent, table
from trilane.study.pays.gain_map import GainMap, PlayedSide

_COLUMNS = ("tokens/s", "on the GPU\nwhen needed", "copied\nMiB/token", "GPU waits\nfor the CPU", "\nfor copies")


def pays_page(found: GainMap) -> list[Part]:
    """The answer first, then its reasons."""
    idea, cell = found.question.idea, found.cell
    here = [f"{axis.label}: {shown_text(axis, value)} here" for axis, value in ((idea.x, cell.x), (idea.y, cell.y))]
    sides = [_side("without", without_side(found), cell.without), _side("with it", using_side(found), cell.using)]
    return [
        heading(answer_of(found)), *remarks_of(found), *other_caches(found), found.about, "",
        pairs([("what decides", ", ".join(here)), *break_even(found)]), "",
        table(["here", *_COLUMNS], sides), "", *_map(found),
    ]


def _side(what: str, named: NamedSide, side: PlayedSide) -> list[str]:
    """Cells of one side on the machine."""
    name = ", ".join([f"{what}: {marked(named.policy, named.kind)}", *named.values])
    facts = side.facts
    shares = [percent(facts[fact]) for fact in ("decode_served_hit_rate", "stall_cpu_share", "stall_h2d_share")]
    return [name, number(side.mean_tokens_per_s), shares[0], mebibytes(facts["pcie_bytes_per_token"]), *shares[1:]]


def _map(found: GainMap) -> list[Part]:
    """The gain at each place; the machine's row and column are marked."""
    idea, (column, row) = found.question.idea, found.here
    xs = [f"{shown_text(idea.x, cell.x)}{' <' * (place == column)}" for place, cell in enumerate(found.rows[0])]
    lines = [
        [f"{shown_text(idea.y, cells[0].y)}{' <' * (place == row)}",
         *("-" if cell.gain is None else gain_text(cell.gain) for cell in cells)]
        for place, cells in reversed(list(enumerate(found.rows)))
    ]
    what = f"gain in tokens/s; across: {idea.x.label}; down: {idea.y.label}; <: here"
    empty = [cell for cells in found.rows for cell in cells if not cell.gains]
    why = [f"\n-  cannot run: {cell.without.reason or cell.using.reason}" for cell in empty[:1]]
    return [heading(what), table(["", *xs], lines), *why]
