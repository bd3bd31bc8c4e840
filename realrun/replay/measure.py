"""Measure scenarios on this machine by replaying them: the counterpart of ``sim.simulate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import LayerSizes
from realrun.experts.ffn import ExpertShape
from realrun.experts.gpu_slots import GpuSlots, slots_needed
from realrun.experts.store import random_store
from realrun.machine import LaneKind
from realrun.machine.host_memory import check_host_memory
from realrun.machine.lanes import Machine
from realrun.machine.machines import LaneOptions, RealMachine, check_asked, machine_for, machine_of
from realrun.replay.model import RecordedModel, model_on
from realrun.replay.replay import Replay, step_routings
from sim.machine.hardware import Hardware
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from traces.models.shape import ModelShape

WEIGHTS_DTYPE = torch.float32  # of routing weights, and therefore of sums over experts


class Measurement(NamedTuple):
    """A measured run, and the session with the log of its calls."""

    run: Run
    session: LoggedSession


class Room(NamedTuple):
    """The largest sizes of the runs that a bench is made for."""

    batch: int
    context: int  # prompt and generated tokens of a sequence
    step_tokens: int  # of the whole batch
    slots: int  # on the GPU, staging included


class ReplayBench:
    """Experts and kernels of one model with random weights on one machine, for any number of runs up to ``room``."""

    def __init__(self, machine: Machine, shape: ModelShape, room: Room, seed: int = 0) -> None:
        """Raises RefusedError if there are no kernels for the weights, or too little memory."""
        dtype, self.layout, kernel = ExpertShape.of(shape)
        count = shape.moe_layers * shape.experts
        on_host = machine.device.type == "cpu"
        check_host_memory(self.layout.size_bytes * (count + (room.slots if on_host else 0)))
        self.machine, self.room = machine, room
        self.store = random_store(
            self.layout, shape.moe_layers, shape.experts,
            lambda size: machine.host_tensor((size,), torch.uint8), seed,
        )
        self.model = model_on(
            machine, shape, dtype=dtype, batch=room.batch, context=room.context, estimator=True, seed=seed
        )
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
        return Executor(session, self.machine, self.store, arena, self.kernels, self._sizes)


def room_for(prepared: Sequence[Prepared]) -> Room:
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
    return Room(
        batch=max(run.scenario.batch for run in prepared),
        context=max(run.tokens_per_sequence for run in prepared),
        step_tokens=max(len(step.rows) for run in prepared for step in run.steps),
        slots=max(map(slots_needed, prepared)),
    )


def measure(
    scenario: Scenario, lanes: LaneKind = "auto", options: LaneOptions | None = None,
    tell: Callable[[RealMachine], object] = lambda _: None,
) -> Measurement:
    """Replay one scenario: once to warm up, once to measure.

    Policies plan with the scenario's hardware: a profile of this machine, or a preset. ``tell`` is called with the
    machine before the run, for example to print its ``remarks``. Raises what ``simulate`` raises, RefusedError before
    the run, and LaneError during it.
    """
    prepared = prepare(scenario).checked()
    with closing(machine_on(prepared.hardware, lanes, options)) as machine:
        bench = ReplayBench(machine, prepared.shape, room_for([prepared]))
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
