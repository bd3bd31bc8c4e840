"""The laws of docs/design.md where layers are divided among several GPUs, equal or not.

Lanes that each GPU has are looked at as one where the law is about a layer (one GPU works at a time), and by themselves
where it is about a lane or a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.mechanism.residency import Residency
from policies.mechanism.session import Session
from policies.mechanism.views import ExpertCosts
from policies.protocols import Budget, Needs
from policies.registry import SYSTEMS, policy_names
from sim.costs.cost_table import CostTable, StepCosts, StepModel
from sim.runs.bounds import LowerBounds
from sim.runs.cards import LayerBlock, blocks_of, calibration_of_block, costs_of_block, demand_of_block, least_costs
from sim.runs.columns import columns_of_rows
from sim.runs.demand import StepDemand, future_of
from sim.runs.metrics import metrics_of
from sim.runs.scenario import Scenario
from sim.runs.spans import Row, Span
from sim.runs.vocabulary import CARD_LANES, MOST_GPUS
from sim.timeline.cards import CardsTimeline
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.kit.depth import examples
from trilane.testing.laws import (
    law_1_conservation,
    law_2_causality,
    law_3_exclusivity,
    law_4_capacity,
    law_4_sizes,
    slow_metrics,
    stall_times,
)
from trilane.testing.log import Log, log_of
from trilane.testing.random_worlds import SIZES, fixed_world, worlds
from trilane.testing.work_conservation import _ready, law_2_launches
from trilane.testing.worlds import World

KEEPS_ROUTING = [name for name in policy_names() if not SYSTEMS[name].needs.changes_routing]
some = settings(max_examples=examples(62), derandomize=True, suppress_health_check=list(HealthCheck))
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

    def costs(self, costs: CostTable) -> CostTable:
        """The costs of the model on it."""
        return replace(costs.map_experts(self._expert), steps=_OtherSteps(costs.steps, self))

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
    """A session for each block of layers."""
    context = world.context
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
        made.append(Session(policy, Budget(world.trace.shape.experts, sizes, budget, popularity), costs))
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


def check(played: PlayedCards) -> None:
    """All laws."""
    log, as_one, costs = played.log, played.as_one, played.world.costs
    law_3_exclusivity(log)
    law_1_conservation(as_one, {
        (step.index, layer): routing.workload()
        for step in played.demand for layer, routing in enumerate(step.routings)
    })
    law_2_causality(as_one)
    law_2_launches(as_one, costs)
    law_4_sizes(as_one, costs)
    for block, budget in zip(played.blocks, played.budgets, strict=True):
        law_4_capacity([span for span in log.spans if block.first <= span.layer < block.end], budget)
    hand_overs(log, played.blocks)
    work_conservation(log, as_one, played)
    accounting(played)


def hand_overs(log: Log, blocks: Sequence[LayerBlock]) -> None:
    """A layer on another GPU than the one before begins when its input has crossed both links."""
    for step in sorted({span.step for span in log.spans if span.step >= 0}):
        for number, block in enumerate(blocks[1:], 1):
            before, first = (step, block.first - 1), (step, block.first)
            [down] = log.of(before, "hand_over", lane=f"d2h{number - 1 or ''}")
            [up] = log.of(first, "hand_over", lane=f"h2d{number}")
            attention = log.one(first, "attention")
            assert attention.lane == f"gpu{number}"
            chain = (log.one(before, "combine").end_ns, down.start_ns, down.end_ns, up.start_ns, up.end_ns)
            assert list(chain) == sorted(chain), f"law 2: a hand-over before its input is there: {chain}"
            assert up.end_ns <= attention.start_ns, f"law 2: {attention} starts before its input is there, {up}"


def work_conservation(log: Log, as_one: Log, played: PlayedCards) -> None:
    """No lane is idle while its next piece of work is ready."""
    back = any(span.kind == "writeback" for span in log.spans)
    for lane in log.lanes:
        for free, span in log.in_order(lane):
            early = back and lane.startswith("h2d")  # copies wait for what is written back in turn
            assert span.start_ns == max(free, span.ready_ns) or (early and span.start_ns > free), f"law 5: {span}"
    starts = {block.first for block in played.blocks[1:]}
    for layer in as_one.routed_layers():
        for span in as_one.layers[layer]:
            expected = _ready(as_one, layer, span, played.world.costs)
            if layer[1] in starts and span.kind in ("attention", "gate", "speculate", "shared"):  # one launch
                [arrived] = as_one.of(layer, "hand_over", lane="h2d")
                expected = max(expected or 0, arrived.end_ns)
            assert expected is None or span.ready_ns == expected, f"law 5: {span} could have started at {expected} ns"


def accounting(played: PlayedCards) -> None:
    """Metrics worked out anew are the same, but for the shares of lanes, which are each GPU's own."""
    batch, as_one = played.world.batch, played.as_one
    given = metrics_of(columns_of_rows(played.rows), batch).to_dict()
    for name, value in slow_metrics(as_one, batch).items():
        if not name.endswith("busy_share"):
            assert given[name] == pytest.approx(value), f"law 12: {name}"
    makespan = max(span.end_ns for span in as_one.spans)
    busy = sum(span.end_ns - span.start_ns for span in as_one.lanes["gpu"])
    assert sum(stall_times(as_one, 0, makespan).values()) == makespan - busy


# --- random worlds ----------------------------------------------------------------------------------------------------


OTHER_GPUS = st.builds(OtherGpu, st.integers(1, 4), st.integers(1, 4), st.sampled_from((0.0, 0.5, 1.0, 2.0)))


@settings(some, max_examples=examples(125))
@given(worlds(KEEPS_ROUTING, contention=False), st.lists(OTHER_GPUS, min_size=2, max_size=MOST_GPUS), st.randoms())
def test_laws_1_to_5_and_12_with_two_to_four_gpus(world: World, kinds: list[OtherGpu], random: Random) -> None:
    layers = world.trace.shape.moe_layers
    assume(layers > 1)
    gpus = min(len(kinds), layers)
    parts = tuple(random.choice((1.0, 2.0, 5.0)) for _ in range(gpus))
    check(play(world, gpus, parts, kinds))


@pytest.mark.parametrize("policy", KEEPS_ROUTING)
def test_all_of_them_hold_with_four_gpus(policy: str) -> None:
    [size] = [size for size in SIZES if size.name == "many layers"]
    world = size.world(SYSTEMS[policy])
    alone = dict.fromkeys(("gpu_permille", "gpu_with_cpu_permille", "cpu_with_gpu_permille"), 1000)
    check(play(replace(world, costs=replace(world.costs, **alone)), 4))


@some
@given(worlds(KEEPS_ROUTING))
def test_one_gpu_by_itself_gives_the_same_spans(world: World) -> None:
    block = [LayerBlock(0, world.trace.shape.moe_layers)]
    tables, budgets = [world.costs], [world.cache_bytes]
    [session] = sessions(world, block, tables, budgets)
    demand = world.demand(session.policy.needs)
    alone = Timeline(session, world.costs, demand, BYTES)
    alone.run()
    card = CardsTimeline(sessions(world, block, tables, budgets), block, tables, demand, BYTES)
    assert card.run() == alone.recorder.rows


@some
@given(worlds(KEEPS_ROUTING, min_decode=1), st.tuples(OTHER_GPUS, OTHER_GPUS))
def test_law_8_no_run_beats_the_lower_bound(world: World, kinds: tuple[OtherGpu, OtherGpu]) -> None:
    assume(world.trace.shape.moe_layers > 1)
    played = play(world, 2, None, kinds)
    made = metrics_of(columns_of_rows(played.rows), world.batch)
    costs = least_costs(played.tables, played.blocks)
    bound = LowerBounds(played.demand, costs, None, None, 2).at(sum(played.budgets))
    for name, least_ns in (("ttft_ms", bound.ttft_ns), ("tpot_ms", bound.tpot_ns)):
        taken_ms = getattr(made, name)
        assert least_ns is None or taken_ms is None or taken_ms * 1e6 >= least_ns * (1 - 1e-9), name


def test_law_8_catches_a_bound_of_the_slower_gpu_alone() -> None:
    """Broken twin: the costs of the first GPU, for all layers, where the second is quicker."""
    played = play(fixed_world("naive-cpu"), 2, None, (OtherGpu(8, 8), OtherGpu()))
    taken_ms = metrics_of(columns_of_rows(played.rows), played.world.batch).tpot_ms
    sound, broken = (
        LowerBounds(played.demand, costs, None, None, 2).at(sum(played.budgets)).tpot_ns or 0.0
        for costs in (least_costs(played.tables, played.blocks), played.tables[0])
    )
    assert sound <= (taken_ms or 0.0) * 1e6 < broken


# --- broken twins -----------------------------------------------------------------------------------------------------

TWO = fixed_world("on-demand")


def test_a_gpu_that_does_not_wait_for_its_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timeline, "input_ns", property(lambda self: 0, lambda self, ns: None), raising=False)
    with pytest.raises(AssertionError, match=r"law 2: .* starts before its input is there"):
        hand_overs(play(TWO, 2).log, play(TWO, 2).blocks)


def test_a_gpu_with_too_many_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free, self._room = ([size + 600 for size in each] for each in (self._free, self._room))

    monkeypatch.setattr(Residency, "__init__", generous)
    with pytest.raises(AssertionError, match="law 4"):
        check(play(replace(TWO, cache_bytes=300), 3))


def test_a_host_that_works_for_two_gpus_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CardsTimeline._hand_over

    def forgets(self: CardsTimeline, card: Timeline, following: Timeline) -> Any:
        free_ns = following.host.free_ns
        yield from sound(self, card, following)
        following.host.free_ns = free_ns

    monkeypatch.setattr(CardsTimeline, "_hand_over", forgets)
    with pytest.raises(AssertionError, match="law 3: host does two things at once"):
        check(play(TWO, 2))


def test_a_gpu_that_rests_after_its_input_is_there_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CardsTimeline._hand_over

    def late(self: CardsTimeline, card: Timeline, following: Timeline) -> Any:
        yield from sound(self, card, following)
        following.input_ns += 3

    monkeypatch.setattr(CardsTimeline, "_hand_over", late)
    with pytest.raises(AssertionError, match=r"law 5: .* could have started at"):
        check(play(TWO, 2))
