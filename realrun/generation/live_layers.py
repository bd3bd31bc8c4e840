"""The routed experts of a model whose own forward pass runs in the calling thread, executed layer by layer.

The library's code calls us once per layer, with its router's choice. Everything between two calls counts as attention:
norms, attention, gate, shared and dense layers; spans and layers are divided at the calls.

Forecasts of later layers are made at each layer during the pass that they are about. The kinds, their meaning and their
networks are those of ``traces.capture.router_forecast``. Routers of later layers get the same additional arguments as
in an earlier pass; a model for which these differ is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policies.mechanism.views import Forecast, LayerInput, Phase, Routing
from policies.protocols import Needs
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import RoutedInput
from realrun.execution.routed_tokens import Scores, own_routing, rerouted, scaled_by, weighed_like
from realrun.machine.cuda_memory import upload
from realrun.machine.lanes import Completion, OnItsLane, nothing
from realrun.machine.thread_lane import InlineLane
from sim.runs.vocabulary import FROM_EXPERTS
from traces.batches import best_ranks
from traces.capture.record import LayerRecord, RouterRecorder, probabilities, reading
from traces.capture.residual_stream import ResidualStream, gate_input_after
from traces.capture.router_forecast import RouterForecaster
from traces.capture.settings import CaptureError
from traces.layout import ForecastKey


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

    def due(self, layer: int, late: bool) -> list[ForecastKey]:
        """The forecasts to make at ``layer``: from its gate input or, if ``late``, after its experts on the GPU."""
        return [
            key for key in self.keys
            if (key.kind in FROM_EXPERTS) == late and layer + key.lookahead < len(self._records)
        ]

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


class Delivery(NamedTuple):
    """Tensors on their way to the host: in ``on_host`` once ``completion`` has ended; ``sent`` must live until then."""

    completion: Completion
    on_host: list[Tensor]
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
    """Called by the model with every layer's routing; see ``hosted_model.ExpertsCall``."""

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
            tokens = delivery.on_host[0].clone()
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
            ids, shares, *scores = delivery.on_host
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
            on_gpu = None if partial is None else self._executor.layers.so_far().sum(1).to(partial)
            ids, scores = self._forecasts.make(key, layer, on_gpu)
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
                ids, scores = (tensor.numpy().copy() for tensor in delivery.on_host)
            self.made[layer][key] = ids, scores
            forecasts += self._forecasts.for_session(key, layer, self._phase, ids, scores)
        return forecasts

    def _bring(self, tensors: dict[str, Tensor], ready: Completion, layer: int, target_layer: int = -1) -> Delivery:
        """Send ``tensors`` [N, ...] to the host, where they stay until the next ones of the same name."""
        sent = list(tensors.values())
        on_host = [self._buffer(name, tensor)[: len(tensor)] for name, tensor in tensors.items()]

        def bring() -> None:
            for target, tensor in zip(on_host, sent, strict=True):
                target.copy_(tensor, non_blocking=True)

        completion, size = self._machine.d2h.submit(bring, (ready,)), sum(tensor.nbytes for tensor in on_host)
        self._spans.add("d2h", completion, "routing", layer, -1, self._tokens, size, target_layer)
        return Delivery(completion, on_host, sent)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Host memory for tensors of that name; the first ones, from the prompt, are the longest."""
        if name not in self._buffers:
            self._buffers[name] = self._machine.host_tensor(tuple(like.shape), like.dtype)
        return self._buffers[name]
