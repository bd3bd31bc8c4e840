"""Random worlds, and the same ones in every process: traces, costs and memory for any policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from policies.mechanism.views import ExpertCosts
from policies.protocols import Needs
from policies.registry import SYSTEMS, System
from sim.costs.cost_table import CostTable, DraftWork, StepCosts
from sim.costs.engine_costs import with_narrow_copies
from sim.machine.plan_costs import PlanCost, PlanCosts
from traces.layout import ForecastKey
from traces.models.shape import ModelShape
from traces.trace import Trace, rows_apart
from trilane.testing.costs import ConstantSteps
from trilane.testing.strategies import scored_routing, token_places, toy_shape, traces
from trilane.testing.worlds import World

MAX_TOKENS = 32  # more than any step of a small trace has


@st.composite
def worlds(
    draw: st.DrawFn, policies: Sequence[str | System] = (), contention: bool | None = None, min_decode: int = 0
) -> World:
    """A policy (of ``policies``) in a random world. ``contention``: whether CPU and copies slow each other down."""
    system = _system(draw(st.sampled_from(policies or list(SYSTEMS))))
    scores = True if system.needs.scores else None
    trace = draw(traces(scores=scores, max_layers=3, max_experts=6, min_decode=min_decode))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    return random_world(system, trace, rng, contention)


def _system(policy: str | System) -> System:
    return SYSTEMS[policy] if isinstance(policy, str) else policy


def random_world(policy: str | System, trace: Trace, rng: random.Random, contention: bool | None = None) -> World:
    """Draw costs, memory and batch for a trace."""
    system, shape = _system(policy), trace.shape
    needs = system.needs
    sizes = [100 if needs.uniform_sizes else rng.choice((100, 100, 160)) for _ in range(shape.moe_layers)]
    total = sum(sizes) * shape.experts
    cache = rng.choice((0, max(sizes), total // 4, total // 2, total))
    sequences = len(set(trace.sequence.tolist()))
    batch = rng.randint(1, min(sequences, needs.max_batch or sequences))
    costs = random_costs(sizes, rng, rng.random() < 0.5 if contention is None else contention)
    world = World(system, with_forecasts(trace, needs, rng), costs, batch, cache, rng.randrange(1000))
    return replace(world, costs=costs_with_copies(sharing_costs(costs, rng), needs, shape.experts))


def random_costs(sizes: Sequence[int], rng: random.Random, contention: bool) -> CostTable:
    """Whole, positive, growing with the workload; anything from a slow link to a slow host may be the bottleneck.

    With ``contention``, CPU experts and copies slow each other down, and in half of these tables the GPU shares cores
    and memory with them.
    """
    step = StepCosts(*(rng.randint(0, 20) for _ in StepCosts._fields))
    plans = [PlanCost(rng.randint(0, 9), rng.randint(0, 3)) for _ in range(2)]
    gpu_shares = contention and rng.random() < 0.5
    costs = CostTable(
        tuple(_expert_costs(size, rng) for size in sizes), ConstantSteps(step), attention_launch_ns=rng.randint(0, 20),
        gate_launch_ns=rng.randint(0, 9), shared_launch_ns=rng.randint(0, 9), expert_launch_ns=rng.randint(0, 9),
        combine_launch_ns=rng.randint(0, 9), head_launch_ns=rng.randint(0, 9), dense_launch_ns=rng.randint(0, 9),
        sync_ns=rng.randint(0, 20), result_path=rng.choice(("direct", "h2d")),
        plan_costs=PlanCosts({"default": plans[0]}, {"default": plans[1]}),
        gpu_permille=_rate(rng, gpu_shares), gpu_with_cpu_permille=_rate(rng, gpu_shares),
        cpu_with_gpu_permille=_rate(rng, gpu_shares), lead_ns=rng.choice((None, 0, 1, 15)), tail_ns=rng.randint(0, 9),
    )
    cpu, copy = _rate(rng, contention), _rate(rng, contention)
    costs = costs.map_experts(lambda expert: expert._replace(cpu_permille=cpu, copy_permille=copy))
    costs.validate()
    return costs


def costs_with_copies(costs: CostTable, needs: Needs, experts: int) -> CostTable:
    """The costs, with those of narrow copies of ``experts`` a layer if a policy needs them."""
    if needs.narrow_share is None:
        return costs
    return with_narrow_copies(costs, experts, needs.narrow_share)


def sharing_costs(costs: CostTable, rng: random.Random) -> CostTable:
    """The same, where the experts of a layer may share kernels and a launch, and write-backs, if CPU experts and copies
    do, slow copies down."""
    first_ns, launch_ns = (rng.choice((0, rng.randint(1, 20))) for _ in range(2))
    both_ways = _rate(rng, costs.experts[0].copy_permille < 1000)
    shared = costs.map_experts(lambda expert: expert._replace(first_gpu_ns=first_ns, both_ways_permille=both_ways))
    return replace(shared, first_expert_launch_ns=launch_ns)


def _rate(rng: random.Random, contended: bool) -> int:
    """In permille of the rate alone."""
    return rng.randint(300, 999) if contended else 1000


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
        reach = max(shape.moe_layers - key.layers_ahead, 0)
        about = rows_apart(trace, lookahead) if key.by_token else np.arange(len(trace))
        for row, layer in np.argwhere(draw.random((len(trace), reach)) < 0.5):
            likely[row, layer, trace.topk_ids[about[row], layer + key.layers_ahead]] += 1
        ids = np.argsort(-likely, axis=-1).astype(np.int16)
        scores = np.take_along_axis(likely, ids.astype(np.int64), axis=-1).astype(np.float16)
        ids[:, reach:] = -1
        tensors |= {key.ids_name: ids, key.scores_name: scores}
    return Trace.from_tensors(shape, tensors, trace.provenance)


def with_drafts(world: World) -> World:
    """The world with a batch of 1, of which steps verify two drafts, and compute tokens again where one is rejected."""
    costs = replace(world.costs, draft=DraftWork(1, world.trace.shape.top_k))
    return replace(world, batch=1, costs=costs, draft_shares=(0.7, 0.4))


# --- fixed worlds -----------------------------------------------------------------------------------------------------


def fixed_world(policy: str | System) -> World:
    """The same world in every process."""
    system = _system(policy)
    rng = random.Random(f"world of {system.name}")
    return replace(random_world(system, fixed_trace(np.random.default_rng(5)), rng), cache_bytes=1500)


def fixed_trace(rng: np.random.Generator) -> Trace:
    """Three sequences of 4 prompt and 6 decode tokens; 3 layers of 8 experts, 2 of them chosen."""
    return scored_trace(rng, toy_shape(3, 8, 2), sequences=3, prompt=4, decode=6)


def scored_trace(rng: np.random.Generator, shape: ModelShape, sequences: int, prompt: int, decode: int) -> Trace:
    """Equal sequences, routed at random, with the scores of all experts."""
    places = token_places([(prompt, decode)] * sequences)
    size = len(places["sequence"]), shape.moe_layers, shape.experts
    return Trace.from_tensors(shape, places | scored_routing(rng, size, shape.top_k), {"model": "fixed"})
