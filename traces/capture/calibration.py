"""Calibration of forecasts: sums over passes of a model on text that is not evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from traces.capture.default_vectors import DefaultVectorMean
from traces.capture.record import LayerRecord
from traces.capture.residual_stream import ResidualStream
from traces.capture.settings import CaptureError
from traces.capture.text_sketch import TextSketch
from traces.capture.vectors import Vectors, popular_half

RESIDENT = "the most popular half of each layer's experts"


class CalibrationSums:
    """Sums over passes. With a ``stream`` default vectors are taken too, otherwise residual vectors and popularity."""

    def __init__(self, stream: ResidualStream | None = None) -> None:
        self._default = DefaultVectorMean(stream) if stream else None
        self._change, self._tokens, self._counts = torch.zeros(()), 0, torch.zeros((), dtype=torch.int64)

    def add(self, records: list[LayerRecord]) -> None:
        """Add the pass that just ran."""
        self._change = self._change + _changes(records)
        self._tokens += len(records[0].gate_input)
        self._counts = self._counts + _counts(records)
        if self._default:
            self._default.add()

    def vectors(self, provenance: Mapping[str, Any], read: TextSketch | None) -> Vectors:
        """The means over all passes, which ``read`` some text. Raises CaptureError if there was none."""
        if not self._tokens:
            raise CaptureError(
                "residual, quasi_hidden and partial forecasts need calibration prompts, got none; "
                "pass calibration_prompts=FILE, or vectors=FILE of an earlier calibration"
            )
        counts = self._counts.numpy()
        return Vectors(
            residual=(self._change / self._tokens).float().numpy(),
            default=self._default.mean().numpy() if self._default else None,
            tokens=counts,
            resident=popular_half(counts),
            estimator={},
            provenance={**provenance, "tokens": self._tokens, "resident": RESIDENT},
            read=read,
        )


def _changes(records: list[LayerRecord]) -> Tensor:
    """The change of the gate input from each layer to the next, summed over tokens: [L-1, H] float64."""
    steps = [(b.gate_input.double() - a.gate_input.double()).sum(0).cpu() for a, b in pairwise(records)]
    return torch.stack(steps) if steps else torch.zeros(0, records[0].gate_input.shape[1], dtype=torch.float64)


def _counts(records: list[LayerRecord]) -> Tensor:
    """Tokens routed to every expert, [L, E]."""
    experts = records[0].logits.shape[1]
    return torch.stack([torch.bincount(r.ids.flatten().cpu(), minlength=experts) for r in records if r.ids is not None])
