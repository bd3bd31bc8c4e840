"""Passes of a model over prompts: prefill, then decode token by token with a KV cache, without padding.

Each pass becomes rows of a trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traces.capture.load import Loaded
from traces.capture.record import LayerRecord, RouterRecorder, probabilities, scoring_rule
from traces.capture.settings import CaptureError, CaptureSettings
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


@dataclass(frozen=True)
class Probe:
    """Properties of a model found by one pass over one prompt."""

    prompt: list[int]
    top_k: int
    rule: str  # of scores.RULES
    certain: bool
    records: list[LayerRecord]


@dataclass(frozen=True)
class HookedModel:
    """A model, the settings to run it with, and the recorder on it."""

    loaded: Loaded
    settings: CaptureSettings
    recorder: RouterRecorder

    def passes(self, batch: Batch, new_tokens: int) -> Iterator[tuple[Pass, list[LayerRecord]]]:
        """Every forward pass over a batch, with the records of its routers."""
        sampler = Sampler(self.settings.seed, self.settings.temperature)
        for done in generate(self.loaded.model, batch, new_tokens, sampler):
            yield done, self.recorder.take()

    def prefill(self, prompt: list[int]) -> list[LayerRecord]:
        """The records of one pass over one prompt."""
        [(_, records)] = self.passes(Batch((0,), torch.tensor([prompt])), new_tokens=0)
        return records

    def probe(self, prompt: list[int]) -> Probe:
        """Learn k and the scoring rule from one prompt. Raises CaptureError on a model that differs by layer."""
        records = self.prefill(prompt)
        ids = [r.ids for r in records if r.ids is not None]
        widths = {i.shape[1] for i in ids}
        experts = self.loaded.layers[0].experts_count
        if len(widths) > 1 or any(int(i.max()) >= experts for i in ids):
            raise CaptureError(
                f"{self.loaded.name}: expected each token to get the same number of experts 0..{experts - 1} in every "
                f"layer, got {sorted(widths)} with ids up to {max(int(i.max()) for i in ids)}; not supported"
            )
        rule, certain = scoring_rule(records)
        return Probe(prompt, widths.pop(), rule, certain, records)


def place_rows(done: Pass) -> dict[str, NDArray[Any]]:
    """The token of each of the N = B x S rows."""
    batch, length = done.tokens.shape
    return {
        "sequence": np.repeat(np.array(done.sequences, np.int32), length),
        "position": np.tile(np.arange(done.start, done.start + length, dtype=np.int32), batch),
        "phase": np.full(batch * length, done.phase, np.uint8),
    }


def routing_rows(records: Sequence[LayerRecord]) -> dict[str, NDArray[Any]]:
    """Ids and weights [N, L, k] by descending weight; equal weights stay in the router's order."""
    weights = torch.stack([r.weights for r in records if r.weights is not None], 1).half()
    ids = torch.stack([r.ids for r in records if r.ids is not None], 1)
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    return {
        "topk_ids": ids.gather(-1, order).to(torch.int16).cpu().numpy(),
        "topk_weights": ordered.cpu().numpy(),
    }


def score_rows(records: Sequence[LayerRecord], rule: str) -> NDArray[Any]:
    """Router probabilities [N, L, E], float16."""
    scores: NDArray[Any] = torch.stack([probabilities(r.logits, rule) for r in records], 1).half().cpu().numpy()
    return scores
