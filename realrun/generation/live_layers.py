"""The routed experts of a model whose own forward pass runs in the calling thread, executed layer by layer.

The library's code calls us once per layer, with its router's choice. Everything between two calls counts as attention:
norms, attention, gate, shared and dense layers; spans and layers are divided at the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.mechanism.views import Forecast, LayerInput, Phase, Routing
from realrun.execution.executor import Executor
from realrun.execution.layer_state import RoutedInput
from realrun.execution.routed_tokens import rerouted
from realrun.generation.live_forecasts import LiveForecasts, LiveRecorder
from realrun.generation.model_routing import Scores, own_routing, scaled_by, weighed_like
from realrun.machine.cuda_memory import upload
from realrun.machine.lanes import Completion, OnItsLane, nothing
from realrun.machine.thread_lane import InlineLane
from traces.capture.record import LayerRecord, probabilities
from traces.layout import ForecastKey


class Delivery(NamedTuple):
    """Tensors on their way to the host: ``here`` once ``completion`` has ended; ``sent`` must live until then."""

    completion: Completion
    here: list[Tensor]
    sent: list[Tensor]


MadeForecasts = dict[ForecastKey, tuple[NDArray[np.int16], NDArray[np.float16]]]  # [N, m] each


@dataclass(frozen=True)
class RouterFacts:
    """Properties of a model's routers: see ``realrun.generation.hosted_model``."""

    rule: str  # of scores.RULES
    norm_topk: bool
    scales: Sequence[float]  # by layer


@dataclass(frozen=True)
class Between(OnItsLane):
    """The GPU's work between the end of one completion and the start of another: the model launches its own."""

    since: Completion
    until: Completion

    start_ns = ready_ns = property(lambda self: self.since.end_ns)
    end_ns = property(lambda self: self.until.start_ns)

    def wait(self) -> None:
        self.until.wait()

    def has_ended(self) -> bool:
        return self.until.has_ended()


class LiveLayers:
    """Called by the model with every layer's routing; see ``hf_experts.ExpertsCall``."""

    def __init__(
        self, executor: Executor, recorder: LiveRecorder, forecasts: LiveForecasts, facts: RouterFacts
    ) -> None:
        self._executor, self._router, self._forecasts, self._facts = executor, recorder, forecasts, facts
        self._machine, self._spans, self._session = executor.machine, executor.recorder, executor.session
        self._needs, self._layers = executor.session.policy.needs, len(recorder.layers)
        self._runs_ahead = not isinstance(self._machine.gpu, InlineLane)
        self._buffers: dict[str, Tensor] = {}
        self.made: list[MadeForecasts] = []  # of each layer of the step at work

    def begin_step(self, index: int, phase: Phase, sequences: Sequence[int], tokens: Tensor) -> None:
        """Begin a forward pass over ``tokens`` [B, S] of ``sequences``."""
        self._step, self._phase = index, phase
        self._forecasts.begin_pass(tokens)
        self._owners = tuple(np.repeat(sequences, tokens.shape[1]).tolist())
        self._tokens, self.made = len(self._owners), [{} for _ in range(self._layers)]
        self._executor.begin_step(index, phase)
        self._since: Completion = self._machine.gpu.submit(nothing)

    def __call__(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Execute one layer: hidden states [N, H] -> sum of its experts [N, H]."""
        commit = self._session.committed
        chosen = {} if commit else self._chosen(layer, ids, weights)
        ready = self._attended(layer, gated=commit is None)
        if layer and self._runs_ahead:
            self._executor.end_layer()  # of the layer before, while this one's attention runs
        early = self._speculate(layer, hidden.dtype, late=False)
        if commit is None:
            self._route(layer, hidden, weights, chosen, ready)
        else:
            self._execute(layer, hidden, commit.routing, ids.shape[1], weights.dtype, ready)
        if self._session.looks_ahead and layer < self._layers - 1:
            forecasts = self._collect(layer, early, alone=commit is not None)
            forecasts += self._collect(layer, self._speculate(layer, hidden.dtype, late=True), alone=True)
            self._executor.foresee(forecasts, ids.shape[1], weights.dtype, scaled_by(self._facts.scales[layer + 1]))
        kept: list[Tensor] = []
        self._since = self._executor.layers.combine(lambda parts: parts.sum(1).to(hidden.dtype), kept.append)
        if not self._runs_ahead:
            self._executor.end_layer()
        return kept[0]

    def end_pass(self, chosen: Tensor) -> Tensor:
        """End the step, for which the tokens ``chosen`` [B, 1] are on the GPU; returns them on the host."""
        ready = self._attended(-1, gated=False)
        if self._runs_ahead:
            self._executor.end_layer()
        delivery = self._bring({"chosen": chosen}, ready, -1)
        with self._executor.waiting(delivery.completion, -1):
            tokens = delivery.here[0].clone()
        self._executor.end_step()
        return tokens

    def records(self) -> list[LayerRecord]:
        """The records of the routers in the step that has ended."""
        return self._router.take()

    # --- the model's own work -----------------------------------------------------------------------------------------

    def _attended(self, layer: int, gated: bool) -> Completion:
        """Record the model's own work up to this call."""
        now = self._machine.gpu.submit(nothing)
        self._spans.add("gpu", Between(self._since, now), "attention", layer, -1, self._tokens)
        if gated:
            self._spans.add("gpu", now, "gate", layer, -1, self._tokens)
        return now

    # --- routing ----------------------------------------------------------------------------------------------------

    def _chosen(self, layer: int, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """The choice of the layer's own router, on the GPU."""
        if not self._needs.scores:
            return {"ids": ids, "weights": weights}
        scores = probabilities(self._router.record(layer).logits, self._facts.rule).half()
        return {"ids": ids, "weights": weights, "scores": scores}

    def _route(self, layer: int, hidden: Tensor, weights: Tensor, chosen: dict[str, Tensor], ready: Completion) -> None:
        """Execute a layer with the choice of its own router."""
        delivery = self._bring(chosen, ready, layer)
        with self._executor.waiting(delivery.completion, layer):
            ids, shares, *scores = delivery.here
            own = own_routing(ids, shares, scores[0] if scores else None, self._needs)
        inputs = RoutedInput(lambda: hidden, weights.reshape(-1), ready)
        weigh = weighed_like(own, self._facts.norm_topk)
        self._executor.route(self._input(layer, own.routing, own.scores), own.tokens, inputs, weigh=weigh)

    def _execute(
        self, layer: int, hidden: Tensor, routing: Routing, top_k: int, dtype: torch.dtype, ready: Completion
    ) -> None:
        """Execute a layer with routing that was committed earlier, in place of its router's."""
        tokens = rerouted(scaled_by(self._facts.scales[layer])(routing), top_k, dtype)
        inputs = RoutedInput(lambda: hidden, upload(tokens.weights, self._machine.device), ready)
        self._executor.route(self._input(layer, routing, None), tokens, inputs)

    def _input(self, layer: int, routing: Routing, scores: Scores) -> LayerInput:
        return LayerInput(self._step, layer, self._phase, routing, scores, self._owners)

    # --- forecasts --------------------------------------------------------------------------------------------------

    def _speculate(self, layer: int, dtype: torch.dtype, late: bool) -> dict[ForecastKey, Delivery]:
        """Make the forecasts that are due, and send them to the host; ``late``: those from experts that have run."""
        return {key: self._make(key, layer, dtype if late else None) for key in self._forecasts.due(layer, late)}

    def _make(self, key: ForecastKey, layer: int, partial: torch.dtype | None) -> Delivery:
        made: dict[str, Tensor] = {}

        def speculate() -> None:
            here = None if partial is None else self._executor.layers.so_far().sum(1).to(partial)
            ids, scores = self._forecasts.make(key, layer, here)
            made.update({key.ids_name: ids.to(torch.int16), key.scores_name: scores.half()})

        target = layer + key.lookahead
        completion = self._machine.gpu.submit(speculate)
        self._spans.add("gpu", completion, "speculate", layer, -1, self._tokens, target_layer=target)
        return self._bring(made, completion, layer, target)

    def _collect(self, layer: int, made: dict[ForecastKey, Delivery], alone: bool) -> list[Forecast]:
        """Keep forecasts for the trace, and return those for the session. ``alone``: they do not arrive together with
        the layer's routing, so that the host waits for them."""
        forecasts: list[Forecast] = []
        for key, delivery in made.items():
            with self._executor.waiting(delivery.completion, layer, layer + key.lookahead) if alone else nullcontext():
                delivery.completion.wait()
                ids, scores = (tensor.numpy().copy() for tensor in delivery.here)
            self.made[layer][key] = ids, scores
            forecasts += self._forecasts.for_session(key, layer, self._phase, ids, scores)
        return forecasts

    def _bring(self, tensors: dict[str, Tensor], ready: Completion, layer: int, target_layer: int = -1) -> Delivery:
        """Send ``tensors`` [N, ...] to the host, where they stay until the next ones of the same name."""
        sent = list(tensors.values())
        here = [self._buffer(name, tensor)[: len(tensor)] for name, tensor in tensors.items()]

        def bring() -> None:
            for target, tensor in zip(here, sent, strict=True):
                target.copy_(tensor, non_blocking=True)

        completion, size = self._machine.d2h.submit(bring, (ready,)), sum(tensor.nbytes for tensor in here)
        self._spans.add("d2h", completion, "routing", layer, -1, self._tokens, size, target_layer)
        return Delivery(completion, here, sent)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Host memory for tensors of that name; the first ones, from the prompt, are the longest."""
        if name not in self._buffers:
            self._buffers[name] = self._machine.host_tensor(tuple(like.shape), like.dtype)
        return self._buffers[name]
