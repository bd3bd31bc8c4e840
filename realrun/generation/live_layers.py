"""The routed experts of a model whose own forward pass runs in the calling thread, executed layer by layer.

The library's code calls us once per layer, with its router's choice. Everything between two calls counts as attention:
norms, attention, gate, shared and dense layers; spans and layers are divided at the calls.

On several GPUs each has a block of layers with an executor of its own (``live_cards``); layers of a block are numbered
from 0 here, as its session numbers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from policies.mechanism.views import Forecast, LayerInput, Phase, Routing
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import RoutedInput
from realrun.execution.routed_tokens import Scores, own_routing, rerouted, scaled_by, weighed_like
from realrun.generation.live_forecasts import LiveForecasts, LiveRecorder, MadeForecasts
from realrun.machine.cuda_memory import upload
from realrun.machine.lanes import Completion, OnItsLane, nothing
from realrun.machine.thread_lane import InlineLane
from sim.runs.cards import LayerBlock
from traces.capture.record import probabilities
from traces.layout import ForecastKey


class Delivery(NamedTuple):
    """Tensors on their way to the host: in ``on_host`` once ``completion`` has ended; ``sent`` must live until then."""

    completion: Completion
    on_host: list[Tensor]
    sent: list[Tensor]


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
    """The layers of one GPU. ``block``: their places in the model."""

    def __init__(
        self, executor: Executor, recorder: LiveRecorder, forecasts: LiveForecasts, facts: RouterFacts,
        block: LayerBlock,
    ) -> None:
        self.executor, self.block = executor, block
        self._router, self._forecasts, self._facts = recorder, forecasts, facts
        self._machine, self._spans, self._session = executor.machine, executor.recorder, executor.session
        self._needs = executor.session.policy.needs
        self._runs_ahead = not isinstance(self._machine.gpu, InlineLane)
        self._buffers: dict[str, Tensor] = {}
        self._unended: Executor | None = None  # of the layer before, which ends while this one's attention runs
        self._since: Completion  # of what the model's own work follows
        self.tokens = 0  # of the step
        self.made: list[MadeForecasts] = []  # of each layer of the step at work

    def begin_step(self, index: int, phase: Phase, sequences: Sequence[int], length: int) -> None:
        """Begin a forward pass over ``length`` tokens of each of ``sequences``."""
        self._step, self._phase = index, phase
        self._owners = tuple(np.repeat(sequences, length).tolist())
        self.tokens, self.made = len(self._owners), [{} for _ in range(self.block.layers)]
        self.executor.begin_step(index, phase)

    def enter(self, after: Sequence[Completion] = (), unended: Executor | None = None) -> None:
        """The model's work goes on here, on hidden states that are there when ``after`` have ended."""
        self._since, self._unended = self._machine.gpu.submit(nothing, after), unended

    def leave(self) -> tuple[Completion, Executor | None]:
        """The model's work goes on elsewhere: when what it launched here ends, and whose last layer has not ended."""
        unended, self._unended = self._unended, None
        return self._machine.gpu.submit(nothing), unended

    def play(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Execute one layer: hidden states [N, H] -> sum of its experts [N, H]."""
        commit = self._session.committed
        chosen = {} if commit else self._chosen(layer, ids, weights)
        ready = self._attended(layer, gated=commit is None)
        self._end_layer()
        early = self._speculate(layer, hidden.dtype, late=False)
        if commit is None:
            self._route(layer, hidden, weights, chosen, ready)
        else:
            self._execute(layer, hidden, commit.routing, ids.shape[1], weights.dtype, ready)
        if self._session.looks_ahead and layer < self.block.layers - 1:
            forecasts = self._collect(layer, early, alone=commit is not None)
            forecasts += self._collect(layer, self._speculate(layer, hidden.dtype, late=True), alone=True)
            weigh = scaled_by(self._facts.scales[self._place(layer) + 1])
            self.executor.foresee(forecasts, ids.shape[1], weights.dtype, weigh)
        kept: list[Tensor] = []
        self._since = self.executor.layers.combine(lambda parts: parts.sum(1).to(hidden.dtype), kept.append)
        self._unended = self.executor
        if not self._runs_ahead:
            self._end_layer()
        return kept[0]

    def bring_chosen(self, chosen: Tensor) -> Tensor:
        """The tokens ``chosen`` [B, 1], which are on this GPU after the model's last work, on the host."""
        ready = self._attended(-1, gated=False)
        self._end_layer()
        delivery = self._bring({"chosen": chosen}, ready, -1)
        with self.executor.waiting(delivery.completion, -1):
            return delivery.on_host[0].clone()

    def _end_layer(self) -> None:
        """End the layer before, on whichever GPU it is."""
        if self._unended is not None:
            self._unended.end_layer()
            self._unended = None

    def _place(self, layer: int) -> int:
        """The place of a layer in the model."""
        return self.block.first + layer

    # --- the model's own work -----------------------------------------------------------------------------------------

    def _attended(self, layer: int, gated: bool) -> Completion:
        """Record the model's own work up to this call."""
        now = self._machine.gpu.submit(nothing)
        self._spans.add("gpu", Between(self._since, now), "attention", layer, -1, self.tokens)
        if gated:
            self._spans.add("gpu", now, "gate", layer, -1, self.tokens)
        return now

    # --- routing ----------------------------------------------------------------------------------------------------

    def _chosen(self, layer: int, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """The choice of the layer's own router, on the GPU."""
        if not self._needs.scores:
            return {"ids": ids, "weights": weights}
        scores = probabilities(self._router.record(self._place(layer)).logits, self._facts.rule).half()
        return {"ids": ids, "weights": weights, "scores": scores}

    def _route(self, layer: int, hidden: Tensor, weights: Tensor, chosen: dict[str, Tensor], ready: Completion) -> None:
        """Execute a layer with the choice of its own router."""
        delivery = self._bring(chosen, ready, layer)
        with self.executor.waiting(delivery.completion, layer):
            ids, shares, *scores = delivery.on_host
            own = own_routing(ids, shares, scores[0] if scores else None, self._needs)
        inputs = RoutedInput(lambda: hidden, weights.reshape(-1), ready)
        weigh = weighed_like(own, self._facts.norm_topk)
        self.executor.route(self._input(layer, own.routing, own.scores), own.tokens, inputs, weigh=weigh)

    def _execute(
        self, layer: int, hidden: Tensor, routing: Routing, top_k: int, dtype: torch.dtype, ready: Completion
    ) -> None:
        """Execute a layer with routing that was committed earlier, in place of its router's."""
        tokens = rerouted(scaled_by(self._facts.scales[self._place(layer)])(routing), top_k, dtype)
        inputs = RoutedInput(lambda: hidden, upload(tokens.weights, self._machine.device), ready)
        self.executor.route(self._input(layer, routing, None), tokens, inputs)

    def _input(self, layer: int, routing: Routing, scores: Scores) -> LayerInput:
        return LayerInput(self._step, layer, self._phase, routing, scores, self._owners)

    # --- forecasts --------------------------------------------------------------------------------------------------

    def _speculate(self, layer: int, dtype: torch.dtype, late: bool) -> dict[ForecastKey, Delivery]:
        """Make the forecasts that are due, and send them to the host; ``late``: those from experts that have run."""
        due = self._forecasts.due(self._place(layer), late, self.block.end)
        return {key: self._make(key, layer, dtype if late else None) for key in due}

    def _make(self, key: ForecastKey, layer: int, partial: torch.dtype | None) -> Delivery:
        made: dict[str, Tensor] = {}

        def speculate() -> None:
            on_gpu = None if partial is None else self.executor.layers.so_far().sum(1).to(partial)
            ids, scores = self._forecasts.make(key, self._place(layer), on_gpu)
            made.update({key.ids_name: ids.to(torch.int16), key.scores_name: scores.half()})

        target = layer + key.lookahead
        completion = self._machine.gpu.submit(speculate)
        self._spans.add("gpu", completion, "speculate", layer, -1, self.tokens, target_layer=target)
        return self._bring(made, completion, layer, target)

    def _collect(self, layer: int, made: dict[ForecastKey, Delivery], alone: bool) -> list[Forecast]:
        """Keep forecasts for the trace, and return those for the session. ``alone``: they do not arrive together with
        the layer's routing, so that the host waits for them."""
        forecasts: list[Forecast] = []
        for key, delivery in made.items():
            with self.executor.waiting(delivery.completion, layer, layer + key.lookahead) if alone else nullcontext():
                delivery.completion.wait()
                ids, scores = (tensor.numpy().copy() for tensor in delivery.on_host)
            self.made[layer][key] = ids, scores
            known = self._forecasts.for_session(key, self._place(layer), self._phase, ids, scores)
            forecasts += [forecast._replace(layer=forecast.layer - self.block.first) for forecast in known]
        return forecasts

    def _bring(self, tensors: dict[str, Tensor], ready: Completion, layer: int, target_layer: int = -1) -> Delivery:
        """Send ``tensors`` [N, ...] to the host, where they stay until the next ones of the same name."""
        sent = list(tensors.values())
        on_host = [self._buffer(name, tensor)[: len(tensor)] for name, tensor in tensors.items()]

        def bring() -> None:
            for target, tensor in zip(on_host, sent, strict=True):
                target.copy_(tensor, non_blocking=True)

        completion, size = self._machine.d2h.submit(bring, (ready,)), sum(tensor.nbytes for tensor in on_host)
        self._spans.add("d2h", completion, "routing", layer, -1, self.tokens, size, target_layer)
        return Delivery(completion, on_host, sent)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Host memory for tensors of that name; the first ones, from the prompt, are the longest."""
        if name not in self._buffers:
            self._buffers[name] = self._machine.host_tensor(tuple(like.shape), like.dtype)
        return self._buffers[name]
