"""Rows of a trace from one pass of llama.cpp: routing, scores, and forecasts by the routers of later layers.

The forecasts are those of capture from PyTorch (``traces.capture.router_forecast``): ``gate@d`` applies the router of
layer l + d to the input of layer l's, ``residual@1`` adds the mean change between the two first (DALI, eq. 10-11).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realrun.llama_cpp.gate_matrices import Gates, Scoring, scores_of
from realrun.llama_cpp.routing_observer import BlockRouting
from traces.layout import ForecastKey

Routing = Mapping[int, BlockRouting]  # by block, in their order


def routing_rows(routing: Routing) -> dict[str, NDArray[Any]]:
    """Ids and weights [N, L, k] by descending weight; equal weights stay in the router's order."""
    weights = np.stack([each.weights for each in routing.values()], axis=1).astype(np.float16)
    ids = np.stack([each.ids for each in routing.values()], axis=1).astype(np.int16)
    order = np.argsort(-weights, axis=-1, kind="stable")
    return {
        "topk_ids": np.take_along_axis(ids, order, axis=-1),
        "topk_weights": np.take_along_axis(weights, order, axis=-1),
    }


def score_rows(routing: Routing, gates: Gates) -> NDArray[np.float16]:
    """Probabilities of all experts [N, L, E]; of routers that choose by logits, their softmax."""
    rule: Scoring = "softmax" if gates.scoring == "logits" else gates.scoring
    logits = [gates.by_block[block].biased(each.logits) for block, each in routing.items()]
    return np.stack([scores_of(each, rule) for each in logits], axis=1).astype(np.float16)


@dataclass(frozen=True)
class GateForecasts:
    """Forecasts of ``count`` (m) experts a token; ``change`` [L - 1, H]: what residual@1 adds at each layer."""

    gates: Gates
    keys: Sequence[ForecastKey]
    count: int
    change: NDArray[np.float32] | None = None

    def rows(self, routing: Routing) -> dict[str, NDArray[np.int16]]:
        """Ids [N, L, m] by the tensors' names; -1 where no layer is that far ahead."""
        return {key.ids_name: self._ids(key, routing) for key in self.keys}

    def _ids(self, key: ForecastKey, routing: Routing) -> NDArray[np.int16]:
        blocks = list(routing)
        ids = np.full((len(routing[blocks[0]].ids), len(blocks), self.count), -1, np.int16)
        for at, target in enumerate(blocks[key.lookahead :]):
            seen = routing[blocks[at]].inputs
            if key.kind == "residual":
                assert self.change is not None
                seen = seen + self.change[at]
            ids[:, at] = self.gates.ranked(target, seen, self.count)
        return ids


def mean_change(passes: Iterable[Routing]) -> NDArray[np.float32]:
    """The mean change [L - 1, H] of the routers' inputs from each layer to the next, over calibration text."""
    total, tokens = np.zeros(()), 0
    for routing in passes:
        inputs = np.stack([each.inputs for each in routing.values()]).astype(np.float64)  # [L, N, H]
        total = total + np.diff(inputs, axis=0).sum(axis=1)
        tokens += inputs.shape[1]
    return np.asarray(total / tokens, np.float32)
