"""Random worlds on machines of several GPUs, and their runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from policies.mechanism.host_share import HostShare
from policies.mechanism.session import Session
from policies.mechanism.shared_host import fill_together
from policies.mechanism.views import ExpertCosts
from policies.protocols import Budget, Needs
from sim.costs.cost_table import CostTable, StepCosts, StepModel
from sim.machine.peers import PeerLink
from sim.runs.cards import LayerBlock, blocks_of, calibration_of_block, costs_of_block, demand_of_block
from sim.runs.demand import StepDemand, future_of
from sim.runs.scenario import Scenario
from sim.runs.spans import Row, Span
from sim.runs.vocabulary import CARD_LANES, MOST_GPUS
from sim.timeline.cards import CardsTimeline
from sim.timeline.layer_parts import TokenBytes
from trilane.testing.log import Log, log_of
from trilane.testing.worlds import World, host_of

BYTES = TokenBytes(16, 8)


@dataclass(frozen=True)
class PlayedCards:
    """A world that several GPUs have run."""

    rows: list[Row]
    world: World
    blocks: Sequence[LayerBlock]
    tables: Sequence[CostTable]  # of the whole model, on each GPU
    demand: list[StepDemand]
    budgets: list[int]

    @property
    def log(self) -> Log:
        return log_of(Span(*row) for row in self.rows)

    @property
    def as_one(self) -> Log:
        """The spans with the lanes of all GPUs as those of one."""
        alike = (row[0][:-1] if row[0][:-1] in CARD_LANES else row[0] for row in self.rows)
        return log_of(Span(lane, *row[1:]) for lane, row in zip(alike, self.rows, strict=True))


class OtherGpu(NamedTuple):
    """A GPU by what it has and takes of what the world's takes. It is launched as that is."""

    times: int = 1
    link_times: int = 1
    memory: float = 1.0
    peer: PeerLink | None = None

    def costs(self, costs: CostTable) -> CostTable:
        """The costs of the model on it."""
        return replace(costs.map_experts(self._expert), steps=_OtherSteps(costs.steps, self), peer=self.peer)

    def _expert(self, costs: ExpertCosts) -> ExpertCosts:
        return costs._replace(
            gpu_ns=tuple(ns * self.times for ns in costs.gpu_ns), first_gpu_ns=costs.first_gpu_ns * self.times,
            copy_ns=costs.copy_ns * self.link_times, writeback_ns=costs.writeback_ns * self.link_times,
        )


@dataclass(frozen=True)
class _OtherSteps:
    steps: StepModel
    gpu: OtherGpu

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        costs = self.steps.step(tokens, context)._asdict()
        links = ("routing_ns", "activations_ns", "result_ns")
        return StepCosts(**{
            name: ns * (self.gpu.link_times if name in links else self.gpu.times) for name, ns in costs.items()
        })


ALIKE = (OtherGpu(),) * MOST_GPUS


def sessions(
    world: World, blocks: Sequence[LayerBlock], tables: Sequence[CostTable], budgets: Sequence[int]
) -> list[Session]:
    """A session for each block of layers, over one memory of the host if the world has a disk."""
    context, host = world.context, host_of(world)
    made = []
    for block, table, budget in zip(blocks, tables, budgets, strict=True):
        costs = costs_of_block(table, block).experts
        calibration = calibration_of_block(context.calibration, block) if context.calibration else None
        future = None
        if world.system.needs.future:
            future = future_of(demand_of_block(world.demand(Needs()), block))
        own = replace(context, layers=block.layers, costs=costs, calibration=calibration, future=future)
        policy = world.system.build(world.system.parse(world.parameters), own)
        popularity = calibration.popularity if calibration is not None and policy.needs.calibration else None
        sizes = tuple(cost.expert_bytes for cost in costs)
        share = None if host is None else HostShare(host, *block)
        made.append(Session(policy, Budget(world.trace.shape.experts, sizes, budget, popularity), costs, share))
    if host is not None:
        fill_together(host, made)
    return made


def play(
    world: World, gpus: int, split: tuple[float, ...] | None = None, kinds: Sequence[OtherGpu] = ALIKE
) -> PlayedCards:
    """``kinds``: of each GPU; by default as the world's, with as much memory."""
    blocks = blocks_of(Scenario(gpus=gpus, layer_split=split), world.trace.shape.moe_layers)
    tables = [kind.costs(world.costs) for kind in kinds[:gpus]]
    budgets = [round(world.cache_bytes * kind.memory) for kind in kinds[:gpus]]
    own = sessions(world, blocks, tables, budgets)
    demand = world.demand(own[0].policy.needs)
    rows = CardsTimeline(own, blocks, list(map(costs_of_block, tables, blocks)), demand, BYTES).run()
    largest = [max(cost.expert_bytes for cost in session.costs) for session in own]
    slots = own[0].policy.demand_slots + own[0].policy.prefetch_slots
    budgets = [budget + slots * size for budget, size in zip(budgets, largest, strict=True)]
    return PlayedCards(rows, world, blocks, tables, demand, budgets)
