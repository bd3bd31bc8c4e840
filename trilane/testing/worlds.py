"""Small worlds to hold the laws against, and their runs, with what the session decided; random traces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import strategies as st
from numpy.typing import NDArray

from policies.calibration import Calibration
from policies.mechanism.host_keeping import Keeping
from policies.mechanism.host_tier import HostTier, by_popularity, in_turn
from policies.mechanism.routing_error import RoutingErrors
from policies.mechanism.session import Session
from policies.mechanism.views import Copy, Forecast, Foresight, LayerInput, Plan, Swap, Updates, Upload
from policies.protocols import Budget, Composition, Needs, When
from policies.registry import BuildContext, System
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand, demand_of, future_of
from sim.runs.spans import spans_frame
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from traces.batches import compose as compose_batch
from traces.layout import ForecastKey
from traces.models.shape import ModelShape
from traces.trace import Trace
from traces.windows import RejectedDrafts, drawn_windows, verifying_steps
from trilane.testing.log import Log, Routings, log_of


class RecordingSession(Session):
    """A session that remembers what was decided."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.plans: dict[tuple[int, int], Plan] = {}
        self.foresights: dict[tuple[int, int], Foresight] = {}
        self.swaps_asked: list[tuple[tuple[int, int], When, Sequence[Swap | Upload]]] = []
        self.refused: set[int] = set()  # moments at which the free lane has looked for work in vain
        self.clock: Callable[[], float] = lambda: 0

    def plan_layer(self, given: LayerInput) -> Plan:
        self._place = (given.step, given.layer)
        plan = self.plans[self._place] = super().plan_layer(given)
        self.swaps_asked.append((self._place, "routed", plan.swaps))
        return plan

    def foresee(self, forecasts: Sequence[Forecast]) -> Any:
        answer = super().foresee(forecasts)
        self.foresights[self._place] = answer[0]
        return answer

    def end_layer(self) -> Updates:
        updates = super().end_layer()
        self.swaps_asked.append((self._place, "layer_end", updates.queued))
        return updates

    def end_step(self) -> Updates:
        updates = super().end_step()
        self.swaps_asked.append(((self._place[0], -1), "step_end", updates.queued))
        return updates

    def next_copy(self, demand: bool = True) -> Copy | None:
        copy = super().next_copy(demand)
        if copy is None:
            self.refused.add(int(self.clock()))
        return copy


@dataclass(frozen=True)
class PlayedWorld:
    """A world that has run."""

    spans: pd.DataFrame
    session: RecordingSession
    demand: list[StepDemand]
    budget_bytes: int  # all GPU memory that experts may hold
    costs: CostTable
    host_bytes: int | None = None

    @cached_property
    def log(self) -> Log:
        """The spans, indexed."""
        return log_of(self.spans)

    @property
    def routings(self) -> Routings:
        """The routing in force."""
        return {place: plan.routing.workload() for place, plan in self.session.plans.items()}

    @property
    def demand_slots(self) -> int:
        return self.session.policy.demand_slots


# --- worlds -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class World:
    """One question, small: everything that a run depends on."""

    system: System
    trace: Trace
    costs: CostTable
    batch: int
    cache_bytes: int
    seed: int = 0
    prefill_chunk_tokens: int | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    draft_shares: tuple[float, ...] = ()  # accepted, by position, of drafts that decode steps verify; batch 1
    host_bytes: int | None = None  # of the host's memory, above a disk that holds all experts; None: there is no disk
    keeping: Keeping = "experts"
    rejected: RejectedDrafts = "recorded"

    def __repr__(self) -> str:
        """The text of a failing example."""
        shape = self.trace.shape
        return (
            f"World({self.system.name!r}, {shape.moe_layers} layers x {shape.experts} experts, top {shape.top_k}, "
            f"batch {self.batch}, {self.cache_bytes} bytes, seed {self.seed}, {self.trace.provenance}, {self.costs})"
        )

    def demand(self, needs: Needs) -> list[StepDemand]:
        """The demand of the trace, with what a policy needs."""
        steps = compose_batch(self.trace, batch=self.batch, prefill_chunk_tokens=self.prefill_chunk_tokens)
        if self.draft_shares:
            prefill, decode = ([s for s in steps if s.phase == phase] for phase in ("prefill", "decode"))
            windows = drawn_windows(self.draft_shares, self.seed)
            steps = [*prefill, *verifying_steps(decode, len(decode), windows, self.seed, True, self.rejected)]
        return demand_of(self.trace, steps, needs)

    @property
    def context(self) -> BuildContext:
        """Inputs of the policy's construction; made anew each time."""
        shape = self.trace.shape
        return BuildContext(
            model=shape.name, experts=shape.experts, layers=shape.moe_layers, top_k=shape.top_k, batch=self.batch,
            seed=self.seed, costs=self.costs.experts,
            calibration=toy_calibration(shape.moe_layers, shape.experts, shape.top_k, self.seed),
            future=future_of(self.demand(Needs())) if self.system.needs.future else None,
        )


def play(world: World, changes: dict[str, Any] | None = None) -> PlayedWorld:
    """Run a world. ``changes`` replaces parts of the policy (a broken one, say)."""
    return play_composition(world, replace(composition_of(world), **(changes or {})))


def composition_of(world: World, context: BuildContext | None = None) -> Composition:
    """The world's policy, ready to run once."""
    return world.system.build(world.system.parse(world.parameters), context or world.context)


def play_composition(world: World, policy: Composition) -> PlayedWorld:
    """Run a world under a policy that was composed for it."""
    calibration = world.context.calibration if policy.needs.calibration else None
    popularity = None if calibration is None else calibration.popularity
    return play_policy(policy, world, world.demand(policy.needs), popularity)


def play_policy(
    policy: Composition, world: World, demand: list[StepDemand], popularity: np.ndarray | None = None
) -> PlayedWorld:
    """Run any policy on the machine of a world."""
    sizes = tuple(costs.expert_bytes for costs in world.costs.experts)
    budget = Budget(world.trace.shape.experts, sizes, world.cache_bytes, popularity)
    session = RecordingSession(policy, budget, world.costs.experts, host_of(world))
    routing_errors = RoutingErrors(experts=world.trace.shape.experts) if policy.needs.changes_routing else None
    engine = Timeline(session, world.costs, demand, TokenBytes(16, 8), routing_errors)
    session.clock = lambda: engine.clock.now
    engine.run()
    staging = (policy.demand_slots + policy.prefetch_slots) * max(sizes)
    spans = spans_frame(engine.recorder.rows)
    return PlayedWorld(spans, session, demand, world.cache_bytes + staging, world.costs, world.host_bytes)


def host_of(world: World) -> HostTier | None:
    """The host's memory above a disk, where the world has one."""
    if world.host_bytes is None:
        return None
    shape, ranking = world.trace.shape, None
    if world.keeping == "pinned":
        taste = np.random.default_rng(world.seed).random((shape.moe_layers, shape.experts))
        ranking = by_popularity(taste.tolist())
    ranking = ranking or in_turn(shape.moe_layers, shape.experts)
    return HostTier(world.host_bytes, world.costs.experts, world.keeping, ranking)


def digest(played: PlayedWorld) -> str:
    """A hash of all spans."""
    return hashlib.sha256(played.spans.to_csv(index=False).encode()).hexdigest()


# --- random traces ----------------------------------------------------------------------------------------------------


def toy_shape(layers: int, experts: int, top_k: int, **fields: Any) -> ModelShape:
    """A model small enough to compute by hand: an expert is 3 x 8 x 4 weights of 16 bits, 192 bytes."""
    values = {"name": "toy", "dense_layers": 0, "hidden": 8, "expert_width": 4, **fields}
    return ModelShape(moe_layers=layers, experts=experts, top_k=top_k, **values)


def toy_calibration(layers: int, experts: int, top_k: int, seed: int = 0, sequences: int = 3) -> Calibration:
    """Some sequences of 4 prompt and 5 decode tokens, routed at random with a taste for some experts."""
    random = np.random.default_rng(seed)
    taste = random.dirichlet(np.ones(experts), layers)
    scores = taste + random.random((sequences, 9, layers, experts)) * 0.2
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.int16)
    chosen = (ids[..., None] == np.arange(experts)).any(axis=-2).astype(np.int64)
    recalls = {(kind, 1): random.random(layers) for kind in ("gate", "residual", "quasi_hidden", "estimator")}
    return Calibration(
        "toy", chosen.sum(axis=1), chosen[:, 4:].sum(axis=1), ids[:, 4:].reshape(-1, layers, top_k), recalls
    )


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    scores: bool | None = None,
    forecasts: bool | None = None,
    max_layers: int = 4,
    max_experts: int = 8,
    min_decode: int = 0,
) -> Trace:
    """A small valid trace. ``scores`` and ``forecasts`` say whether it has them; None leaves it to chance.

    Each sequence has a prompt of 1 to 6 tokens and ``min_decode`` to 6 decode tokens. Where there are scores, the
    chosen experts are the best by score; the forecasts are random.
    """
    layers, experts = draw(st.integers(1, max_layers)), draw(st.integers(1, max_experts))
    top_k = draw(st.integers(1, experts))
    lengths = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(min_decode, 6)), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tensors = token_places(lengths)
    tokens = len(tensors["sequence"])
    tensors |= scored_routing(rng, (tokens, layers, experts), top_k)
    if not (draw(st.booleans()) if scores is None else scores):
        del tensors["scores"]
    if draw(st.booleans()) if forecasts is None else forecasts:
        known = [("gate", 1), ("residual", 1), ("gate", 2), ("random", 5), ("token", 1)]
        keys = draw(st.sets(st.sampled_from(known), min_size=1))
        for kind, lookahead in sorted(keys):
            count = draw(st.integers(min(2 * top_k, experts), experts))
            with_scores = draw(st.booleans())
            key = ForecastKey(kind, lookahead)
            tensors |= _forecast(rng, (tokens, layers, experts), key, count, with_scores)
    return Trace.from_tensors(toy_shape(layers, experts, top_k), tensors, {"model": "random", "lengths": lengths})


def token_places(lengths: Sequence[tuple[int, int]]) -> dict[str, NDArray[Any]]:
    """sequence, position and phase of sequences with so many (prompt, decode) tokens, one after the other."""
    totals = [sum(length) for length in lengths]
    return {
        "sequence": np.repeat(np.arange(len(totals)), totals).astype(np.int32),
        "position": np.concatenate([np.arange(total) for total in totals]).astype(np.int32),
        "phase": np.concatenate([np.repeat([0, 1], length) for length in lengths]).astype(np.uint8),
    }


def scored_routing(rng: np.random.Generator, size: tuple[int, int, int], top_k: int) -> dict[str, NDArray[Any]]:
    """Random scores of experts, and the best of them; ``size``: tokens, layers, experts."""
    scores = rng.dirichlet(np.ones(size[2]), size[:2]).astype(np.float16)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    chosen = np.take_along_axis(scores, ids, axis=-1)
    return {"topk_ids": ids.astype(np.int16), "topk_weights": chosen, "scores": scores}


def _forecast(
    rng: np.random.Generator, size: tuple[int, int, int], key: ForecastKey, count: int, with_scores: bool
) -> dict[str, NDArray[Any]]:
    scores = rng.random(size).astype(np.float16)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    best = np.take_along_axis(scores, ids, axis=-1)
    past = max(size[1] - key.layers_ahead, 0)
    ids[:, past:], best[:, past:] = -1, 0
    tensors: dict[str, NDArray[Any]] = {key.ids_name: ids.astype(np.int16)}
    return tensors | ({key.scores_name: best} if with_scores else {})
