"""The layers of one GPU in a replay: kernels of a model's shapes, with the routing of a trace.

Twin of ``sim.timeline.timeline``; the steps of all GPUs are in ``cards``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.mechanism.score_rows import ScoreRows
from policies.mechanism.views import Forecast, LayerInput
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import RoutedInput
from realrun.execution.routed_tokens import routed
from realrun.machine.lanes import Completion, Work
from realrun.replay.model import ReplayModel
from realrun.replay.step_routing import StepRouting
from sim.costs.roofline_costs import ROUTING_BYTES
from sim.runs.cards import LayerBlock
from sim.runs.demand import StepDemand
from sim.runs.vocabulary import FROM_EXPERTS, FROM_GATE_INPUT


class PendingIds:
    """Ids [N, k] on the GPU from a gate, a forecast or the head, valid when ``completion`` has ended."""

    ids: Tensor
    completion: Completion


@dataclass
class Launched:
    """A layer's work outside its routed experts, filled in while it runs on the GPU."""

    layer: int
    residual: Tensor | None = None  # [N, H]
    normed: Tensor | None = None
    shared: Tensor | None = None
    ready: Completion | None = None  # of the hidden states
    gated: PendingIds | None = None  # None: the routing was committed before
    forecast: PendingIds | None = None

    def hidden(self) -> Tensor:
        """The experts' input, which is valid when ``ready`` has ended."""
        assert self.normed is not None
        return self.normed


class ReplayedLayers:
    """Plays the layers of one GPU. ``block``: their places in the model; here they are numbered from 0."""

    def __init__(self, executor: Executor, model: ReplayModel, block: LayerBlock, max_tokens: int) -> None:
        self.executor, self.model, self.block = executor, model, block
        self.machine, self.recorder = executor.machine, executor.recorder
        self._top_k = model.shape.top_k
        self._hidden: Tensor | None = None  # [N, H], output of the layer before
        self._here = self.machine.host_tensor((max_tokens * self._top_k,), torch.int64)  # ids on the host
        self.summed: Completion  # of the layer that was played last

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self._demand.tokens

    def hidden(self) -> Tensor:
        """Hidden states [N, H]: the output of the layer that was played last, valid when ``summed`` has ended."""
        assert self._hidden is not None
        return self._hidden

    def enter(self, hidden: Tensor) -> None:
        """Take over the hidden states of another GPU."""
        self._hidden = hidden

    def begin_step(self, demand: StepDemand, routing: StepRouting) -> None:
        """Begin a forward pass. ``routing``: of all layers of the model."""
        self._demand, self._routing = demand, routing
        self.executor.begin_step(demand.index, demand.phase)

    def play(self, launched: Launched) -> None:
        """Play one layer, from its routing to the launch of its sum."""
        executor, layer, demand, place = self.executor, launched.layer, self._demand, self.block.first + launched.layer
        with nullcontext() if launched.gated is None else self._reading(launched.gated, layer):
            given = self._input(layer)
            tokens = routed(self._routing.ids[:, place], self._routing.weights[:, place])
        weights = self._routing.on_gpu[:, place].reshape(-1)
        assert launched.ready is not None
        inputs = RoutedInput(launched.hidden, weights, launched.ready)
        executor.route(given, tokens, inputs)
        if executor.session.looks_ahead and layer < self.block.layers - 1:
            self._foresee(launched, demand.forecasts[layer])
        self.summed = executor.layers.combine(lambda parts: self._add_up(launched, parts), self.enter)

    def play_head(self) -> None:
        """Play what comes after the last layer."""
        chosen = self._launch_head()
        self.executor.end_layer()
        with self._reading(chosen, -1, tokens=max(self._demand.generated - 1, 0)):
            pass

    def _input(self, layer: int) -> LayerInput:
        demand = self._demand
        scores = None if demand.scores is None else ScoreRows(demand.scores[:, layer])
        return LayerInput(demand.index, layer, demand.phase, demand.routings[layer], scores, demand.sequences)

    def _foresee(self, launched: Launched, forecasts: Sequence[Forecast]) -> None:
        """Pass forecasts on once on the host, as on the timeline: one without the layer's routing is a wait."""
        layer, late = launched.layer, self._speculate_late(launched, forecasts)
        pending = late or launched.forecast
        if pending is not None and (late is not None or launched.gated is None):
            with self._reading(pending, layer, layer + 1):
                pass
        elif pending is not None:
            self._bring(pending, layer, layer + 1).wait()
        self.executor.foresee(forecasts, self._top_k, self._routing.weights.dtype)

    # --- work of the GPU ------------------------------------------------------------------------------------------

    def launch(self, layer: int, after: Sequence[Completion] = ()) -> Launched:
        """Launch attention, gate, forecasts and shared experts of a layer, which begin ``after`` others."""
        launched, model, began_ns = Launched(layer), self.model, self.machine.now_ns()
        place = self.block.first + layer

        def attention() -> None:
            if place == 0:
                self._hidden = model.dense(model.embed())
            launched.residual, launched.normed = model.attention(place, self.hidden())

        def shared() -> None:
            launched.shared = model.shared(place, launched.hidden())

        launched.ready = self._submit(attention, "attention", layer, after=after)
        if self.executor.session.committed is None:
            launched.gated = self._choose(lambda: model.gate(place, launched.hidden())[0], "gate", layer)
            launched.ready = launched.gated.completion
        for forecast in self._demand.forecasts[layer]:
            if forecast.kind in FROM_GATE_INPUT:
                launched.forecast = self._speculate(launched, forecast)
        if model.shape.shared_width:
            self._submit(shared, "shared", layer)
        self.executor.record("launch", began_ns, layer)
        return launched

    def _speculate(self, launched: Launched, forecast: Forecast) -> PendingIds:
        """Launch the kernels of one forecast, whose content comes from the trace."""
        model, layer, place = self.model, launched.layer, self.block.first + launched.layer

        def speculate() -> Tensor:
            hidden = launched.hidden()
            learnt = forecast.kind == "estimator"
            return model.estimate(place, hidden) if learnt else model.speculate(place, hidden)[0]

        return self._choose(speculate, "speculate", layer, forecast.layer)

    def _speculate_late(self, launched: Launched, forecasts: Sequence[Forecast]) -> PendingIds | None:
        """Launch forecasts from a partial forward pass: the next attention and gate, after the experts on the GPU."""
        model, layer, pending, following = self.model, launched.layer, None, self.block.first + launched.layer + 1
        for forecast in forecasts:
            if forecast.kind in FROM_EXPERTS:
                began_ns = self.machine.now_ns()

                def speculate() -> Tensor:
                    _, normed = model.attention(following, launched.hidden())
                    return model.gate(following, normed)[0]

                pending = self._choose(speculate, "speculate", layer, forecast.layer)
                self.executor.record("launch", began_ns, layer)
        return pending

    def _launch_head(self) -> PendingIds:
        """Launch the language-model head."""
        began_ns = self.machine.now_ns()

        def head() -> Tensor:
            return self.model.head(self.hidden(), every=bool(self._demand.drafted)).unsqueeze(-1)

        pending = self._choose(head, "attention", -1)
        self.executor.record("launch", began_ns, -1)
        return pending

    def _add_up(self, launched: Launched, parts: Tensor) -> Tensor:
        assert launched.residual is not None
        return self.model.combine(parts.flatten(0, 1), self._top_k, launched.shared, launched.residual)

    def _submit(
        self, work: Work, kind: str, layer: int, target_layer: int = -1, after: Sequence[Completion] = ()
    ) -> Completion:
        completion = self.machine.gpu.submit(work, after)
        self.recorder.add("gpu", completion, kind, layer, -1, self._demand.tokens, target_layer=target_layer)
        return completion

    def _choose(self, choose: Callable[[], Tensor], kind: str, layer: int, target_layer: int = -1) -> PendingIds:
        pending = PendingIds()

        def work() -> None:
            pending.ids = choose()

        pending.completion = self._submit(work, kind, layer, target_layer)
        return pending

    def _reading(
        self, pending: PendingIds, layer: int, target_layer: int = -1, tokens: int = 0
    ) -> AbstractContextManager[None]:
        """Wait for ids, which are in ``_here`` in the block."""
        return self.executor.waiting(self._bring(pending, layer, target_layer), layer, target_layer, tokens)

    def _bring(self, pending: PendingIds, layer: int, target_layer: int = -1) -> Completion:
        """Copy ids to the host, for the time it takes: the values are known from the trace.

        The caller keeps ``pending`` until the completion has ended.
        """

        def bring() -> None:
            self._here[: pending.ids.numel()].view_as(pending.ids).copy_(pending.ids, non_blocking=True)

        demand, completion = self._demand, self.machine.d2h.submit(bring, (pending.completion,))
        tokens = demand.tokens if demand.generated or layer >= 0 else 0
        size = tokens * (self._top_k * ROUTING_BYTES if layer >= 0 else 4)
        self.recorder.add("d2h", completion, "routing", layer, -1, tokens, size, target_layer)
        return completion
