"""Long answers from few decode steps: the first ones as they come, the others for all that follow.

A cache that adapts needs some tens of tokens after the prompt before it holds what the answer asks for, so the mean of
the first steps alone would judge it cold. Of an answer of N tokens S steps are played. Where S is N, every step stands
for itself. Else the first half of the S are the answer's first steps, one by one; the other half is spread evenly over
the rest of the answer, as far as the context that attention reads is concerned, and its mean stands for all of the
rest.

Beside TPOT from all 256 steps (mixtral-offloading@impl, dali, best-exact and the clairvoyant run), that from 56 was
within 5 % 28 times of 32 and within 8 % always, in eight questions about one sequence and models from DeepSeek-V2-Lite
to DeepSeek-V3 (64: 26 times and within 7 %; 48: 25 times, up to 13 % off; 32: up to 14 %). A step of many sequences
tells more: with batches of 2 to 16, in six questions, 32 steps were within 5 % 23 times of 24 and 7 % always, and
from batches of 8 on 24 steps within 4 % always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traces.batches import StepRows
from trilane.study.fit.question import Question

_MOST = ((8, 24), (2, 32), (1, 56))  # from so many sequences on, so many steps are played at most


def most_steps(batch: int) -> int:
    """Decode steps that are worth playing."""
    return next(steps for sequences, steps in _MOST if batch >= sequences)


def one_by_one(played: int, generated: int) -> int:
    """Of ``played`` decode steps, those that stand for themselves."""
    return played if played >= generated else played // 2


def half_of(played: int) -> int:
    """Half of the decode steps; one at least, where there are any."""
    return -(-played // 2)


def spread(steps: Sequence[StepRows], question: Question) -> tuple[StepRows, ...]:
    """The decode steps at their places in the answer; the prefill as it is."""
    decode = [step for step in steps if step.phase == "decode"]
    moved = [
        replace(step, context=(question.context + place,) * len(step.sequences))
        for step, place in zip(decode, _places(len(decode), question.generated), strict=True)
    ]
    return (*(step for step in steps if step.phase == "prefill"), *moved)


def _places(played: int, generated: int) -> list[int]:
    """The tokens of the answer before each step; the last step that is spread is the answer's last."""
    first = one_by_one(played, generated)
    others, rest = played - first, generated - first
    return [*range(first), *(first + (rest - 1) * (place + 1) // others for place in range(others))]


def mean_of_answer(early: float, late: float, played: int, generated: int) -> float:
    """The mean over an answer, from the mean of the steps that stand for themselves and that of the others."""
    first = one_by_one(played, generated)
    if first >= generated:
        return early
    return (first * early + (generated - first) * late) / generated if first else late
