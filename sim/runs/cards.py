"""Several GPUs, each with a block of layers, or with experts of all: its costs, its slots, and a session of its own.

With layers, attention, KV cache and all else outside the experts lie where their layers do; the dense layers and the LM
head run on the first GPU and on the last. A policy runs once for each GPU and sees the layers of that GPU alone, so
nothing is prefetched across a boundary. With experts (``sim.runs.expert_shares``), the first GPU has all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from policies.calibration import Calibration
from policies.mechanism.views import INFINITE_NS
from policies.protocols import Composition, Needs
from sim.costs.cost_table import CostTable, StepCosts, StepModel
from sim.machine.hardware import Hardware
from sim.machine.peers import PeerLink
from sim.runs.demand import StepDemand
from sim.runs.expert_shares import ExpertShare, calibration_of_share, counts_of, dealt, demand_of_share
from sim.runs.memory import BudgetError, MemoryPlan
from sim.runs.scenario import Scenario, ScenarioError
from sim.runs.spans import Row
from sim.runs.vocabulary import CARD_LANES, MOST_GPUS
from traces.models.shape import ModelShape
from trilane.common.units import GB


class LayerBlock(NamedTuple):
    """Layers of one GPU: from ``first`` up to ``end``, which is the next one's."""

    first: int
    end: int

    @property
    def layers(self) -> int:
        return self.end - self.first


def rows_of_card(rows: Iterable[Row], number: int, first: int) -> Iterator[Row]:
    """The spans of GPU ``number``, whose layers begin with ``first``, with its lanes and the model's layers."""
    for lane, ready, start, end, kind, phase, step, layer, target, *rest in rows:
        own = f"{lane}{number or ''}" if lane in CARD_LANES else lane
        layer, target = (place + first if place >= 0 else place for place in (layer, target))
        yield (own, ready, start, end, kind, phase, step, layer, target, *rest)  # type: ignore[misc]


class Card(NamedTuple):
    """One of the GPUs: the machine with it alone, its layers, and their costs. ``share``: its experts; None: all."""

    hardware: Hardware
    block: LayerBlock
    costs: CostTable
    share: ExpertShare | None = None

    def experts_of(self, shape: ModelShape) -> int:
        """Number of its experts in each of its layers."""
        return shape.experts if self.share is None else self.share.experts

    def demand_of(self, demand: Sequence[StepDemand]) -> list[StepDemand]:
        """The steps with what it has of the model alone."""
        return demand_of_block(demand, self.block) if self.share is None else demand_of_share(demand, self.share)

    def part_of(self, calibration: Calibration) -> Calibration:
        """Counts of a calibration for what it has of the model."""
        if self.share is None:
            return calibration_of_block(calibration, self.block)
        return calibration_of_share(calibration, self.share)


def cards_with_layers(
    scenario: Scenario, shape: ModelShape, machines: Sequence[Hardware], costs: Sequence[CostTable]
) -> list[Card]:
    """Each GPU with its layers. ``costs``: of the whole model on each. Raises ScenarioError."""
    room = [machine.gpu.memory_bytes - machine.gpu.reserve_bytes for machine in machines]
    blocks = blocks_of(scenario, shape.moe_layers, room)
    tables = map(costs_of_block, costs, blocks, (machine.peer for machine in machines))
    return list(map(Card, machines, blocks, tables))


def cards_with_experts(
    scenario: Scenario, shape: ModelShape, machines: Sequence[Hardware], costs: Sequence[CostTable], whole: MemoryPlan,
    calibration: Calibration | None,
) -> list[Card]:
    """Each GPU with its experts, in the proportions of the scenario, or of the memory that it has for experts.
    ``whole``: see ``memory_of_card``. Raises ScenarioError, or BudgetError."""
    rooms = [_room(whole, number, machine) for number, machine in enumerate(machines)]
    if min(rooms) < 0:
        raise BudgetError(f"GPU {rooms.index(min(rooms))} lacks {-min(rooms) / GB:.2f} GB before any expert is cached")
    if shape.experts < len(machines):
        raise ScenarioError(f"gpus {len(machines)}: expected at most {shape.experts}, the experts of a layer")
    heat = np.zeros((shape.moe_layers, shape.experts))
    if scenario.expert_owners == "heat":
        if calibration is None:
            raise ScenarioError("expert_owners heat: expected a calibration, whose most used experts come first")
        heat = calibration.popularity
    counts = counts_of(shape.experts, scenario.layer_split or [room + 1 for room in rooms])
    shares, block = dealt(counts, np.argsort(-heat, axis=1, kind="stable")), LayerBlock(0, shape.moe_layers)
    return [
        Card(machine, block, replace(table, peer=machine.link_from(machines[0])), share)
        for machine, table, share in zip(machines, costs, shares, strict=True)
    ]


def check_gpus(scenario: Scenario, hardware: Hardware) -> None:
    """Raise ScenarioError for fewer or more GPUs than the machine's name has, and for another number of proportions."""
    named, split = len(hardware.cards), scenario.layer_split
    gpus = max(scenario.gpus or 1, named)
    if named > MOST_GPUS:
        raise ScenarioError(f"hardware {hardware.name}: expected at most {MOST_GPUS} GPUs, got {named}")
    if named > 1 and scenario.gpus not in (None, named):
        raise ScenarioError(f"gpus: expected {named}, as {hardware.name} has, or null, got {scenario.gpus}")
    if split is not None and len(split) != gpus:
        raise ScenarioError(f"layer_split: expected {gpus} proportions, one for each of gpus, got {len(split)}")


def blocks_of(scenario: Scenario, layers: int, room: Sequence[int] = ()) -> list[LayerBlock]:
    """The layers of each GPU, at least one each. ``room``: the memory of each, in whose proportion they are divided
    where the scenario states none. Raises ScenarioError where there are fewer layers."""
    gpus = len(room) or scenario.gpus or 1
    if layers < gpus:
        raise ScenarioError(f"gpus {gpus}: expected at most {layers}, the model's MoE layers")
    parts = scenario.layer_split or room or (1,) * gpus
    ends = [round(layers * part / sum(parts)) for part in accumulate(parts)]
    for number in range(gpus):  # one layer at least for it, and for each after it
        before = ends[number - 1] if number else 0
        ends[number] = min(max(ends[number], before + 1), layers - (gpus - 1 - number))
    return [LayerBlock(*ends) for ends in pairwise([0, *ends])]


def check_cards(scenario: Scenario, hardware: Hardware, policy: Composition) -> None:
    """Raise ScenarioError for what is not simulated on several GPUs."""
    refused = (
        (hardware.one_memory, f"{hardware.name}: expected GPUs that have their own memory"),
        (scenario.draft_tokens > 0, "drafts: expected draft_tokens 0"),
        (policy.needs.changes_routing, f"{policy.name}, which changes the routing: expected a policy that keeps it"),
    )
    for holds, what in refused:
        if holds:
            raise ScenarioError(f"several GPUs are not simulated with {what}")


def check_shares(scenario: Scenario, costs: CostTable, needs: Needs) -> None:
    """Raise ScenarioError for what is not simulated where GPUs compute a layer together."""
    in_turn = costs.serial or costs.serial_copies or costs.kernel_copies or costs.permille_before_barrier is not None
    refused = (
        (needs.tokens or needs.calibrated_tokens, f"policy {scenario.policy!r}, which looks at single tokens"),
        (scenario.host_expert_gb is not None, "a disk: expected host_expert_gb null"),
        (in_turn, f"engine {scenario.engine!r}, which does a layer's work in turns: expected pytorch or graphs"),
        (min(costs.gpu_permille, costs.gpu_with_cpu_permille, costs.cpu_with_gpu_permille) < 1000,
         f"{scenario.hardware}, whose GPU shares memory or cores with the CPU"),
    )
    for holds, what in refused:
        if holds:
            raise ScenarioError(f"split_mode expert is not simulated with {what}; split_mode layer is")


def memory_of_card(whole: MemoryPlan, number: int, card: Card, shape: ModelShape, share: float | None) -> MemoryPlan:
    """The memory of GPU ``number``, from ``whole``: that of all together without any cached expert.

    ``share``: of the GPU's experts, for which there are slots; None: as many as have room. Raises BudgetError.
    """
    block, gpu = card.block, card.hardware.gpu
    whole = replace(whole, gpu_memory_bytes=gpu.memory_bytes, reserve_bytes=gpu.reserve_bytes)
    part, name = block.layers / shape.moe_layers, f"the GPU of layers {block.first} to {block.end - 1}"
    if card.share is not None:
        part, name = float(number == 0), f"GPU {number}"
    non_expert, kv = round(whole.non_expert_bytes * part), round(whole.kv_bytes * part)
    room = whole.gpu_memory_bytes - whole.reserve_bytes - non_expert - kv - whole.staging_bytes
    routed = sum(shape.expert_bytes_by_layer[block.first : block.end]) * card.experts_of(shape)
    experts = block.layers * card.experts_of(shape)
    if room < 0:
        raise BudgetError(f"{name} lacks {-room / GB:.2f} GB")
    slots = min(room, routed) * experts // routed if share is None else int(share * experts + 0.5)
    cache = min(room, routed) if share is None else -(-routed * slots // experts)
    if cache > room:
        raise BudgetError(
            f"{name}: a cached share of {share:g} takes {cache / GB:.2f} GB, but {room / GB:.2f} GB are free"
        )
    return replace(whole, non_expert_bytes=non_expert, kv_bytes=kv, cache_bytes=cache, slots=slots)


def _room(whole: MemoryPlan, number: int, machine: Hardware) -> int:
    """Memory for experts of GPU ``number``, the first of which has all else."""
    room = machine.gpu.memory_bytes - machine.gpu.reserve_bytes - whole.staging_bytes
    return room - (0 if number else whole.non_expert_bytes + whole.kv_bytes)


def sum_of(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """The memory of all GPUs together."""
    return MemoryPlan(*(sum(values) for values in zip(*(vars(plan).values() for plan in plans), strict=True)))


def demand_of_block(demand: Sequence[StepDemand], block: LayerBlock) -> list[StepDemand]:
    """The steps with the layers of a block alone, numbered from 0, and the forecasts that are made and wanted in it."""
    layers = slice(block.first, block.end)

    def own(step: StepDemand) -> StepDemand:
        forecasts = tuple(
            tuple(f._replace(layer=f.layer - block.first) for f in known if block.first <= f.layer < block.end)
            for known in step.forecasts[layers]
        )
        scores = None if step.scores is None else step.scores[:, layers]
        return step._replace(routings=step.routings[layers], forecasts=forecasts, scores=scores)

    return list(map(own, demand))


def calibration_of_block(calibration: Calibration, block: LayerBlock) -> Calibration:
    """Counts of a calibration in the layers of a block."""
    layers = slice(block.first, block.end)
    return Calibration(
        calibration.source, calibration.activations[:, layers], calibration.decode_activations[:, layers],
        calibration.decode_ids[:, layers], {key: recalls[layers] for key, recalls in calibration.recalls.items()},
    )


@dataclass(frozen=True)
class _WithoutDense:
    """Costs of steps without the dense layers, which are on the first GPU."""

    steps: StepModel

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        return self.steps.step(tokens, context)._replace(dense_ns=0)


@dataclass(frozen=True)
class _LeastSteps:
    """Costs of steps, each the least of several tables."""

    tables: Sequence[CostTable]

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        return StepCosts(*map(min, zip(*(table.steps.step(tokens, context) for table in self.tables), strict=True)))


def least_costs(tables: Sequence[CostTable], blocks: Sequence[LayerBlock]) -> CostTable:
    """A table for lower bounds: the experts of each layer as on its GPU, of all other times the least of any GPU's.
    ``tables``: of whole models."""
    first, *others = tables
    if all(other is first for other in others):
        return first
    times: dict[str, Any] = {
        name: min(INFINITE_NS if (ns := getattr(table, name)) is None else ns for table in tables)
        for name in vars(first) if name.endswith("_ns")
    }
    experts = [costs for table, block in zip(tables, blocks, strict=True)
               for costs in table.experts[block.first : block.end]]
    return replace(first, experts=tuple(experts), steps=_LeastSteps(tables), **times)


def costs_of_block(costs: CostTable, block: LayerBlock, peer: PeerLink | None = None) -> CostTable:
    """The costs of a GPU whose layers are a block. ``peer``: its link from the one before; None: that of ``costs``."""
    own = replace(costs, experts=costs.experts[block.first : block.end], peer=peer or costs.peer)
    return own if block.first == 0 else replace(own, steps=_WithoutDense(costs.steps), dense_launch_ns=0)
