"""What each of the two sides plays on the machine: its policy, the values in which the sides differ, and its kind."""

from __future__ import annotations

from typing import NamedTuple

from policies.protocols import PolicyKind
from policies.registry import system
from trilane.study.pays.gain_map import GainMap
from trilane.study.pays.words import shown_text
from trilane.study.sweep.axes import PARAMETER


class NamedSide(NamedTuple):
    """``values``: such as "4 deferred"; none where the sides differ in their policies alone."""

    policy: str
    values: tuple[str, ...]
    kind: PolicyKind


def without_side(found: GainMap) -> NamedSide:
    """The side without the idea."""
    return _side(found, found.cell.without.policy, found.question.idea.place_without(found.cell.x, found.cell.y))


def using_side(found: GainMap) -> NamedSide:
    """The side with it."""
    return _side(found, found.cell.using.policy, found.question.idea.place_using(found.cell.x, found.cell.y))


def _side(found: GainMap, policy: str, place: tuple[float, float]) -> NamedSide:
    idea = found.question.idea
    at = list(zip((idea.x, idea.y), place, strict=True))
    said = [(each, value) for each, value in at if each.in_words and each.axis in {*idea.off, *idea.times}]
    values = tuple(each.in_words.format(shown_text(each, value)) for each, value in said)
    parameters = {each.axis.removeprefix(PARAMETER): value for each, value in at if each.axis.startswith(PARAMETER)}
    return NamedSide(policy, values, system(policy).parse(parameters).needs.kind)
