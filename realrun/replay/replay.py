"""The replay of a trace's routing on real kernels of a model's shapes, and scenarios measured by it.

Weights are random: no checkpoint is needed. ``measure`` is the counterpart of ``sim.simulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.cards import check_divided
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import LayerSizes
from realrun.experts.expert_file import ExpertFile, HeldExperts
from realrun.experts.ffn import ExpertShape
from realrun.experts.file_of_run import file_for, held_experts, host_bytes_of_run
from realrun.experts.store import GpuSlots, random_slabs, random_store, slots_needed
from realrun.machine import LaneKind
from realrun.machine.host_memory import check_host_memory
from realrun.machine.lanes import Machine
from realrun.machine.machines import LaneOptions, RealMachine, check_asked, machine_for, machine_of
from realrun.machine.pinned import plain
from realrun.replay.cards import CardsReplay
from realrun.replay.model import RecordedModel, ReplayModel, model_on
from realrun.replay.replayed_layers import ReplayedLayers
from realrun.replay.step_routing import step_routings
from sim.machine.hardware import Hardware
from sim.runs.cards import demand_of_block
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from traces.models.shape import ModelShape

WEIGHTS_DTYPE = torch.float32  # of routing weights, and therefore of sums over experts


class Measurement(NamedTuple):
    """A measured run, and the session of each GPU with the log of its calls."""

    run: Run
    sessions: tuple[LoggedSession, ...]

    @property
    def session(self) -> LoggedSession:
        """The session of the only GPU."""
        [session] = self.sessions
        return session


class ReplayRoom(NamedTuple):
    """The largest sizes of the runs that a bench is made for."""

    batch: int
    context: int  # prompt and generated tokens of a sequence
    step_tokens: int  # of the whole batch
    slots: int  # on each GPU, staging included
    gpus: int = 1
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
        check_host_memory(held_bytes + self.layout.size_bytes * (room.slots * room.gpus if on_host else 0))
        self.machine, self.room, self.file = machine, room, file
        if file is None:
            self.store = random_store(self.layout, shape.moe_layers, shape.experts, self._allocate)
        self.kernels = [kernel] * shape.moe_layers
        self._sizes = LayerSizes(room.step_tokens, shape.top_k, shape.hidden, dtype, WEIGHTS_DTYPE)
        self._gpus = [machine, *map(machine.card, range(1, room.gpus))]
        self._models = {
            gpu.device: model_on(gpu, shape, dtype=dtype, batch=room.batch, context=room.context, estimator=True)
            for gpu in {gpu.device: gpu for gpu in reversed(self._gpus)}.values()
        }
        self._arenas = [gpu.gpu_tensor((room.slots, self.layout.size_bytes), torch.uint8) for gpu in self._gpus]

    def measure(self, prepared: Prepared) -> Measurement:
        """Run a prepared scenario; repeat it if graphs were recorded during the run."""
        recorded = self._recorded()
        measurement = self._run(prepared)
        return measurement if self._recorded() == recorded else self._run(prepared)

    def _run(self, prepared: Prepared) -> Measurement:
        sessions, blocks = prepared.sessions_of(LoggedSession), [card.block for card in prepared.cards]
        demands = [demand_of_block(prepared.demand, block) for block in blocks]
        devices = [gpu.device for gpu in self._gpus[: len(blocks)]]
        routing = {device: step_routings(prepared.trace, prepared.steps, device) for device in devices}
        executors = [self._executor(prepared, session, number) for number, session in enumerate(sessions)]
        replay = CardsReplay([
            ReplayedLayers(executor, self._models[executor.machine.device], block, self.room.step_tokens)
            for executor, block in zip(executors, blocks, strict=True)
        ], self._sizes)
        with replay.running():
            for place, (*demand, rows) in enumerate(zip(*demands, prepared.steps, strict=True)):
                replay.step(demand, rows, [routing[device][place] for device in devices])
        errors, label = sessions[0].routing_errors(prepared.demand), f"measured on {self.machine.kind}"
        return Measurement(Run.of(prepared, replay.rows(), errors, label), tuple(sessions))

    def _recorded(self) -> int:
        """The number of recorded graphs."""
        return sum(model.graphs.recorded for model in self._models.values() if isinstance(model, RecordedModel))

    @property
    def model(self) -> ReplayModel:
        """The kernels of the first GPU."""
        return self._models[self.machine.device]

    def _executor(self, prepared: Prepared, session: LoggedSession, number: int) -> Executor:
        """The executor of GPU ``number``."""
        policy, room, slots = prepared.composition, self.room, slots_needed(prepared)[number]
        if slots > room.slots:
            raise RefusedError(f"replay: expected at most {room.slots} slots on the GPU, the run needs {slots}")
        arena, block = self._arenas[number][:slots], prepared.cards[number].block
        store = self.store.part(block) if session.host is None else self._held_experts(prepared)
        return Executor(
            session, self._gpus[number], store, GpuSlots(arena, policy.demand_slots, policy.prefetch_slots),
            self.kernels[: block.layers], self._sizes,
        )

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
    for run in prepared:
        check_divided(run)
    return ReplayRoom(
        batch=max(run.scenario.batch for run in prepared),
        context=max(run.tokens_per_sequence for run in prepared),
        step_tokens=max(len(step.rows) for run in prepared for step in run.steps),
        slots=max(max(slots_needed(run)) for run in prepared),
        gpus=max(run.gpus for run in prepared),
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
