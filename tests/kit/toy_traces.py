"""Hand-written traces for examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traces.trace import Trace
from trilane.testing.strategies import token_places, toy_shape

Routing = Sequence[Sequence[Sequence[int]]]


def toy_trace(routing: Routing, *, prompt_tokens: int = 0, experts: int | None = None, **shape_fields: Any) -> Trace:
    """One sequence written out: ``routing[token][layer]`` lists the token's experts, the best first.

    The first ``prompt_tokens`` tokens are prefill, the others one decode step each. Weights are equal. ``experts``
    defaults to the largest id + 1.
    """
    ids = np.asarray(routing, np.int16)
    tokens, layers, top_k = ids.shape
    shape = toy_shape(layers, experts or int(ids.max()) + 1, top_k, **shape_fields)
    tensors = {
        **token_places([(prompt_tokens, tokens - prompt_tokens)]),
        "topk_ids": ids,
        "topk_weights": np.full(ids.shape, 1 / top_k, np.float16),
    }
    return Trace.from_tensors(shape, tensors, {"model": "toy"})
