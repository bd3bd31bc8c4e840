"""The replay of a trace's routing on real kernels of a model's shapes, and scenarios measured by it.

Weights are random: no checkpoint is needed. ``measure`` is the counterpart of ``sim.simulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from policies.mechanism.score_rows import ScoreRows
from policies.mechanism.views import Forecast, LayerInput
from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import LayerSizes, RoutedInput
from realrun.execution.routed_tokens import routed
from realrun.experts.expert_file import ExpertFile, HeldExperts
from realrun.experts.ffn import ExpertShape
from realrun.experts.file_of_run import file_for, held_experts, host_bytes_of_run
from realrun.experts.store import GpuSlots, random_slabs, random_store, slots_needed
from realrun.machine import LaneKind
from realrun.machine.host_memory import check_host_memory
from realrun.machine.lanes import Completion, Machine, Work
from realrun.machine.machines import LaneOptions, RealMachine, check_asked, machine_for, machine_of
from realrun.machine.pinned import plain
from realrun.replay.model import RecordedModel, ReplayModel, model_on
from realrun.replay.step_routing import StepRouting, step_routings
from sim.costs.roofline_costs import ROUTING_BYTES
from sim.machine.hardware import Hardware
from sim.runs.demand import StepDemand
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.vocabulary import FROM_EXPERTS, FROM_GATE_INPUT
from traces.batches import StepRows
from traces.models.shape import ModelShape


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


class Replay:
    """Plays a run step by step."""

    def __init__(self, executor: Executor, model: ReplayModel, max_tokens: int) -> None:
        self._executor, self._model = executor, model
        self._machine, self._recorder = executor.machine, executor.recorder
        self._layers, self._top_k = model.shape.moe_layers, model.shape.top_k
        self._hidden: Tensor | None = None  # [N, H], output of the layer before
        self._here = self._machine.host_tensor((max_tokens * self._top_k,), torch.int64)  # ids on the host

    def step(self, demand: StepDemand, rows: StepRows, routing: StepRouting) -> None:
        """Play one forward pass."""
        executor, self._demand, self._routing = self._executor, demand, routing
        executor.begin_step(demand.index, demand.phase)
        self._machine.gpu.submit(lambda: self._model.begin_step(rows.tokens, rows.context))
        launched = self._launch(0)
        for layer in range(self._layers):
            self._play(launched)
            if layer + 1 < self._layers:
                launched = self._launch(layer + 1)
        chosen = self._launch_head()
        executor.end_layer()
        with self._reading(chosen, -1, tokens=max(demand.generated - 1, 0)):
            pass
        executor.end_step()

    def _play(self, launched: Launched) -> None:
        """Play one layer, from its routing to the launch of its sum."""
        executor, layer, demand = self._executor, launched.layer, self._demand
        if layer:
            executor.end_layer()  # of the layer before, while this one's attention runs
        with nullcontext() if launched.gated is None else self._reading(launched.gated, layer):
            given = self._input(layer)
            tokens = routed(self._routing.ids[:, layer], self._routing.weights[:, layer])
        weights = self._routing.on_gpu[:, layer].reshape(-1)
        assert launched.ready is not None
        inputs = RoutedInput(launched.hidden, weights, launched.ready)
        executor.route(given, tokens, inputs)
        if executor.session.looks_ahead and layer < self._layers - 1:
            self._foresee(launched, demand.forecasts[layer])
        executor.layers.combine(lambda parts: self._add_up(launched, parts), self._keep)

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
        self._executor.foresee(forecasts, self._top_k, self._routing.weights.dtype)

    # --- work of the GPU ------------------------------------------------------------------------------------------

    def _launch(self, layer: int) -> Launched:
        """Launch attention, gate, forecasts and shared experts of a layer."""
        launched, model, began_ns = Launched(layer), self._model, self._machine.now_ns()

        def attention() -> None:
            if layer == 0:
                self._hidden = model.dense(model.embed())
            assert self._hidden is not None
            launched.residual, launched.normed = model.attention(layer, self._hidden)

        def shared() -> None:
            launched.shared = model.shared(layer, launched.hidden())

        launched.ready = self._submit(attention, "attention", layer)
        if self._executor.session.committed is None:
            launched.gated = self._choose(lambda: model.gate(layer, launched.hidden())[0], "gate", layer)
            launched.ready = launched.gated.completion
        for forecast in self._demand.forecasts[layer]:
            if forecast.kind in FROM_GATE_INPUT:
                launched.forecast = self._speculate(launched, forecast)
        if model.shape.shared_width:
            self._submit(shared, "shared", layer)
        self._executor.record("launch", began_ns, layer)
        return launched

    def _speculate(self, launched: Launched, forecast: Forecast) -> PendingIds:
        """Launch the kernels of one forecast, whose content comes from the trace."""
        model, layer = self._model, launched.layer

        def speculate() -> Tensor:
            hidden = launched.hidden()
            learnt = forecast.kind == "estimator"
            return model.estimate(layer, hidden) if learnt else model.speculate(layer, hidden)[0]

        return self._choose(speculate, "speculate", layer, forecast.layer)

    def _speculate_late(self, launched: Launched, forecasts: Sequence[Forecast]) -> PendingIds | None:
        """Launch forecasts from a partial forward pass: the next attention and gate, after the experts on the GPU."""
        model, layer, pending = self._model, launched.layer, None
        for forecast in forecasts:
            if forecast.kind in FROM_EXPERTS:
                began_ns = self._machine.now_ns()

                def speculate() -> Tensor:
                    _, normed = model.attention(layer + 1, launched.hidden())
                    return model.gate(layer + 1, normed)[0]

                pending = self._choose(speculate, "speculate", layer, forecast.layer)
                self._executor.record("launch", began_ns, layer)
        return pending

    def _launch_head(self) -> PendingIds:
        """Launch the language-model head."""
        began_ns = self._machine.now_ns()

        def head() -> Tensor:
            assert self._hidden is not None
            return self._model.head(self._hidden, every=bool(self._demand.drafted)).unsqueeze(-1)

        pending = self._choose(head, "attention", -1)
        self._executor.record("launch", began_ns, -1)
        return pending

    def _add_up(self, launched: Launched, parts: Tensor) -> Tensor:
        assert launched.residual is not None
        return self._model.combine(parts.flatten(0, 1), self._top_k, launched.shared, launched.residual)

    def _keep(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def _submit(self, work: Work, kind: str, layer: int, target_layer: int = -1) -> Completion:
        completion = self._machine.gpu.submit(work)
        self._recorder.add("gpu", completion, kind, layer, -1, self._demand.tokens, target_layer=target_layer)
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
        return self._executor.waiting(self._bring(pending, layer, target_layer), layer, target_layer, tokens)

    def _bring(self, pending: PendingIds, layer: int, target_layer: int = -1) -> Completion:
        """Copy ids to the host, for the time it takes: the values are known from the trace.

        The caller keeps ``pending`` until the completion has ended.
        """

        def bring() -> None:
            self._here[: pending.ids.numel()].view_as(pending.ids).copy_(pending.ids, non_blocking=True)

        demand, completion = self._demand, self._machine.d2h.submit(bring, (pending.completion,))
        tokens = demand.tokens if demand.generated or layer >= 0 else 0
        size = tokens * (self._top_k * ROUTING_BYTES if layer >= 0 else 4)
        self._recorder.add("d2h", completion, "routing", layer, -1, tokens, size, target_layer)
        return completion


WEIGHTS_DTYPE = torch.float32  # of routing weights, and therefore of sums over experts


class Measurement(NamedTuple):
    """A measured run, and the session with the log of its calls."""

    run: Run
    session: LoggedSession


class ReplayRoom(NamedTuple):
    """The largest sizes of the runs that a bench is made for."""

    batch: int
    context: int  # prompt and generated tokens of a sequence
    step_tokens: int  # of the whole batch
    slots: int  # on the GPU, staging included
    host_bytes: int | None = None  # of the host's memory for experts, where a disk holds them


class ReplayBench:
    """Experts and kernels of one model with random weights on one machine, for any number of runs up to ``room``."""

    def __init__(
        self, machine: Machine, shape: ModelShape, room: ReplayRoom, file: ExpertFile | None = None
    ) -> None:
        """``file``: of experts, for runs whose host holds a part of them; then memory need not hold the others.

        Raises RefusedError if there are no kernels for the weights, or too little memory.
        """
        dtype, self.layout, kernel = ExpertShape.of(shape)
        count = shape.moe_layers * shape.experts
        on_host = machine.device.type == "cpu"
        held_bytes = self.layout.size_bytes * count if room.host_bytes is None else room.host_bytes
        check_host_memory(held_bytes + self.layout.size_bytes * (room.slots if on_host else 0))
        self.machine, self.room, self.file = machine, room, file
        if file is None:
            self.store = random_store(self.layout, shape.moe_layers, shape.experts, self._allocate)
        self.model = model_on(machine, shape, dtype=dtype, batch=room.batch, context=room.context, estimator=True)
        self.kernels = [kernel] * shape.moe_layers
        self._sizes = LayerSizes(room.step_tokens, shape.top_k, shape.hidden, dtype, WEIGHTS_DTYPE)
        self._arena = machine.gpu_tensor((room.slots, self.layout.size_bytes), torch.uint8)

    def measure(self, prepared: Prepared) -> Measurement:
        """Run a prepared scenario; repeat it if graphs were recorded during the run."""
        recorded = self._recorded()
        measurement = self._run(prepared)
        return measurement if self._recorded() == recorded else self._run(prepared)

    def _run(self, prepared: Prepared) -> Measurement:
        session = prepared.session_of(LoggedSession)
        executor = self._executor(prepared, session)
        routings = step_routings(prepared.trace, prepared.steps, self.machine.device)
        replay = Replay(executor, self.model, self.room.step_tokens)
        with executor.running():
            for demand, rows, routing in zip(prepared.demand, prepared.steps, routings, strict=True):
                replay.step(demand, rows, routing)
        errors, label = session.routing_errors(prepared.demand), f"measured on {self.machine.kind}"
        return Measurement(Run.of(prepared, executor.recorder.rows, errors, label), session)

    def _recorded(self) -> int:
        """The number of recorded graphs."""
        return self.model.graphs.recorded if isinstance(self.model, RecordedModel) else 0

    def _executor(self, prepared: Prepared, session: LoggedSession) -> Executor:
        policy, room, slots = prepared.composition, self.room, slots_needed(prepared)
        if slots > room.slots:
            raise RefusedError(f"replay: expected at most {room.slots} slots on the GPU, the run needs {slots}")
        arena = GpuSlots(self._arena[:slots], policy.demand_slots, policy.prefetch_slots)
        store = self.store if session.host is None else self._held_experts(prepared)
        return Executor(session, self.machine, store, arena, self.kernels, self._sizes)

    def _held_experts(self, prepared: Prepared) -> HeldExperts:
        """Memory for a part of the experts, which are in the bench's file."""
        assert self.file is not None
        return held_experts(self.file, prepared, self._allocate)

    def _allocate(self, size: int) -> Tensor:
        return self.machine.host_tensor((size,), torch.uint8)


def room_for(prepared: Sequence[Prepared]) -> ReplayRoom:
    """The room for all of these runs. Raises RefusedError for sampled steps or prompts, and drafts that take time."""
    if any(run.scenario.sampled for run in prepared):
        raise RefusedError(
            "replay: a real machine plays every step and every prompt token: leave out sampled_steps and "
            "sampled_prompt_tokens"
        )
    if any(step.drafted and run.costs.draft_costs(1).gpu_ns for run in prepared for step in run.steps):
        raise RefusedError(
            "replay: the steps that verify drafts are played, the drafting is not: set draft_layers to 0, and "
            "draft_ns to null, for drafts that cost nothing"
        )
    return ReplayRoom(
        batch=max(run.scenario.batch for run in prepared),
        context=max(run.tokens_per_sequence for run in prepared),
        step_tokens=max(len(step.rows) for run in prepared for step in run.steps),
        slots=max(map(slots_needed, prepared)),
        host_bytes=max((size for size in map(host_bytes_of_run, prepared) if size is not None), default=None),
    )


@contextmanager
def experts_in(folder: Path | None, prepared: Prepared) -> Iterator[ExpertFile | None]:
    """A file of random experts in ``folder`` for the block, where the run's host holds a part of them; else None.

    Raises what ``file_for`` raises.
    """
    shape = prepared.shape
    slabs = random_slabs(ExpertShape.of(shape)[1], shape.moe_layers, shape.experts, plain)
    with file_for(folder, prepared, slabs) as file:
        yield file


def measure(
    scenario: Scenario, lanes: LaneKind = "auto", options: LaneOptions | None = None,
    tell: Callable[[RealMachine], object] = lambda _: None, experts_folder: Path | None = None,
) -> Measurement:
    """Replay one scenario: once to warm up, once to measure.

    Policies plan with the scenario's hardware: a profile of this machine, or a preset. ``tell`` is called with the
    machine before the run, for example to print its ``remarks``. ``experts_folder``: on the disk, where one holds the
    experts. Raises what ``simulate`` raises, RefusedError before
    the run, and LaneError during it.
    """
    prepared = prepare(scenario).checked()
    with (
        closing(machine_on(prepared.hardware, lanes, options)) as machine,
        experts_in(experts_folder, prepared) as file,
    ):
        bench = ReplayBench(machine, prepared.shape, room_for([prepared]), file)
        tell(machine)
        bench.measure(prepared)
        return bench.measure(prepared)


def machine_on(
    hardware: Hardware, lanes: LaneKind = "auto", options: LaneOptions | None = None, *, inline: bool = False
) -> RealMachine:
    """The machine of a profile; for a preset, the chosen lanes. ``inline``: on host lanes the calling thread plays the
    GPU, as needed for a library's model.

    Raises RefusedError if this is another computer than the profile's, or if other lanes were chosen than the
    profile's.
    """
    options = options or LaneOptions()
    if not hardware.measured:
        return machine_for(lanes, options, inline=inline)
    check_asked(hardware.measured_profile(), lanes, options)
    return machine_of(hardware.measured_profile(), inline=inline)
