"""Windows: steps of one sequence that compute the token that is known and the drafts behind it, and verify these.

Speculative decoding: the answer grows by those drafts that are what the model would have said, up to the first that is
not, and by the token that follows them. The next window begins behind these. (Leviathan et al., arXiv 2211.17192;
DeepSeek-V3's multi-token prediction, arXiv 2412.19437, Section 2.2, with 85 to 90 % of its second tokens accepted,
Section 5.4.3; llama.cpp's ``--spec-type draft-mtp``, ``--spec-draft-n-max`` K; Strata's ``--spec`` K + 1.)

The acceptance is given by position, as engines count it: the share of windows in which the draft at that position is
accepted, which needs all before it to be. One number is the chance that a draft is accepted if all before it were, so
that the shares are its powers (arXiv 2211.17192, Section 3.1).

Engines draft on only while they are sure of the draft before (llama.cpp's ``--spec-draft-p-min``, Strata's
``--spec-min-p``), so that windows differ in length. ``offered`` are the shares of windows that have a draft at each
position; without them all have all. Which windows these are is independent of the text: every window has a number from
0 to 1; a draft is made if it is below the share of windows that have it, and accepted if it is below the share that
accept it: the drafts that a threshold saves are rejected ones, as far as the shares allow. These numbers are evenly
spread, so that few windows have the stated shares: the first is drawn at random, and each is the one before plus the
golden ratio, modulo 1 (Weyl's additive recurrence; Knuth, TAOCP 3, Section 6.4). A *recorded* series of windows, such
as an engine's log, takes their place, from the first again after the last. Drafts that are not needed are not made: a
window has no more of them than the answer lacks tokens.

Where a model keeps a state of its whole past (linear attention), rejected drafts are in it. An engine that cannot take
them out goes back to the state before the step and computes the kept tokens *again*, in a step that makes no token
(ik_llama.cpp's ``--spec-ckpt-mode gpu-fallback``, PR 2412; llama.cpp before PR 28123 brought states from the host).

A rejected draft is another token than the recorded one, and no trace has its experts. It is computed with those of the
token that was recorded in its place (``recorded``), which the next window needs as well, so that a cache seems to
foresee them; or with those of another token of the answer, drawn at random among those outside the window (``drawn``),
which have the model's routing in this text, and nothing of the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from traces.batches import StepRows

Acceptance: TypeAlias = float | Sequence[float]
RejectedDrafts = Literal["recorded", "drawn"]
_ACCEPTED, _REJECTED = 0xACCE97, 0x2E1EC7  # make other draws than the scenario's other uses of its seed
_GOLDEN = (5**0.5 - 1) / 2


class Window(NamedTuple):
    """Drafts that a step verifies, and how many of them it accepts."""

    drafted: int
    accepted: int


def accepted_shares(draft_tokens: int, acceptance: Acceptance) -> tuple[float, ...]:
    """The share of accepted drafts at each of ``draft_tokens`` positions."""
    if isinstance(acceptance, int | float):
        return tuple(float(acceptance) ** place for place in range(1, draft_tokens + 1))
    return tuple(acceptance[:draft_tokens])


def offered_shares(draft_tokens: int, offered: Acceptance) -> tuple[float, ...]:
    """The share of windows with a draft at each position; one number: the chance of another one behind a draft."""
    if isinstance(offered, int | float):
        return tuple(float(offered) ** place for place in range(draft_tokens))
    return tuple(offered[:draft_tokens])


def tokens_per_step(
    draft_tokens: int, acceptance: Acceptance, again: bool = False, offered: Acceptance = 1.0
) -> float:
    """Tokens by which a step of at most K drafts lengthens an answer, in the mean: 1 + the sum of the shares.

    ``again``: with the steps that compute tokens again, after those with a rejected draft.
    """
    accepted, made = accepted_shares(draft_tokens, acceptance), offered_shares(draft_tokens, offered)
    steps = 1 + (_share_with_rejected(accepted, made) if again else 0.0)
    return (1 + sum(map(min, accepted, made))) / steps


def _share_with_rejected(accepted: Sequence[float], offered: Sequence[float]) -> float:
    """Share of windows with a rejected draft: their numbers are below an offered share, and not below the accepted."""
    edges = sorted({0.0, *accepted, *offered, 1.0})
    shares = list(zip(accepted, offered, strict=True))
    return sum(end - low for low, end in pairwise(edges) if any(kept <= low < made for kept, made in shares))


def drawn_windows(accepted: Sequence[float], seed: int, offered: Sequence[float] | None = None) -> Iterator[Window]:
    """Windows with these shares of ``accepted`` and ``offered`` drafts by position, never rising."""
    for draw in _even_numbers(seed):
        drafted = len(accepted) if offered is None else sum(draw < share for share in offered)
        yield Window(drafted, min(sum(draw < share for share in accepted), drafted))


def recorded_windows(series: Sequence[tuple[int, int]]) -> Iterator[Window]:
    """Windows of (drafted, accepted), from the first again after the last."""
    return cycle(map(Window._make, series))


def verifying_steps(
    decode: Sequence[StepRows], tokens: int, windows: Iterator[Window], seed: int, again: bool = False,
    rejected: RejectedDrafts = "recorded",
) -> list[StepRows]:
    """The steps that make ``tokens`` tokens, from steps of one token each of one sequence, ``decode``.

    The last step may make more where ``decode`` goes on. ``again``: whether kept tokens are computed again where drafts
    were rejected.
    """
    steps, made = list[StepRows](), 0
    draw = np.random.default_rng((seed % 2**32, _REJECTED))
    while made < tokens:
        window = next(windows)
        some = decode[made : made + 1 + window.drafted]
        kept = 1 + min(window.accepted, len(some) - 1)
        step = _together(some, drafted=len(some) - 1, generated=kept)
        others = len(decode) - len(some)
        if rejected == "drawn" and kept < len(some) and others:
            places = draw.integers(0, others, len(some) - kept)
            places[places >= made] += len(some)
            drawn = [decode[place].rows for place in places]
            step = replace(step, rows=np.concatenate([step.rows[:kept], *drawn]))
        steps.append(step)
        if again and kept < len(some):
            steps.append(_together(some[:kept], drafted=0, generated=0))
        made += kept
    return [replace(step, index=decode[0].index + place) for place, step in enumerate(steps)]


def _even_numbers(seed: int) -> Iterator[float]:
    """Numbers from 0 to 1, any number of the first of them evenly spread."""
    value = float(np.random.default_rng((seed % 2**32, _ACCEPTED)).random())
    while True:
        yield value
        value = (value + _GOLDEN) % 1.0


def _together(some: Sequence[StepRows], drafted: int, generated: int) -> StepRows:
    """Several tokens of a sequence in one step."""
    rows = np.concatenate([step.rows for step in some])
    return replace(some[0], rows=rows, tokens=(len(some),), drafted=drafted, generated=generated)
