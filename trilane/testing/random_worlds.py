"""Worlds for any policy: random ones, one that is fixed, and those at the edge of what can be."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from policies.mechanism.host_keeping import Keeping
from policies.mechanism.views import ExpertCosts
from policies.protocols import Needs
from policies.registry import SYSTEMS, System
from sim.costs.cost_table import CostError, CostTable, DraftWork, StepCosts
from sim.costs.engine_costs import with_narrow_copies
from sim.machine.plan_costs import PlanCost, PlanCosts
from traces.layout import ForecastKey
from traces.models.shape import ModelShape
from traces.trace import Trace, rows_apart
from trilane.testing.worlds import World, composition_of, scored_routing, token_places, toy_shape, traces

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
    """Costs where the experts of a layer may share kernels and a launch, and write-backs, if CPU experts and copies do,
    slow copies down.
    """
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


def with_disk(world: World, rng: random.Random, disks: int = 1) -> World:
    """The world with a disk, or with several that serve each read together, above which the host has room for anything
    from two experts to all of them."""
    costs = world.costs.map_experts(lambda expert: with_read(expert, -(-rng.randint(1, 200) // disks)))
    sizes, experts = [expert.expert_bytes for expert in costs.experts], world.trace.shape.experts
    least, total = 2 * max(sizes), sum(sizes) * experts
    host = max(least, rng.choice((least, least + 1, sizes[0] * experts, total // 3, total // 2, total - 1, total)))
    return replace(world, costs=costs, host_bytes=host, keeping=rng.choice(get_args(Keeping)))


def with_read(costs: ExpertCosts, read_ns: int) -> ExpertCosts:
    """Costs of experts that a disk holds, too; a narrow copy's read takes less, as its copy does."""
    narrow = costs.narrow
    if narrow is not None:
        narrow = narrow._replace(costs=narrow.costs._replace(read_ns=max(1, read_ns // 2)))
    return costs._replace(read_ns=read_ns, narrow=narrow)


def with_pool(world: World, rng: random.Random) -> World:
    """The world with a pool of threads on the CPU and with copies that the GPU makes itself, or with one of both."""
    both = rng.randint(0, 2)
    costs = replace(
        world.costs, kernel_copies=both != 1, permille_before_barrier=None if both == 2 else rng.randint(1, 1000),
        barrier_ns=rng.randint(0, 9), step_ns=rng.choice((0, rng.randint(1, 40))),
    )
    return replace(world, costs=costs)


def with_drafts(world: World) -> World:
    """The world with a batch of 1, of which steps verify two drafts, and compute tokens again where one is rejected."""
    costs = replace(world.costs, draft=DraftWork(1, world.trace.shape.top_k))
    return replace(world, batch=1, costs=costs, draft_shares=(0.7, 0.4))


# --- fixed worlds -----------------------------------------------------------------------------------------------------


def fixed_world(policy: str | System) -> World:
    """A world of the policy that is equal in every process."""
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


# --- models, memories and batches at the edge of what can be ----------------------------------------------------------

SLOT = 100  # bytes of an expert, where all are alike


@dataclass(frozen=True)
class Size:
    """A model, a memory and a batch. ``expert_bytes`` by layer, repeated; ``cache_bytes`` None: room for all."""

    name: str
    layers: int = 3
    experts: int = 6
    top_k: int = 2
    sequences: int = 1
    prompt: int = 3
    decode: int = 3
    chunk: int | None = None
    cache_bytes: int | None = 7 * SLOT
    expert_bytes: tuple[int, ...] = (SLOT,)

    def __str__(self) -> str:
        return self.name

    @property
    def uniform(self) -> bool:
        return len(set(self.expert_bytes)) == 1

    def world(self, system: System, **parameters: object) -> World:
        """The system at this size, on a machine that is the same in every process."""
        rng = random.Random(f"{system.name} at {self.name}")
        shape = toy_shape(self.layers, self.experts, self.top_k)
        sizes = [self.expert_bytes[layer % len(self.expert_bytes)] for layer in range(self.layers)]
        cache = sum(sizes) * self.experts if self.cache_bytes is None else self.cache_bytes
        trace = scored_trace(np.random.default_rng(1), shape, self.sequences, self.prompt, self.decode)
        costs = costs_with_copies(random_costs(sizes, rng, rng.random() < 0.5), system.needs, self.experts)
        world = World(
            system, trace, costs, self.sequences, cache,
            prefill_chunk_tokens=self.chunk, parameters=parameters,
        )
        return replace(world, trace=with_forecasts(trace, composition_of(world).needs, rng))


ORDINARY = Size("ordinary")
SIZES = (
    ORDINARY,
    Size("no slot", cache_bytes=0),
    Size("one byte short of a slot", cache_bytes=SLOT - 1),
    Size("one slot", cache_bytes=SLOT),
    Size("one slot a layer", cache_bytes=3 * SLOT),
    Size("all resident", cache_bytes=None),
    Size("more room than experts", cache_bytes=10**6),
    Size("one expert", experts=1, top_k=1, cache_bytes=SLOT),
    Size("one expert, no slot", experts=1, top_k=1, cache_bytes=0),
    Size("all experts chosen", experts=4, top_k=4, cache_bytes=5 * SLOT),
    Size("one chosen", top_k=1),
    Size("one layer", layers=1, cache_bytes=3 * SLOT),
    Size("one of everything", layers=1, experts=1, top_k=1, prompt=1, decode=1, cache_bytes=0),
    Size("many layers", layers=7, prompt=2, decode=2, cache_bytes=20 * SLOT),
    Size("batch", sequences=3),
    Size("prefill only", decode=0),
    Size("decode only", prompt=0),
    Size("long prompt", prompt=14, decode=1),
    Size("chunked prefill", prompt=7, chunk=2),
    Size("chunked prefill of a batch", sequences=2, prompt=5, chunk=3),
    Size("sizes by layer", expert_bytes=(SLOT, 160, 40)),
    Size("sizes by layer, one slot", expert_bytes=(SLOT, 160, 40), cache_bytes=160),
)


def unsuited(system: System, size: Size) -> str | None:
    """The simulator's reason to refuse the system at this size, in its words; None if it must run."""
    needs = system.needs
    if needs.max_batch is not None and size.sequences > needs.max_batch:
        return f"takes batches of at most {needs.max_batch}, got {size.sequences}"
    if needs.uniform_sizes and not size.uniform:
        return "needs experts of one size"
    return None


# --- costs in other units of time -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ConstantSteps:
    """Costs that are equal for every step."""

    costs: StepCosts

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        return self.costs


def scaled(costs: CostTable, c: int) -> CostTable:
    """``costs`` with every time multiplied by the whole number ``c`` >= 1; ratios and sizes stay (law 9)."""
    if not isinstance(c, int) or c < 1:
        raise CostError(f"scaled: c must be a whole number >= 1 so that times stay whole, got {c!r}")
    draft = costs.draft._replace(**_times(costs.draft._asdict(), c))
    experts = costs.map_experts(lambda expert: _scaled_expert(expert, c)).experts
    return replace(costs, **_times(vars(costs), c), experts=experts, draft=draft, scale=costs.scale * c)


def _scaled_expert(costs: ExpertCosts, c: int) -> ExpertCosts:
    narrow = costs.narrow and costs.narrow._replace(costs=_scaled_expert(costs.narrow.costs, c))
    return costs._replace(**_times(costs._asdict(), c), narrow=narrow)


def _times(fields: Mapping[str, Any], c: int) -> dict[str, Any]:
    """The fields in ns, alone or by workload, times ``c``."""
    times = {name: ns for name, ns in fields.items() if name.split("_")[-1] == "ns" and ns is not None}
    return {name: ns * c if isinstance(ns, int) else tuple(time * c for time in ns) for name, ns in times.items()}
