"""Generation: prefill, then decode token by token with a KV cache, without padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from traces.layout import DECODE, PREFILL

Pick: TypeAlias = Callable[[Tensor, Sequence[int], int], Tensor]  # (logits [B, V], sequences, step) -> tokens [B, 1]


@dataclass(frozen=True)
class Batch:
    """Prompts of one length, ``tokens`` [B, P], with the numbers of their sequences."""

    sequences: tuple[int, ...]
    tokens: Tensor


@dataclass(frozen=True)
class Pass:
    """One forward pass that has just run: ``tokens`` [B, S] at positions ``start`` .. ``start`` + S - 1."""

    sequences: tuple[int, ...]
    tokens: Tensor
    start: int
    phase: int


@dataclass(frozen=True)
class Sampler:
    """Draws the next tokens. A draw depends on seed, sequence and step only, not on the batch;
    ``temperature`` 0 takes the likeliest token.
    """

    seed: int
    temperature: float

    def __call__(self, logits: Tensor, sequences: Sequence[int], step: int) -> Tensor:
        """Tokens [B, 1] for logits [B, V]."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        shares = (logits.double() / self.temperature).softmax(-1).cumsum(-1)
        draws = [np.random.default_rng((self.seed, s, step)).random() for s in sequences]
        points = torch.tensor(draws, dtype=torch.float64, device=logits.device).unsqueeze(1)
        return torch.searchsorted(shares, points * shares[:, -1:]).clamp_max(logits.shape[-1] - 1)


def make_batches(prompts: Sequence[Sequence[int]], size: int, first_sequence: int = 0) -> list[Batch]:
    """At most ``size`` prompts at a time, all of one length: padding would change what some routers choose."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    groups = [same[i : i + size] for same in by_length.values() for i in range(0, len(same), size)]
    return [
        Batch(tuple(first_sequence + n for n in group), torch.tensor([list(prompts[n]) for n in group]))
        for group in groups
    ]


def generate(model: Any, batch: Batch, new_tokens: int, sampler: Pick) -> Iterator[Pass]:
    """Run the prompt, then ``new_tokens`` decode passes; yields after each pass, while its records are fresh.

    The end-of-text token does not stop a sequence: every one has prompt + ``new_tokens`` rows.
    """
    tokens, cache, start = batch.tokens.to(model.device), None, 0
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for step in range(new_tokens + 1):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, **last_only)
        yield Pass(batch.sequences, tokens, start, DECODE if step else PREFILL)
        cache, start = output.past_key_values, start + tokens.shape[1]
        tokens = sampler(output.logits[:, -1], batch.sequences, step)
