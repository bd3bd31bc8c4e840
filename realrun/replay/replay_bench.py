"""One model's kernels and random weights on one machine, made once, for any number of replayed runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.executor import Executor
from realrun.execution.layer_parts import LayerParts
from realrun.execution.recorder import Recorder
from realrun.experts.expert_ffn import SwiGlu
from realrun.experts.expert_layout import ExpertLayout
from realrun.experts.expert_store import random_store
from realrun.experts.gpu_slots import GpuSlots
from realrun.machine.lanes import Machine
from realrun.machine.pinned import check_host_memory
from realrun.replay.replay import Replay, step_routings
from realrun.replay.replay_model import ReplayModel
from sim.results.run import Run
from sim.simulate import Prepared, Setting, compose_policy, prepare
from traces.model_shape import ModelShape

_DTYPES: Mapping[float, torch.dtype] = {16.0: torch.bfloat16, 32.0: torch.float32}
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
        dtype = dtype_of(shape)
        gated = shape.matrices_per_expert == 3
        self.layout = ExpertLayout.from_shape(shape.hidden, shape.expert_width, dtype, gated)
        count = shape.moe_layers * shape.experts
        on_host = machine.device.type == "cpu"
        check_host_memory(self.layout.bytes * (count + (room.slots if on_host else 0)))
        self.machine, self.shape, self.room, self._dtype = machine, shape, room, dtype
        self.store = random_store(
            self.layout, shape.moe_layers, shape.experts,
            lambda size: machine.host_tensor((size,), torch.uint8), seed,
        )  # fmt: skip
        self.model = ReplayModel(
            shape, device=machine.device, dtype=dtype, batch=room.batch, context=room.context, estimator=True, seed=seed
        )
        self.kernels = [SwiGlu(gated)] * shape.moe_layers
        self._arena = machine.gpu_tensor((room.slots, self.layout.bytes), torch.uint8)

    def measure(self, setting: Setting, policy: str, parameters: Mapping[str, object]) -> Measurement:
        """Run one policy in a resolved setting."""
        prepared = prepare(setting, compose_policy(setting, policy, parameters), LoggedSession)
        recorder = Recorder()
        executor = self._executor(prepared, recorder)
        routings = step_routings(setting.trace, setting.steps, self.machine.device)
        replay = Replay(executor, self.model, self.room.step_tokens)
        with executor.running():
            for demand, rows, routing in zip(prepared.demand, setting.steps, routings, strict=True):
                replay.step(demand, rows, routing)
        session = prepared.session
        assert isinstance(session, LoggedSession)
        return Measurement(prepared.run(recorder.rows, f"measured on {self.machine.kind}"), session)

    def _executor(self, prepared: Prepared, recorder: Recorder) -> Executor:
        policy, shape, room = prepared.composition, self.shape, self.room
        slots = slots_of(prepared)
        if slots > room.slots:
            raise RefusedError(f"replay: expected at most {room.slots} slots on the GPU, the run asks for {slots}")
        arena = GpuSlots(self._arena[:slots], policy.demand_slots, policy.prefetch_slots)
        executor = Executor(prepared.session, self.machine, self.store, arena, recorder, prepared.approximation)
        executor.parts = LayerParts(
            self.machine, executor.copying, self.store, arena, self.kernels, recorder,
            max_tokens=room.step_tokens, top_k=shape.top_k, hidden=shape.hidden, dtype=self._dtype,
            sum_dtype=WEIGHTS_DTYPE,
        )  # fmt: skip
        return executor


def slots_of(prepared: Prepared) -> int:
    """Cache and staging slots on the GPU."""
    size = prepared.setting.shape.expert_bytes_of(0)
    policy = prepared.composition
    return prepared.memory.cache_bytes // size + policy.demand_slots + policy.prefetch_slots


def room_for(prepared: list[Prepared]) -> Room:
    """What all of these runs need."""
    settings = [each.setting for each in prepared]
    return Room(
        batch=max(setting.scenario.batch for setting in settings),
        context=max(setting.tokens_per_sequence for setting in settings),
        step_tokens=max(len(step.rows) for setting in settings for step in setting.steps),
        slots=max(map(slots_of, prepared)),
    )


def dtype_of(shape: ModelShape) -> torch.dtype:
    """The type that a model's experts are computed in. Raises RefusedError where we have no kernels for it."""
    if len(set(shape.expert_bytes)) > 1:
        raise RefusedError(f"{shape.name}: expected experts of one size, this file's differ by layer; simulate it")
    if shape.weight_bits not in _DTYPES:
        raise RefusedError(
            f"{shape.name}: expected weights of 16 or 32 bits (bfloat16, float32), got {shape.weight_bits:g}: "
            "quantised experts are simulated, not measured"
        )
    return _DTYPES[shape.weight_bits]
