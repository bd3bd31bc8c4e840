"""Why one setting lost to another: what takes longer with it, and by how much."""

from __future__ import annotations

from typing import NamedTuple

from trilane.study.tune.question import TuneQuestion
from trilane.study.tune.tuned import Tuned


class Reason(NamedTuple):
    """Of two settings, the second's over the first's, minus 1; and the part of the time that grows most.

    ``part_ms``: by how much, in the mean of a token or until the first one (``phase``); None where nothing grows.
    """

    slower: float  # by the time that is compared
    decode: float
    prompt: float
    phase: str | None
    part: str | None
    part_ms: float | None


def why_lost(best: Tuned, other: Tuned, question: TuneQuestion) -> Reason:
    """How the other compares with the best, and the part to which most of the loss is due."""
    tokens = {"decode": max(question.fit.generated - 1, 1), "prompt": 1}
    if question.goal != "both":
        tokens = {question.goal: 1}
    grown = [
        (times * (theirs - ours.get(part, 0.0)), phase, part, theirs - ours.get(part, 0.0))
        for phase, times in tokens.items()
        for ours, parts in [(_parts(best, phase), _parts(other, phase))]
        for part, theirs in parts.items()
    ]
    whole, phase, part, ms = max(grown)
    told = (phase, part, ms) if whole > 0 else (None, None, None)
    goal = question.goal
    return Reason(
        other.cost(goal) / best.cost(goal) - 1,
        other.tpot_ms / best.tpot_ms - 1,
        other.ttft_ms / best.ttft_ms - 1,
        *told,
    )


def _parts(tuned: Tuned, phase: str) -> dict[str, float]:
    return dict(tuned.decode_ms if phase == "decode" else tuned.prompt_ms)
