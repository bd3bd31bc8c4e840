"""Routing made up for a model whose routing nobody has recorded: skewed, persistent from token to token, and no more.

Each layer's router is a sum of two parts: a preference of the layer for some experts, the same for all tokens, and a
state of the sequence that drifts from token to token (a first-order autoregression). It is fitted to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.model_shape import ModelShape
from traces.trace import Trace
from traces.trace_layout import DECODE, PREFILL, TraceError


@dataclass(frozen=True)
class Synthesis:
    """How the routing is made. ``skew``: spread of a layer's preference, in units of the state's own spread;
    ``persistence``: correlation of the state from one token to the next, 0 to 1.
    """

    sequences: int = 4
    prompt_tokens: int = 64
    generated_tokens: int = 64
    skew: float = 1.0
    persistence: float = 0.7
    seed: int = 0


def synthetic_trace(shape: ModelShape, asked: Synthesis) -> Trace:
    """Routing with the layers, experts and top-k of ``shape``, and the scores of all experts.

    Raises TraceError for counts below 1 and a persistence outside 0..1.
    """
    length = asked.prompt_tokens + asked.generated_tokens
    if min(asked.sequences, asked.prompt_tokens, asked.generated_tokens) < 1 or not 0 <= asked.persistence <= 1:
        raise TraceError(f"synthetic trace: expected counts >= 1 and a persistence in 0..1, got {asked}")
    rng = np.random.default_rng(asked.seed)
    preference = asked.skew * rng.standard_normal((shape.moe_layers, shape.experts))
    scores = np.concatenate([_scores(rng, preference, length, asked.persistence) for _ in range(asked.sequences)])
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :, : shape.top_k]
    weights = np.take_along_axis(scores, ids, -1)
    phase = np.repeat([PREFILL, DECODE], [asked.prompt_tokens, asked.generated_tokens])
    tensors = {
        "sequence": np.repeat(np.arange(asked.sequences, dtype=np.int32), length),
        "position": np.tile(np.arange(length, dtype=np.int32), asked.sequences),
        "phase": np.tile(phase.astype(np.uint8), asked.sequences),
        "topk_ids": ids.astype(np.int16),
        "topk_weights": (weights / weights.sum(-1, keepdims=True) if shape.norm_topk else weights).astype(np.float16),
        "scores": scores.astype(np.float16),
    }
    made = f"skew {asked.skew:g}, persistence {asked.persistence:g}, seed {asked.seed}"
    return Trace.from_tensors(shape, tensors, {"model": shape.name, "synthetic": made})


def _scores(
    rng: np.random.Generator, preference: NDArray[np.float64], length: int, persistence: float
) -> NDArray[np.float64]:
    """Softmax scores [length, layers, experts] of one sequence."""
    state, logits = rng.standard_normal(preference.shape), []
    for _ in range(length):
        fresh = rng.standard_normal(preference.shape)
        state = persistence * state + np.sqrt(1 - persistence**2) * fresh
        logits.append(preference + state)
    shares = np.exp(np.stack(logits))
    return np.asarray(shares / shares.sum(-1, keepdims=True))
