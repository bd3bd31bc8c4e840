"""One model's kernels and random weights on one machine, made once, for any number of replayed runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.executor import Executor
from realrun.execution.layer_state import LayerSizes
from realrun.experts.gpu_slots import GpuSlots, slots_needed
from realrun.experts.shape import ExpertShape
from realrun.experts.store import random_store
from realrun.machine.lanes import Machine
from realrun.machine.memory_check import check_host_memory
from realrun.replay.recorded_model import RecordedModel, model_on
from realrun.replay.replay import Replay, step_routings
from sim.runs.prepare import Prepared
from sim.runs.routing_error import RoutingErrors
from sim.runs.run import Run
from traces.models.shape import ModelShape

WEIGHTS_DTYPE = torch.float32  # of routing weights, and so of sums over experts


class Measurement(NamedTuple):
    """A measured run, and the session with the log of its calls."""

    run: Run
    session: LoggedSession


class Room(NamedTuple):
    """The largest of what the runs to come need."""

    batch: int
    context: int  # prompt and generated tokens of a sequence
    step_tokens: int  # of the whole batch
    slots: int  # on the GPU, staging included


class ReplayBench:
    """Experts and kernels of ``shape`` on ``machine``, with room for runs up to ``room``."""

    def __init__(self, machine: Machine, shape: ModelShape, room: Room, seed: int = 0) -> None:
        """Raises RefusedError where there are no kernels for the weights, or not enough memory."""
        dtype, self.layout, kernel = ExpertShape.of(shape)
        count = shape.moe_layers * shape.experts
        on_host = machine.device.type == "cpu"
        check_host_memory(self.layout.size_bytes * (count + (room.slots if on_host else 0)))
        self.machine, self.room = machine, room
        self.store = random_store(
            self.layout, shape.moe_layers, shape.experts,
            lambda size: machine.host_tensor((size,), torch.uint8), seed,
        )  # fmt: skip
        self.model = model_on(
            machine, shape, dtype=dtype, batch=room.batch, context=room.context, estimator=True, seed=seed
        )  # fmt: skip
        self.kernels = [kernel] * shape.moe_layers
        self._sizes = LayerSizes(room.step_tokens, shape.top_k, shape.hidden, dtype, WEIGHTS_DTYPE)
        self._arena = machine.gpu_tensor((room.slots, self.layout.size_bytes), torch.uint8)

    def measure(self, prepared: Prepared) -> Measurement:
        """Run a prepared scenario; again, if graphs were recorded meanwhile."""
        recorded = self._recorded()
        found = self._run(prepared)
        return found if self._recorded() == recorded else self._run(prepared)

    def _run(self, prepared: Prepared) -> Measurement:
        session = prepared.session_of(LoggedSession)
        errors = RoutingErrors() if prepared.needs.changes_routing else None
        executor = self._executor(prepared, session, errors)
        routings = step_routings(prepared.trace, prepared.steps, self.machine.device)
        replay = Replay(executor, self.model, self.room.step_tokens)
        with executor.running():
            for demand, rows, routing in zip(prepared.demand, prepared.steps, routings, strict=True):
                replay.step(demand, rows, routing)
        label = f"measured on {self.machine.kind}"
        return Measurement(Run.of(prepared, executor.recorder.rows, errors, label), session)

    def _recorded(self) -> int:
        """Graphs so far."""
        return self.model.graphs.recorded if isinstance(self.model, RecordedModel) else 0

    def _executor(self, prepared: Prepared, session: LoggedSession, errors: RoutingErrors | None) -> Executor:
        policy, room, slots = prepared.composition, self.room, slots_needed(prepared)
        if slots > room.slots:
            raise RefusedError(f"replay: expected at most {room.slots} slots on the GPU, the run asks for {slots}")
        arena = GpuSlots(self._arena[:slots], policy.demand_slots, policy.prefetch_slots)
        return Executor(session, self.machine, self.store, arena, self.kernels, self._sizes, errors)


def room_for(prepared: Sequence[Prepared]) -> Room:
    """What all of these runs need. Raises RefusedError for sampled steps or prompts."""
    if any(each.scenario.sampled for each in prepared):
        raise RefusedError(
            "replay: a real machine plays every step and every prompt token: leave out sampled_steps and "
            "sampled_prompt_tokens"
        )
    return Room(
        batch=max(each.scenario.batch for each in prepared),
        context=max(each.tokens_per_sequence for each in prepared),
        step_tokens=max(len(step.rows) for each in prepared for step in each.steps),
        slots=max(map(slots_needed, prepared)),
    )
