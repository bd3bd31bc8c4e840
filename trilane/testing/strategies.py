"""Random traces for laws, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from policies.calibration import Calibration
from traces.layout import ForecastKey
from traces.models.shape import ModelShape
from traces.trace import Trace


def toy_shape(layers: int, experts: int, top_k: int, **fields: Any) -> ModelShape:
    """A model small enough to compute by hand: an expert is 3 x 8 x 4 weights of 16 bits, 192 bytes."""
    values = {"name": "toy", "dense_layers": 0, "hidden": 8, "expert_width": 4, **fields}
    return ModelShape(moe_layers=layers, experts=experts, top_k=top_k, **values)


def toy_calibration(layers: int, experts: int, top_k: int, seed: int = 0, sequences: int = 3) -> Calibration:
    """Some sequences of 4 prompt and 5 decode tokens, routed at random with a taste for some experts."""
    random = np.random.default_rng(seed)
    taste = random.dirichlet(np.ones(experts), layers)
    scores = taste + random.random((sequences, 9, layers, experts)) * 0.2
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.int16)
    chosen = (ids[..., None] == np.arange(experts)).any(axis=-2).astype(np.int64)
    recalls = {(kind, 1): random.random(layers) for kind in ("gate", "residual", "quasi_hidden", "estimator")}
    return Calibration(
        "toy", chosen.sum(axis=1), chosen[:, 4:].sum(axis=1), ids[:, 4:].reshape(-1, layers, top_k), recalls
    )


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    scores: bool | None = None,
    forecasts: bool | None = None,
    max_layers: int = 4,
    max_experts: int = 8,
    min_decode: int = 0,
) -> Trace:
    """A small valid trace. ``scores`` and ``forecasts`` say whether it has them; None leaves it to chance.

    Each sequence has a prompt of 1 to 6 tokens and ``min_decode`` to 6 decode tokens. Where there are scores, the
    chosen experts are the best by score; the forecasts are random.
    """
    layers, experts = draw(st.integers(1, max_layers)), draw(st.integers(1, max_experts))
    top_k = draw(st.integers(1, experts))
    lengths = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(min_decode, 6)), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tensors = token_places(lengths)
    tokens = len(tensors["sequence"])
    tensors |= scored_routing(rng, (tokens, layers, experts), top_k)
    if not (draw(st.booleans()) if scores is None else scores):
        del tensors["scores"]
    if draw(st.booleans()) if forecasts is None else forecasts:
        known = [("gate", 1), ("residual", 1), ("gate", 2), ("random", 5), ("token", 1)]
        keys = draw(st.sets(st.sampled_from(known), min_size=1))
        for kind, lookahead in sorted(keys):
            count = draw(st.integers(min(2 * top_k, experts), experts))
            with_scores = draw(st.booleans())
            key = ForecastKey(kind, lookahead)
            tensors |= _forecast(rng, (tokens, layers, experts), key, count, with_scores)
    return Trace.from_tensors(toy_shape(layers, experts, top_k), tensors, {"model": "random", "lengths": lengths})


def token_places(lengths: Sequence[tuple[int, int]]) -> dict[str, NDArray[Any]]:
    """sequence, position and phase of sequences with so many (prompt, decode) tokens, one after the other."""
    totals = [sum(length) for length in lengths]
    return {
        "sequence": np.repeat(np.arange(len(totals)), totals).astype(np.int32),
        "position": np.concatenate([np.arange(total) for total in totals]).astype(np.int32),
        "phase": np.concatenate([np.repeat([0, 1], length) for length in lengths]).astype(np.uint8),
    }


def scored_routing(rng: np.random.Generator, size: tuple[int, int, int], top_k: int) -> dict[str, NDArray[Any]]:
    """Random scores of experts, and the best of them; ``size``: tokens, layers, experts."""
    scores = rng.dirichlet(np.ones(size[2]), size[:2]).astype(np.float16)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    chosen = np.take_along_axis(scores, ids, axis=-1)
    return {"topk_ids": ids.astype(np.int16), "topk_weights": chosen, "scores": scores}


def _forecast(
    rng: np.random.Generator, size: tuple[int, int, int], key: ForecastKey, count: int, with_scores: bool
) -> dict[str, NDArray[Any]]:
    scores = rng.random(size).astype(np.float16)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    best = np.take_along_axis(scores, ids, axis=-1)
    past = max(size[1] - key.layers_ahead, 0)
    ids[:, past:], best[:, past:] = -1, 0
    tensors: dict[str, NDArray[Any]] = {key.ids_name: ids.astype(np.int16)}
    return tensors | ({key.scores_name: best} if with_scores else {})
