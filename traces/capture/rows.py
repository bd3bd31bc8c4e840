"""Rows of a trace from one forward pass: tokens, routing and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from traces.capture.generate import Pass
from traces.capture.record import LayerRecord
from traces.capture.scores import probabilities


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
    """[N, L, E] float16."""
    scores: NDArray[Any] = torch.stack([probabilities(r.logits, rule) for r in records], 1).half().cpu().numpy()
    return scores
