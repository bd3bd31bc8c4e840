"""Random worlds whose experts are divided among several GPUs, and their runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.mechanism.session import Session
from policies.protocols import Budget, Needs
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand, future_of
from sim.runs.expert_shares import ExpertShare, calibration_of_share, counts_of, dealt, demand_of_share
from sim.runs.spans import Row, Span
from sim.runs.vocabulary import CARD_LANES
from sim.timeline.peers import PeersTimeline
from tests.kit.played_cards import ALIKE, BYTES, OtherGpu
from trilane.testing.log import Log, log_of
from trilane.testing.worlds import World


@dataclass(frozen=True)
class PlayedPeers:
    """A world that several GPUs have run."""

    rows: list[Row]
    world: World
    shares: Sequence[ExpertShare]
    tables: Sequence[CostTable]
    demand: list[StepDemand]
    budgets: list[int]
    sessions: list[Session]

    @property
    def log(self) -> Log:
        return log_of(Span(*row) for row in self.rows)

    def of_gpu(self, number: int) -> Log:
        """The spans of one GPU's lanes and of the host, as those of a machine that has no other."""
        lanes = {f"{lane}{number or ''}": lane for lane in CARD_LANES} | {"host": "host"}
        return log_of(Span(lanes[row[0]], *row[1:]) for row in self.rows if row[0] in lanes)

    @property
    def as_one(self) -> Log:
        """The spans with the lanes of all GPUs as those of one."""
        alike = (row[0][:-1] if row[0][:-1] in CARD_LANES else row[0] for row in self.rows)
        return log_of(Span(lane, *row[1:]) for lane, row in zip(alike, self.rows, strict=True))


def sessions(
    world: World, shares: Sequence[ExpertShare], tables: Sequence[CostTable], budgets: Sequence[int]
) -> list[Session]:
    """A session for each GPU's experts."""
    context, made = world.context, []
    for share, table, budget in zip(shares, tables, budgets, strict=True):
        calibration = calibration_of_share(context.calibration, share) if context.calibration else None
        future = None
        if world.system.needs.future:
            future = future_of(demand_of_share(world.demand(Needs()), share))
        own = replace(
            context, experts=share.experts, top_k=min(context.top_k, share.experts), costs=table.experts,
            calibration=calibration, future=future,
        )
        policy = world.system.build(world.system.parse(world.parameters), own)
        popularity = calibration.popularity if calibration is not None and policy.needs.calibration else None
        sizes = tuple(cost.expert_bytes for cost in table.experts)
        made.append(Session(policy, Budget(share.experts, sizes, budget, popularity), table.experts))
    return made


def timeline(
    world: World, gpus: int, parts: Sequence[float] = (), kinds: Sequence[OtherGpu] = ALIKE
) -> tuple[PeersTimeline, PlayedPeers]:
    """``kinds``: of each GPU; by default as the world's, with as much memory."""
    shape = world.trace.shape
    ranked = np.tile(np.arange(shape.experts), (shape.moe_layers, 1))
    shares = dealt(counts_of(shape.experts, parts or (1.0,) * gpus), ranked)
    tables = [kind.costs(world.costs) for kind in kinds[:gpus]]
    budgets = [round(world.cache_bytes * kind.memory) for kind in kinds[:gpus]]
    own = sessions(world, shares, tables, budgets)
    demand = world.demand(own[0].policy.needs)
    made = PeersTimeline(own, shares, tables, demand, BYTES)
    largest = max(cost.expert_bytes for cost in world.costs.experts)
    slots = [session.policy.demand_slots + session.policy.prefetch_slots for session in own]
    budgets = [budget + count * largest for budget, count in zip(budgets, slots, strict=True)]
    return made, PlayedPeers([], world, shares, tables, demand, budgets, own)


def play(
    world: World, gpus: int, parts: Sequence[float] = (), kinds: Sequence[OtherGpu] = ALIKE
) -> PlayedPeers:
    """Run a world on so many GPUs."""
    made, played = timeline(world, gpus, parts, kinds)
    played.rows.extend(made.spans())
    return played
