"""Calibration of forecasts: sums over passes of a model on text that is not evaluated.

Default vectors of experts: Speculating Experts, Sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from traces.capture.record import LayerRecord
from traces.capture.residual_stream import ResidualStream
from traces.capture.settings import CaptureError
from traces.capture.text_sketch import TextSketch
from traces.capture.vectors import Vectors, popular_half

RESIDENT = "the most popular half of each layer's experts"


class DefaultVectorMean:
    """The mean raw output (before its weight) of every expert over the tokens that were routed to it."""

    def __init__(self, stream: ResidualStream) -> None:
        self._stream = stream
        first = stream.parts[0].mixture
        hidden = stream.recorder.layers[0].hidden
        self._sum = torch.zeros(len(stream.parts), first.experts_count, hidden, dtype=torch.float64)
        self._tokens = torch.zeros(self._sum.shape[:2], dtype=torch.float64)

    def add(self) -> None:
        """Add the pass that just ran."""
        for number in range(len(self._stream.parts)):
            self._stream.after(number, partial(self._note, number))

    def mean(self) -> Tensor:
        """[L, E, H] float32; zero for an expert that no token was routed to."""
        return (self._sum / self._tokens.clamp_min(1).unsqueeze(-1)).float()

    def _note(self, number: int, own: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        one = torch.ones_like(weights[:, :1])
        for chosen in ids.T:  # one expert per token and call, to separate the outputs
            raw = own(hidden, chosen.unsqueeze(1), one)
            self._sum[number].index_add_(0, chosen.cpu(), raw.double().cpu())
            self._tokens[number] += torch.bincount(chosen.cpu(), minlength=self._tokens.shape[1])
        return torch.zeros_like(hidden)


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
