"""A map in words: the answer, and where the break-even is. Pages and pictures have the same."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.study.pays.break_even import Range
from trilane.study.pays.dimensions import Dimension
from trilane.study.pays.gain_map import GainMap


def answer_of(found: GainMap) -> str:
    """Whether it pays on the machine, by how much, the spread, and the speeds."""
    cell = found.cell
    low, high, draws = _signed(min(cell.gains)), _signed(max(cell.gains)), len(cell.gains)
    spread = f" ({low} to {high} over {draws} draws)" if low != high else f" (in each of {draws} draws)"
    using, without = cell.using.mean_tokens_per_s, cell.without.mean_tokens_per_s
    speeds = f"{using:.1f} tokens/s; {without:.1f} with {found.question.idea.over}"
    return f"{verdict_of(found)}{spread if draws > 1 else ''}, {speeds}"


def verdict_of(found: GainMap) -> str:
    """Whether it pays on the machine, and by how much."""
    cell, idea = found.cell, found.question.idea
    subject = f"{idea.subject[0].upper()}{idea.subject[1:]}"
    verdict = "may pay here or not"
    if min(cell.gains) > idea.worth:
        verdict = "pays here"
    elif max(cell.gains) <= idea.worth:
        verdict = "does not pay here"
    return f"{subject} {verdict}: {_signed(cell.gain or 0.0)}"


def break_even(found: GainMap) -> list[tuple[str, str]]:
    """Along each of the two axes: where the idea pays, as the other number is that of the machine."""
    idea = found.question.idea
    across = _paying(idea.x, [cell.x for cell in found.own_row], found.paying_x)
    up = _paying(idea.y, [cell.y for cell in found.own_column], found.paying_y)
    return [("break-even", f"{idea.x.label}: {across}"), ("", f"{idea.y.label}: {up}")]


def _paying(dimension: Dimension, values: Sequence[float], ranges: Sequence[Range]) -> str:
    first, last = (shown_text(dimension, value) for value in (values[0], values[-1]))
    if not ranges:
        return f"it pays nowhere from {first} to {last}"
    if ranges == [Range(None, None)]:
        return f"it pays everywhere from {first} to {last}"
    return f"it pays {' and '.join(_range(dimension, one) for one in ranges)}"


def _range(dimension: Dimension, paying: Range) -> str:
    low, high = (None if end is None else shown_text(dimension, end) for end in paying)
    if low is None:
        return f"below {high}"
    return f"from {low} on" if high is None else f"from {low} to {high}"


def shown_text(dimension: Dimension, value: float) -> str:
    """A value without its unit, in three digits; shares in percent."""
    if dimension.is_share:
        return f"{100 * value:.0f}%"
    return f"{float(f'{value:.3g}'):,g}"


def _signed(gain: float) -> str:
    return f"{100 * gain:+.0f}%"
