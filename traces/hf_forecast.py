"""Forecasts of later layers' routing, made with the later layer's own router.

``gate@d``: router of layer l+d on the gate input of layer l (HybriMoE, DAOP). ``residual@1``: the same after adding the
mean change of the gate input from l to l+1, taken on calibration prompts (DALI, eq. 10-11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from traces.capture_settings import CaptureError
from traces.hf_layers import MoeLayer
from traces.hf_record import LayerRecord, find_ids, find_logits
from traces.hf_scores import probabilities
from traces.trace_layout import ForecastKey

KINDS = ("gate", "residual")


@dataclass(frozen=True)
class Forecaster:
    """Makes forecasts of ``count`` (m) experts a token. ``residuals`` [L-1, H]: needed for ``residual`` forecasts."""

    layers: list[MoeLayer]
    keys: tuple[ForecastKey, ...]
    count: int
    rule: str
    residuals: Tensor | None = None

    def rows(self, records: list[LayerRecord]) -> dict[str, NDArray[Any]]:
        """The forecast tensors of one pass, by name: ids (and scores where the layer is the next) [N, L, m]."""
        tensors = {}
        for key in self.keys:
            ids, scores = self._forecast(key, records)
            tensors[key.ids_name] = ids
            if has_scores(key):
                tensors[key.scores_name] = scores
        return tensors

    def _forecast(self, key: ForecastKey, records: list[LayerRecord]) -> tuple[NDArray[Any], NDArray[Any]]:
        shape = (len(records[0].gate_input), len(records), self.count)
        ids, scores = np.full(shape, -1, np.int16), np.zeros(shape, np.float16)
        for at in range(len(records) - key.lookahead):
            target = at + key.lookahead
            hidden = records[at].gate_input
            if key.kind == "residual":
                assert self.residuals is not None
                hidden = hidden + self.residuals[at].to(hidden)
            best, values = self.rank(self.layers[target], records[target], hidden)
            ids[:, at], scores[:, at] = best.cpu().numpy(), values.cpu().numpy()
        return ids, scores

    def rank(self, layer: MoeLayer, record: LayerRecord, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The ``count`` best experts [N, m]: those that the router chooses, then the most probable others."""
        logits, chosen = run_router(layer, record, hidden)
        scores = probabilities(logits, self.rule)
        order = scores.double()
        if chosen is not None:
            order = order.scatter_add(1, chosen, torch.full_like(order, 2.0)[:, : chosen.shape[1]])
        best = order.topk(self.count, dim=-1).indices
        # A correction bias may choose an expert less probable than another: scores never rise along the ranking.
        return best, scores.gather(1, best).cummin(-1).values


def run_router(layer: MoeLayer, record: LayerRecord, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits [N, E] and choices [N, k] of the layer's router on ``hidden`` [N, H], with the other arguments that it was
    called with. ``forward`` itself, so that hooks do not see the call.
    """
    output = layer.router.forward(
        hidden.unsqueeze(0) if record.batched else hidden, *record.extra_args, **record.extra_kwargs
    )
    return find_logits(output, layer.experts_count, layer.path), find_ids(output)


def check_forecastable(layers: list[MoeLayer], records: list[LayerRecord]) -> None:
    """Raise CaptureError where a router takes more than gate input and parameters, so that no forecast is possible."""
    for layer, record in zip(layers, records, strict=True):
        own = {t.data_ptr() for t in _state(layer.block)}
        for value in (*record.extra_args, *record.extra_kwargs.values()):
            if isinstance(value, Tensor) and value.data_ptr() not in own:
                raise CaptureError(
                    f"{layer.path}: its router needs {tuple(value.shape)} of the running pass besides its gate input, "
                    "which is not known a layer ahead; capture without forecasts (forecasts=())"
                )


def has_scores(key: ForecastKey) -> bool:
    """Are the scores of this forecast recorded? Of the next layer only: further ahead would double the file."""
    return key.lookahead == 1


def parse_forecasts(names: Sequence[str]) -> tuple[ForecastKey, ...]:
    """Keys of names such as ``gate@1``. Raises CaptureError on a kind or a lookahead that capture cannot make."""
    keys = []
    for name in names:
        kind, _, ahead = name.partition("@")
        if kind not in KINDS or not ahead.isdigit() or int(ahead) < 1 or (kind == "residual" and ahead != "1"):
            raise CaptureError(f"forecast {name!r}: expected gate@1, gate@2, ... or residual@1")
        keys.append(ForecastKey(kind, int(ahead)))
    return tuple(dict.fromkeys(keys))


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class ResidualMean:
    """The mean change of the gate input from each layer to the next, over all tokens that it is shown."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._tokens = 0

    def add(self, records: list[LayerRecord]) -> None:
        """Take in one pass."""
        steps = [b.gate_input.double() - a.gate_input.double() for a, b in pairwise(records)]
        total = torch.stack([s.sum(0) for s in steps]) if steps else torch.zeros(0)
        self._sum = total if self._sum is None else self._sum + total
        self._tokens += len(records[0].gate_input)

    def mean(self) -> Tensor:
        """[L-1, H]. Raises CaptureError if nothing was shown."""
        if self._sum is None:
            raise CaptureError("residual forecasts need calibration prompts, got none; pass calibration_prompts=FILE")
        return (self._sum / self._tokens).float()
