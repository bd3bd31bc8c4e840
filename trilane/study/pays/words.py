"""A map in words: the answer, and where the break-even is. Pages and pictures have the same."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.study.pays.break_even import Range
from trilane.study.pays.dimensions import Dimension
from trilane.study.pays.gain_map import GainMap


def answer_of(found: GainMap) -> str:
    """Whether it pays on the machine, by how much, the spread, and the speeds."""
    cell = found.cell
    low, high, draws = gain_text(min(cell.gains)), gain_text(max(cell.gains)), len(cell.gains)
    spread = f" ({low} to {high} over {draws} draws)" if low != high else f" (in each of {draws} draws)"
    using, without = cell.using.mean_tokens_per_s, cell.without.mean_tokens_per_s
    speeds = f"{using:.1f} tokens/s; {without:.1f} with {found.question.idea.over}"
    return f"{verdict_of(found)}{spread if draws > 1 else ''}, {speeds}"


def verdict_of(found: GainMap) -> str:
    """Whether it pays on the machine, and by how much; with the policy's name, if it is not the fastest of several."""
    cell, idea = found.cell, found.question.idea
    using = found.question.using
    name = f" ({using[0].policy_name})" if len(using) == 1 else ""
    subject = f"{idea.subject[0].upper()}{idea.subject[1:]}{name}"
    verdict = "may pay here or not"
    if min(cell.gains) > idea.worth:
        verdict = "pays here"
    elif max(cell.gains) <= idea.worth:
        verdict = "does not pay here"
    return f"{subject} {verdict}: {gain_text(cell.gain or 0.0)}"


def break_even(found: GainMap) -> list[tuple[str, str]]:
    """Along each of the two axes: where the idea pays, as the other number is that of the machine."""
    idea = found.question.idea
    across = _paying(idea.x, [(cell.x, cell.gain) for cell in found.own_row], found.paying_x)
    up = _paying(idea.y, [(cell.y, cell.gain) for cell in found.own_column], found.paying_y)
    return [("break-even", f"{idea.x.label}: {across}"), ("", f"{idea.y.label}: {up}")]


def _paying(dimension: Dimension, gains: Sequence[tuple[float, float | None]], ranges: Sequence[Range]) -> str:
    """Of values along an axis, each with its gain; None: it cannot run there."""
    missing = [shown_text(dimension, value) for value, gain in gains if gain is None]
    known = [shown_text(dimension, value) for value, gain in gains if gain is not None]
    lacking = f"; it cannot run at {', '.join(missing)}" if missing else ""
    if not ranges or ranges == [Range(None, None)]:
        return f"it pays {'everywhere' if ranges else 'nowhere'} from {known[0]} to {known[-1]}{lacking}"
    return f"it pays {' and '.join(_range(dimension, one) for one in ranges)}{lacking}"


def _range(dimension: Dimension, paying: Range) -> str:
    low, high = (None if end is None else shown_text(dimension, end) for end in paying)
    if low is None:
        return f"up to {high}"
    if low == high:
        return f"at {low}"
    return f"from {low} on" if high is None else f"from {low} to {high}"


def shown_text(dimension: Dimension, value: float) -> str:
    """A value without its unit, in three digits; shares in percent."""
    if dimension.is_share:
        return f"{100 * value:.0f}%"
    return f"{float(f'{value:.3g}'):,g}"


def gain_text(gain: float) -> str:
    """In whole percent, with its sign."""
    return f"{round(100 * gain):+d}%"
