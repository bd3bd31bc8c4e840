"""Forecasts of later layers, made at each layer during the pass that they are about.

The kinds, their meaning and their networks are those of ``traces.capture.router_forecast``. Routers of later layers get
the same additional arguments as in an earlier pass; a model for which these differ is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from policies.mechanism.views import Forecast, Phase
from policies.protocols import Needs
from sim.runs.vocabulary import FROM_EXPERTS
from traces.batches import best_ranks
from traces.capture.record import LayerRecord, RouterRecorder, reading
from traces.capture.residual_stream import ResidualStream, gate_input_after
from traces.capture.router_forecast import RouterForecaster
from traces.capture.settings import CaptureError
from traces.layout import ForecastKey

MadeForecasts = dict[ForecastKey, tuple[NDArray[np.int16], NDArray[np.float16]]]  # [N, m] each


class LiveRecorder(RouterRecorder):
    """A recorder whose records can be read during the pass."""

    def record(self, layer: int) -> LayerRecord:
        """The record of a layer whose experts have just been called."""
        return self._records[layer]


class PartialStates(ExitStack):
    """The next gate's input, from the experts on the GPU alone (see ``PartialPass``), until it is closed.

    The next layer's attention is run with the arguments of this layer's attention, so all layers must take the same.
    """

    def __init__(self, stream: ResidualStream) -> None:
        """Raises CaptureError for attention that differs by layer."""
        super().__init__()
        self._stream = stream
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        windows = {getattr(part.attention, "sliding_window", None) for part in stream.parts}
        if len(windows) > 1:
            raise CaptureError(
                f"forecast partial@1 expects the same attention in every layer, found sliding windows "
                f"{sorted(map(str, windows))}"
            )
        for number, part in enumerate(stream.parts):
            hook = partial(self._keep, number)
            self.enter_context(part.attention.register_forward_pre_hook(hook, with_kwargs=True))

    def gate_input(self, layer: int, on_gpu: Tensor) -> Tensor:
        """A guess [N, H] for ``layer`` + 1; ``on_gpu`` [N, H] is the sum of the layer's experts on the GPU."""
        stream = self._stream.after(layer, lambda _own, _hidden, _ids, _weights: on_gpu)
        return gate_input_after(self._stream.parts[layer + 1], stream, *self._calls[layer])

    def _keep(self, number: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls[number] = args, kwargs


class LiveForecasts:
    """Makes the forecasts that a policy needs; the run's trace contains them for all layers and phases."""

    def __init__(
        self, needs: Needs, forecaster: RouterForecaster, recorder: LiveRecorder, earlier: Sequence[LayerRecord],
        partial: PartialStates | None, top_k: int,
    ) -> None:
        self.keys = tuple(ForecastKey(*pair) for pair in needs.forecasts)
        self.count = forecaster.count
        self._needs, self._forecaster, self._recorder, self._top_k = needs, forecaster, recorder, top_k
        self._records, self._partial = list(earlier), partial

    def begin_pass(self, tokens: Tensor) -> None:
        """Begin a pass over ``tokens`` [B, S], on which some routers depend directly."""
        self._records = [reading(record, tokens) for record in self._records]

    def due(self, layer: int, late: bool, end: int | None = None) -> list[ForecastKey]:
        """The forecasts to make at ``layer``: from its gate input or, if ``late``, after its experts on the GPU.

        ``end``: none are made for layers from there on; default: for all.
        """
        end = len(self._records) if end is None else end
        return [key for key in self.keys if (key.kind in FROM_EXPERTS) == late and layer + key.lookahead < end]

    def make(self, key: ForecastKey, layer: int, on_gpu: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ids and scores [N, m], best first. ``on_gpu`` [N, H]: for late ones, the sum of the experts on the GPU."""
        self._records[layer] = self._recorder.record(layer)
        if on_gpu is not None:
            assert self._partial is not None
            guess = self._partial.gate_input(layer, on_gpu)
        else:
            guess = self._forecaster.guesses[key.kind](self._records, layer)
        if key.kind == "estimator":
            assert self._forecaster.estimator is not None
            best = self._forecaster.estimator(guess.float(), layer).softmax(-1).topk(self.count, dim=-1)
            return best.indices, best.values
        target = layer + key.lookahead
        return self._forecaster.rank(self._forecaster.layers[target], self._records[target], guess)

    def for_session(
        self, key: ForecastKey, layer: int, phase: Phase, ids: NDArray[np.int16], scores: NDArray[np.float16]
    ) -> list[Forecast]:
        """The forecast made at ``layer`` in the form for the session; empty if the policy does not use it there."""
        target, reached = layer + key.lookahead, self._needs.forecast_layers.get(key.kind)
        if phase not in self._needs.forecast_phases or (reached is not None and target not in reached):
            return []
        chosen = ids[:, : self._top_k]
        counts = np.bincount(chosen.ravel())
        active = np.flatnonzero(counts)
        rank = best_ranks(chosen[:, None], len(counts))[0]
        order = active[np.lexsort((active, rank[active], -counts[active]))]
        forecast = Forecast(target, key.kind, tuple(order.tolist()), tuple(counts[order].tolist()))
        if self._needs.tokens:
            forecast = forecast._replace(token_ids=ids.tolist(), token_scores=scores.tolist())
        return [forecast]
