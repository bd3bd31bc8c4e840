"""Whether two traces were made from the same prompts.

A trace does not hold the text, but the same tokens are routed alike. Of the bundled traces' prompts no two share more
than 0.88 of the choices of their first ``TELLING_TOKENS``; the same prompt in another float type, or under a policy
that changes the routing, shares 0.98. Shorter prompts say too little: many begin with the same words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traces.layout import PREFILL
from traces.trace import Trace

SAME_PROMPT = 0.9  # of the choices
TELLING_TOKENS = 4


def shared_prompt(trace: Trace, other: Trace) -> int | None:
    """The first sequence of ``trace`` whose prompt begins a sequence of ``other``, if there is one."""
    others = [theirs for _, theirs in _prompts(other)]
    for sequence, prompt in _prompts(trace):
        if len(prompt) >= TELLING_TOKENS and any(_alike(prompt, theirs) > SAME_PROMPT for theirs in others):
            return sequence
    return None


def same_texts(one: Trace, other: Trace) -> bool:
    """Whether both are synthetic, from the same numbers: they may differ in lengths and share texts all the same."""
    made = [trace.provenance for trace in (one, other) if trace.provenance.get("synthetic")]
    numbers = [[facts["model"], facts["seed"], facts["model_seed"]] for facts in made if "model_seed" in facts]
    return len(numbers) == 2 and numbers[0] == numbers[1]


def _prompts(trace: Trace) -> list[tuple[int, NDArray[np.int16]]]:
    """Each sequence, and what its prompt's tokens chose [tokens, L, k]."""
    prefill = np.flatnonzero(trace.phase == PREFILL)
    owners = trace.sequence[prefill]
    return [(sequence, trace.topk_ids[prefill[owners == sequence]]) for sequence in dict.fromkeys(owners.tolist())]


def _alike(prompt: NDArray[np.int16], other: NDArray[np.int16]) -> float:
    """The share of a prompt's choices that the beginning of another one has, too; 0 where that is shorter."""
    if len(other) < len(prompt):
        return 0.0
    return float((prompt[..., :, None] == other[: len(prompt), :, None, :]).any(-1).mean())
