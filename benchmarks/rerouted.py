"""The two ends of how routing repeats itself: every token of the answer has the same experts, or each has others."""

from __future__ import annotations

from typing import Literal

import numpy as np

from traces.layout import DECODE
from traces.trace import Trace

Routed = Literal["same", "other"]


def rerouted(trace: Trace, how: Routed) -> Trace:
    """``same``: those of the answer's first token; ``other``: drawn anew, all equally likely."""
    decode = np.flatnonzero(trace.phase == DECODE)
    ids = trace.topk_ids.copy()
    ids[decode] = ids[decode[0]] if how == "same" else _drawn(len(decode), trace)
    return Trace.from_tensors(trace.shape, {**trace.tensors(), "topk_ids": ids}, {"experts": how, "of": trace.checksum})


def _drawn(tokens: int, trace: Trace) -> np.ndarray:
    layers, top_k = trace.topk_ids.shape[1:]
    order = np.random.default_rng(0).random((tokens, layers, trace.shape.experts)).argsort(axis=-1)
    return order[..., :top_k].astype(trace.topk_ids.dtype)
