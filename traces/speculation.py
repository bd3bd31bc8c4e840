"""Speculative decoding: how many drafted tokens are accepted, and the steps that verify them.

A step of one sequence computes the token that is known and the K that were drafted after it; the answer grows by those
drafts that are what the model would have said, up to the first that is not, and by the token that follows them. The
next step begins behind these. (Leviathan et al., arXiv 2211.17192; DeepSeek-V3's multi-token prediction, arXiv
2412.19437, Section 2.2, with 85 to 90 % of its second tokens accepted, Section 5.4.3; llama.cpp's
``--spec-type draft-mtp``, ``--spec-draft-n-max`` K.)

The acceptance is given by position, as engines count it: the share of the drafts at that position that were accepted,
which needs all before it to be. One number is the chance that a draft is accepted if all before it were, so that the
shares are its powers (arXiv 2211.17192, Section 3.1).

Where a model keeps a state of its whole past (linear attention), rejected drafts are in it. An engine that cannot take
them out goes back to the state before the step and computes the kept tokens *again*, in a step that makes no token
(ik_llama.cpp's ``--spec-ckpt-mode gpu-fallback``, PR 2412; llama.cpp before PR 28123 brought states from the host).

Two things are taken from the trace for what it does not have. A rejected draft is another token than the recorded one,
and would be routed to other experts: it is computed with the experts of the token that was recorded there. And which
drafts are rejected is independent of the text: every step has a number from 0 to 1, and a draft is accepted if it is
below the share of its position. These numbers are evenly spread, so that few steps have the stated shares: the first is
drawn at random, and each is the one before plus the golden ratio, modulo 1 (Weyl's additive recurrence; Knuth, TAOCP 3,
Section 6.4). Drafts that are not needed are not made: a step has no more of them than the answer lacks tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from traces.batches import StepRows

Acceptance: TypeAlias = float | Sequence[float]
_ACCEPTED = 0xACCE97  # makes other draws than the scenario's other uses of its seed
_GOLDEN = (5**0.5 - 1) / 2


def accepted_shares(draft_tokens: int, acceptance: Acceptance) -> tuple[float, ...]:
    """The share of accepted drafts at each of ``draft_tokens`` positions."""
    if isinstance(acceptance, int | float):
        return tuple(float(acceptance) ** place for place in range(1, draft_tokens + 1))
    return tuple(acceptance[:draft_tokens])


def tokens_per_step(draft_tokens: int, acceptance: Acceptance, again: bool = False) -> float:
    """Tokens by which a step of K drafts lengthens an answer, in the mean: 1 + the sum of the shares.

    ``again``: with the steps that compute tokens again, after all but those whose last draft is accepted.
    """
    shares = accepted_shares(draft_tokens, acceptance)
    steps = 2 - shares[-1] if again and shares else 1
    return (1 + sum(shares)) / steps


def verifying_steps(
    decode: Sequence[StepRows], tokens: int, shares: Sequence[float], seed: int, again: bool = False
) -> list[StepRows]:
    """The steps that make ``tokens`` tokens, from steps of one token each of one sequence, ``decode``.

    ``shares``: of accepted drafts by position, never rising. The last step may make more where ``decode`` goes on.
    ``again``: whether kept tokens are computed again where drafts were rejected.
    """
    numbers, steps, made = _even_numbers(seed), list[StepRows](), 0
    while made < tokens:
        some, draw = decode[made : made + 1 + len(shares)], next(numbers)
        kept = 1 + min(sum(draw < share for share in shares), len(some) - 1)
        steps.append(_together(some, drafted=len(some) - 1, generated=kept))
        if again and kept < len(some):
            steps.append(_together(some[:kept], drafted=0, generated=0))
        made += kept
    return [replace(step, index=decode[0].index + place) for place, step in enumerate(steps)]


def _even_numbers(seed: int) -> Iterator[float]:
    """From 0 to 1, any number of the first of them evenly spread."""
    value = float(np.random.default_rng((seed % 2**32, _ACCEPTED)).random())
    while True:
        yield value
        value = (value + _GOLDEN) % 1.0


def _together(some: Sequence[StepRows], drafted: int, generated: int) -> StepRows:
    """Several tokens of a sequence in one step."""
    rows = np.concatenate([step.rows for step in some])
    return replace(some[0], rows=rows, tokens=(len(some),), drafted=drafted, generated=generated)
