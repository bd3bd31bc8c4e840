"""Calibration: counts on prompts that are not evaluated, with which some policies start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Counts of a calibration trace.

    ``activations`` [sequences, layers, experts]: tokens that each sequence routed to each expert, prompt and decode;
    ``decode_activations``: those of its decode steps alone. ``decode_ids`` [tokens, layers, k]: the experts of each
    decode token, sequence after sequence. ``recalls``: of each forecast (kind, lookahead) that the trace holds, the
    share of the true top-k among its first k, by the layer that is forecast, [layers]; NaN where none reaches.
    ``source`` says where they were counted.
    """

    source: str
    activations: Counts
    decode_activations: Counts
    decode_ids: NDArray[np.int16]
    recalls: Mapping[tuple[str, int], Floats] = field(default_factory=dict)

    @cached_property
    def popularity(self) -> Floats:
        """[layers, experts]: share of each layer's (token, expert) pairs; a row sums to 1."""
        return _shares(self.activations)

    @cached_property
    def decode_popularity(self) -> Floats:
        """Popularity over decode tokens alone; where none was decoded, over all."""
        return _shares(self.decode_activations) if self.decode_activations.any() else self.popularity


def _shares(counts: Counts) -> Floats:
    total = counts.sum(axis=0)
    return np.asarray(total / np.maximum(total.sum(axis=1, keepdims=True), 1))
