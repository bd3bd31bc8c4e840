"""Small worlds to hold the laws against: random traces and costs, any policy and memory; and a session that records."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import strategies as st

from policies.protocols import Assigner, Budget, Composition, Needs, When
from policies.registry import SYSTEMS, BuildContext, compose, policy_names
from policies.session import Session
from policies.views import (
    Assignment,
    Copy,
    ExpertCosts,
    Forecast,
    Foresight,
    LayerInput,
    LayerView,
    Plan,
    Swap,
    Updates,
)
from sim.costs import ConstantSteps, CostTable, StepCosts
from sim.demand import StepDemand, demand_of, future_of
from sim.engine import Engine
from sim.layer_parts import TokenBytes
from sim.plan_costs import PlanCost, PlanCosts
from sim.spans import spans_frame
from tests.invariants.log import Routings
from tests.strategies import toy_calibration, toy_shape, traces
from traces.batches import compose as compose_batch
from traces.trace import Trace
from traces.trace_layout import ForecastKey

MAX_TOKENS = 32  # more than any step of a small trace has


@dataclass(frozen=True)
class World:
    """One question, small: everything that a run depends on."""

    policy: str
    trace: Trace
    costs: CostTable
    batch: int
    cache_bytes: int
    seed: int = 0

    def __repr__(self) -> str:
        """What a failing example prints."""
        shape = self.trace.shape
        return (
            f"World({self.policy!r}, {shape.moe_layers} layers x {shape.experts} experts, top {shape.top_k}, batch "
            f"{self.batch}, {self.cache_bytes} bytes, seed {self.seed}, {self.trace.provenance}, {self.costs})"
        )

    @property
    def needs(self) -> Needs:
        """What the policy must be given."""
        return SYSTEMS[self.policy].needs

    def demand(self, needs: Needs) -> list[StepDemand]:
        """What the trace asks for, with what a policy needs."""
        return demand_of(self.trace, compose_batch(self.trace, batch=self.batch), needs)


class RecordingSession(Session):
    """A session that remembers what was decided."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.plans: dict[tuple[int, int], Plan] = {}
        self.foresights: dict[tuple[int, int], Foresight] = {}
        self.swaps_asked: list[tuple[tuple[int, int], When, Sequence[Swap]]] = []
        self.refused: set[int] = set()  # when the free lane has looked for work and found none
        self.clock: Callable[[], float] = lambda: 0

    def plan_layer(self, given: LayerInput) -> Plan:
        """Plan, and remember the plan."""
        self._place = (given.step, given.layer)
        plan = self.plans[self._place] = super().plan_layer(given)
        self.swaps_asked.append((self._place, "routed", plan.swaps))
        return plan

    def foresee(self, forecasts: Sequence[Forecast]) -> Any:
        """Foresee, and remember what."""
        answer = super().foresee(forecasts)
        self.foresights[self._place] = answer[0]
        return answer

    def end_layer(self) -> Updates:
        """Remember the swaps."""
        updates = super().end_layer()
        self.swaps_asked.append((self._place, "layer_end", updates.queued))
        return updates

    def end_step(self) -> Updates:
        """Remember the swaps."""
        updates = super().end_step()
        self.swaps_asked.append(((self._place[0], -1), "step_end", updates.queued))
        return updates

    def next_copy(self, demand: bool = True) -> Copy | None:
        """Remember when there was none."""
        copy = super().next_copy(demand)
        if copy is None:
            self.refused.add(int(self.clock()))
        return copy


@dataclass(frozen=True)
class Played:
    """A world that has run."""

    spans: pd.DataFrame
    session: RecordingSession
    demand: list[StepDemand]
    budget_bytes: int  # all GPU memory that experts may hold

    @property
    def routings(self) -> Routings:
        """The routing in force."""
        return {place: plan.routing.workload() for place, plan in self.session.plans.items()}

    @property
    def demand_slots(self) -> int:
        """Staging slots for demand loads."""
        return self.session.policy.demand_slots


def play(world: World, changes: dict[str, Any] | None = None) -> Played:
    """Run a world. ``changes`` replaces parts of the policy (a broken one, say)."""
    shape, needs = world.trace.shape, world.needs
    calibration = toy_calibration(shape.moe_layers, shape.experts, shape.top_k, world.seed)
    context = BuildContext(
        model=shape.name, experts=shape.experts, layers=shape.moe_layers, top_k=shape.top_k, batch=world.batch,
        seed=world.seed, costs=world.costs.experts, calibration=calibration,
        future=future_of(world.demand(Needs())) if needs.future else None,
    )  # fmt: skip
    policy = replace(compose(world.policy, {}, context=context), **(changes or {}))
    demand = world.demand(policy.needs)
    return play_policy(policy, world, demand, calibration.popularity if needs.calibration else None)


def play_policy(
    policy: Composition, world: World, demand: list[StepDemand], popularity: np.ndarray | None = None
) -> Played:
    """Run any policy on the machine of a world."""
    sizes = tuple(costs.bytes for costs in world.costs.experts)
    budget = Budget(world.trace.shape.experts, sizes, world.cache_bytes, popularity, world.seed)
    session = RecordingSession(policy, budget, world.costs.experts)
    engine = Engine(session, world.costs, demand, TokenBytes(16, 8))
    session.clock = lambda: engine.env.now
    engine.run()
    staging = (policy.demand_slots + policy.prefetch_slots) * max(sizes)
    return Played(spans_frame(engine.recorder.rows), session, demand, world.cache_bytes + staging)


def part(world: World, name: str) -> Any:
    """A part of the world's policy."""
    return getattr(play(world).session.policy, name)


class SpoiltAssigner:
    """An assigner whose answer is spoilt (or only looked at)."""

    def __init__(self, inner: Assigner, spoil: Callable[[LayerView, Assignment], Assignment]) -> None:
        self.inner, self.spoil = inner, spoil

    def assign(self, view: LayerView) -> Assignment:
        """The inner one's answer, spoilt."""
        return self.spoil(view, self.inner.assign(view))


# --- random worlds ----------------------------------------------------------------------------------------------------


@st.composite
def worlds(
    draw: st.DrawFn, policies: Sequence[str] = (), contention: bool | None = None, min_decode: int = 0
) -> World:
    """A policy (of ``policies``) in a random world. ``contention``: whether CPU and copies slow each other down."""
    policy = draw(st.sampled_from(policies or policy_names()))
    needs = SYSTEMS[policy].needs
    trace = draw(traces(scores=True if needs.scores else None, max_layers=3, max_experts=6, min_decode=min_decode))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    return random_world(policy, trace, rng, contention)


def random_world(policy: str, trace: Trace, rng: random.Random, contention: bool | None = None) -> World:
    """Draw costs, memory and batch for a trace."""
    needs, shape = SYSTEMS[policy].needs, trace.shape
    sizes = [100 if needs.uniform_sizes else rng.choice((100, 100, 160)) for _ in range(shape.moe_layers)]
    total = sum(sizes) * shape.experts
    cache = rng.choice((0, max(sizes), total // 4, total // 2, total))
    sequences = len(set(trace.sequence.tolist()))
    batch = rng.randint(1, min(sequences, needs.max_batch or sequences))
    costs = random_costs(sizes, rng, rng.random() < 0.5 if contention is None else contention)
    return World(policy, with_forecasts(trace, needs, rng), costs, batch, cache, rng.randrange(1000))


def random_costs(sizes: Sequence[int], rng: random.Random, contention: bool) -> CostTable:
    """Whole, positive, growing with the workload; anything from a slow link to a slow host may be the bottleneck."""
    step = StepCosts(*(rng.randint(0, 20) for _ in StepCosts._fields))
    plans = [PlanCost(rng.randint(0, 9), rng.randint(0, 3)) for _ in range(2)]
    costs = CostTable(
        tuple(_expert_costs(size, rng) for size in sizes), ConstantSteps(step), launch_ns=rng.randint(0, 20),
        expert_launch_ns=rng.randint(0, 9), combine_launch_ns=rng.randint(0, 9), head_launch_ns=rng.randint(0, 9),
        dense_launch_ns=rng.randint(0, 9), sync_ns=rng.randint(0, 20),
        cpu_permille=rng.randint(300, 999) if contention else 1000,
        copy_permille=rng.randint(300, 999) if contention else 1000,
        result_path=rng.choice(("direct", "h2d")), plan_costs=PlanCosts({"default": plans[0]}, {"default": plans[1]}),
    )  # fmt: skip
    costs.validate()
    return costs


def _expert_costs(size: int, rng: random.Random) -> ExpertCosts:
    gpu, cpu = (
        [0, *np.cumsum([rng.randint(1, first), *(rng.randint(0, more) for _ in range(MAX_TOKENS - 1))]).tolist()]
        for first, more in ((20, 2), (60, 20))
    )
    return ExpertCosts(tuple(gpu), tuple(cpu), rng.randint(0, 9), rng.randint(1, 90), size, rng.randint(0, 90))


def with_forecasts(trace: Trace, needs: Needs, rng: random.Random) -> Trace:
    """The trace with every forecast that the policy needs: half of them right, the others random."""
    tensors, shape = trace.tensors(), trace.shape
    draw = np.random.default_rng(rng.randrange(2**32))
    for kind, lookahead in needs.forecasts:
        key = ForecastKey(kind, lookahead)
        if kind == "oracle" or key in trace.forecasts:
            continue
        likely = draw.random((len(trace), shape.moe_layers, shape.experts))
        reach = max(shape.moe_layers - lookahead, 0)
        for row, layer in np.argwhere(draw.random((len(trace), reach)) < 0.5):
            likely[row, layer, trace.topk_ids[row, layer + lookahead]] += 1
        ids = np.argsort(-likely, axis=-1).astype(np.int16)
        scores = np.take_along_axis(likely, ids.astype(np.int64), axis=-1).astype(np.float16)
        ids[:, reach:] = -1
        tensors |= {key.ids_name: ids, key.scores_name: scores}
    return Trace.from_tensors(shape, tensors, trace.provenance)


# --- what another process must find, too ------------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """A hash of all spans of a fixed world, for every policy."""
    return {policy: digest(play(fixed_world(policy))) for policy in policy_names()}


def fixed_world(policy: str) -> World:
    """The same world in every process."""
    rng = random.Random(f"world of {policy}")
    trace = fixed_trace(np.random.default_rng(5))
    return replace(random_world(policy, trace, rng), cache_bytes=1500)


def fixed_trace(rng: np.random.Generator) -> Trace:
    """Three sequences of 4 prompt and 6 decode tokens; 3 layers of 8 experts, 2 of them chosen."""
    tokens, layers, experts, top_k = 30, 3, 8, 2
    scores = rng.dirichlet(np.ones(experts), (tokens, layers)).astype(np.float16)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    tensors = {
        "sequence": np.repeat(np.arange(3), 10).astype(np.int32),
        "position": np.tile(np.arange(10), 3).astype(np.int32),
        "phase": np.tile([0] * 4 + [1] * 6, 3).astype(np.uint8),
        "topk_ids": ids.astype(np.int16),
        "topk_weights": np.take_along_axis(scores, ids, axis=-1), "scores": scores,
    }  # fmt: skip
    return Trace.from_tensors(toy_shape(layers, experts, top_k), tensors, {"model": "fixed"})


def digest(played: Played) -> str:
    """A hash of all spans."""
    return hashlib.sha256(played.spans.to_csv(index=False).encode()).hexdigest()
