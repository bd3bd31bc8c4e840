"""The map of an idea in words: the answer, where the break-even is, and what each side plays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from policies.protocols import PolicyKind
from policies.registry import system
from trilane.output.figures.quality_words import cost_text
from trilane.study.pays.break_even import End, Range
from trilane.study.pays.dimensions import Dimension
from trilane.study.pays.gain_map import GainMap, Paying
from trilane.study.pays.ideas import WARM_CACHE
from trilane.study.sweep.axes import PARAMETER

_VERDICTS = {Paying.YES: "pays here", Paying.NO: "does not pay here", Paying.PERHAPS: "may pay here or not"}
_PATCHES, _OWN = "llama-cache-lru", "llama.cpp@cache"
_CACHES = {
    _PATCHES: f"{_PATCHES}: patches that are not in llama.cpp, PR 27861 "
              f"(https://github.com/ggml-org/llama.cpp/pull/27861) and others",
    _OWN: f"{_OWN}: llama.cpp's own cache (--moe-cache-mib, PR 29887), the one of `trilane tune`",
}

_WARM = (
    "its cache holds the popular experts of other texts at first, and hits are those of decode steps; `trilane "
    "leaderboard` and `compare` start it empty, after other prompts and on another engine, and find fewer hits"
)


def answer_of(found: GainMap) -> str:
    """The verdict on the machine, by how much it gains, the spread, and the speeds."""
    cell = found.cell
    low, high, draws = gain_text(min(cell.gains)), gain_text(max(cell.gains)), len(cell.gains)
    spread = f" ({low} to {high} over {draws} draws)" if low != high else f" (in each of {draws} draws)"
    using, without = cell.using.mean_tokens_per_s, cell.without.mean_tokens_per_s
    speeds = f"{using:.1f} tokens/s; {without:.1f} with {found.question.idea.over}"
    return f"{verdict_of(found)}{spread if draws > 1 else ''}, {speeds}"


def verdict_of(found: GainMap) -> str:
    """The verdict on the machine, and the gain; with the policy's name, if it is not the fastest of several."""
    cell, idea = found.cell, found.question.idea
    names = {candidate.policy_name for candidate in found.question.using}
    name = f" ({names.pop()})" if len(names) == 1 else ""
    subject = f"{idea.subject[0].upper()}{idea.subject[1:]}{name}"
    return f"{subject} {_VERDICTS[found.paying]}: {gain_text(cell.gain or 0.0)}"


def break_even(found: GainMap) -> list[tuple[str, str]]:
    """The lines of the break-even: where along each axis the idea pays, as the other number is that of the machine."""
    idea = found.question.idea
    across = _paying(idea.x, [(cell.x, cell.gain) for cell in found.own_row], found.paying_x)
    up = _paying(idea.y, [(cell.y, cell.gain) for cell in found.own_column], found.paying_y)
    return [("break-even", f"{idea.x.label}: {across}"), ("", f"{idea.y.label}: {up}")]


def _paying(dimension: Dimension, gains: Sequence[tuple[float, float | None]], ranges: Sequence[Range]) -> str:
    """The ranges of an axis in which the idea pays; a gain of None: it cannot run there."""
    missing = [shown_text(dimension, value) for value, gain in gains if gain is None]
    known = [shown_text(dimension, value) for value, gain in gains if gain is not None]
    lacking = f"; it cannot run at {', '.join(missing)}" if missing else ""
    if not ranges or list(ranges) == [Range(None, None)]:
        return f"it pays {'everywhere' if ranges else 'nowhere'} from {known[0]} to {known[-1]}{lacking}"
    return f"it pays {' and '.join(_range(dimension, one) for one in ranges)}{lacking}"


def _range(dimension: Dimension, paying: Range) -> str:
    low, high = (None if end is None else _end(dimension, end) for end in paying)
    if low is None:
        return f"up to {high}"
    if low == high:
        return f"at {low}"
    return f"from {low} on" if high is None else f"from {low} to {high}"


def _end(dimension: Dimension, end: End) -> str:
    if isinstance(end, tuple):
        return f"somewhere between {' and '.join(shown_text(dimension, value) for value in end)}, where a side jumps,"
    return shown_text(dimension, end)


def shown_text(dimension: Dimension, value: float) -> str:
    """A value without its unit, in three digits; shares in percent."""
    if dimension.is_share:
        return f"{100 * value:.0f}%"
    return f"{float(f'{value:.3g}'):,g}"


def row_text(found: GainMap, row: int, gap: str = "  ") -> str:
    """The value of a row, and the PCIe link that has it."""
    text = shown_text(found.question.idea.y, found.rows[row][0].y)
    return f"{text}{gap}{found.links[row]}" if found.links and found.links[row] else text


def y_label(found: GainMap) -> str:
    """The label of the rows."""
    return f"{found.question.idea.y.label}{', and the PCIe link' * bool(found.links)}"


def gain_text(gain: float) -> str:
    """A gain in whole percent, with its sign."""
    return f"{round(100 * gain):+d}%"


# --- what each of the two sides plays ---------------------------------------------------------------------------------


class NamedSide(NamedTuple):
    """``values``: such as "4 deferred"; none where the sides differ in their policies alone."""

    policy: str
    values: tuple[str, ...]
    kind: PolicyKind


def without_side(found: GainMap) -> NamedSide:
    """The policy and values that the machine's cell plays without the idea."""
    return _side(found, found.cell.without.policy, found.question.idea.place_without(found.cell.x, found.cell.y))


def using_side(found: GainMap) -> NamedSide:
    """The policy and values that it plays with the idea."""
    return _side(found, found.cell.using.policy, found.question.idea.place_using(found.cell.x, found.cell.y))


def _side(found: GainMap, policy: str, place: tuple[float, float]) -> NamedSide:
    idea = found.question.idea
    at = list(zip((idea.x, idea.y), place, strict=True))
    said = [(each, value) for each, value in at if each.in_words and each.axis in {*idea.off, *idea.times}]
    values = tuple(each.in_words.format(shown_text(each, value)) for each, value in said)
    parameters = {each.axis.removeprefix(PARAMETER): value for each, value in at if each.axis.startswith(PARAMETER)}
    return NamedSide(policy, values, system(policy).parse(parameters).needs.kind)


# --- remarks ----------------------------------------------------------------------------------------------------------


def remarks_of(found: GainMap) -> list[str]:
    """Lines about what the machine's cell plays: whose cache it is, what is assumed, and that a text changes."""
    played = {found.cell.without.policy, found.cell.using.policy}
    remarks = [text for name, text in _CACHES.items() if name in played]
    if _PATCHES in played and WARM_CACHE in (*found.question.without, *found.question.using):
        remarks.append(_WARM)
    if "draft_tokens" in found.question.idea.off:
        remarks.append(_drafts(found))
    if found.question.idea.of_parts:
        remarks += _first_copies(found)
    if using_side(found).kind is PolicyKind.CHANGES:
        policy = found.cell.using.policy
        remarks.append(f"{policy} ~ changes the output, which costs quality: {cost_text(policy)}")
    return remarks


def _first_copies(found: GainMap) -> list[str]:
    """A line about the place at which the side without the idea begins to copy experts, if the map has it."""
    copies = [(cell.y, bool(cell.without.facts.get("pcie_bytes_per_token"))) for cell in found.own_column]
    begins = next(((some, none) for (some, last), (none, first) in pairwise(copies) if last != first), None)
    if begins is None:
        return []
    some, none = (shown_text(found.question.idea.y, value) for value in sorted(begins))
    return [f"{found.question.idea.over} copies experts where an upload takes {some} us, and none where it takes "
            f"{none}: in between it begins to pay, and from there on a faster link helps that side, too"]


def other_caches(found: GainMap) -> list[str]:
    """A line about the cache that is not played on the map: what it does on the machine, and how to ask for its map."""
    if found.alternative is not None:
        cell, name = found.alternative, found.alternative.using.policy
        gain = f"cannot run here: {cell.using.reason}" if cell.gain is None else (
            f"{gain_text(cell.gain)} here, {cell.using.mean_tokens_per_s:.1f} tokens/s"
        )
        return [f"{_CACHES[name]}: {gain}; its map: --policy {name}"]
    return [f"without --policy: the cache of patches, {_PATCHES}"] if found.question.policy == _OWN else []


def _drafts(found: GainMap) -> str:
    """A line about the draft layer, which the model may not have, and the share of drafts that are accepted."""
    question, acceptance = found.question, found.question.idea.x
    shape = question.fit.model_shape
    share, source = shown_text(acceptance, found.cell.x), "--x" if question.x is not None else "assumed; --x"
    drafts = f"{share} ({source}) of the drafts behind accepted ones"
    if shape.mtp_layers:
        return f"{shape.name} has a draft layer (MTP); if {drafts} are accepted"
    known = "is not known" if shape.mtp_layers is None else "it has not"
    return f"if {shape.name} had a draft layer (MTP), which {known}, and {drafts} were accepted"
