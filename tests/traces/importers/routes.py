"""Routing for the samples of importers: that of ``mini-moe:2``, 2 layers of 16 experts, 2 per token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MODEL = "mini-moe:2"
LAYERS, EXPERTS, TOP_K = 2, 16, 2


def routes(tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """ids [tokens, layers, k], distinct for a token and layer; each token shares an expert with the one before."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((tokens, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K]
    for token in range(1, tokens):
        for layer in range(LAYERS):
            shared = ids[token - 1, layer, 0]
            ids[token, layer] = (
                shared, ids[token, layer, 0] if ids[token, layer, 0] != shared else ids[token, layer, 1],
            )
    return ids
