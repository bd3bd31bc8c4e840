"""Policies that nobody would write: every part answers at random, within the rules, and the mechanism must cope."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from policies.mechanism.views import Assignment, Commitment, ExpertId, Forecast, LayerView, Routing, Swap
from policies.parts.assigners import settle
from policies.parts.caches import LfuCache, LruCache, RandomCache
from policies.parts.host_level import PinnedShare
from policies.parts.placements import NoPlacement, PoolPlacement, RandomPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Cache, Composition, HostCache, Needs, Prefetcher, Router, When
from sim.runs.demand import StepDemand, demand_of
from traces.batches import compose as compose_batch
from traces.trace import Trace
from trilane.testing.random_worlds import random_world, with_forecasts
from trilane.testing.worlds import PlayedWorld, World, play_policy, toy_shape

FORECASTS: tuple[tuple[tuple[str, int], ...], ...] = (
    (), (("gate", 1),), (("partial", 1),), (("gate", 1), ("gate", 2)), (("partial", 1), ("gate", 1)),
)


class FreeRouter:
    """Sometimes substitutes a layer's experts, sometimes commits the next layer's, with some of them computed ahead."""

    looks_ahead = True

    def __init__(self, rng: random.Random, experts: int, commits: float, substitutes: float) -> None:
        self.rng, self.experts, self.commits, self.substitutes = rng, experts, commits, substitutes

    def route(self, view: LayerView) -> Routing:
        return self._any() if self.rng.random() < self.substitutes else view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        if self.rng.random() >= self.commits:
            return None
        routing = self._any()
        absent = [e for e in routing.active if e not in view.residency.resident[view.layer + 1]]
        return Commitment(routing, tuple(absent[: self.rng.randint(0, len(absent))]))

    def _any(self) -> Routing:
        active = tuple(sorted(self.rng.sample(range(self.experts), self.rng.randint(1, self.experts))))
        return Routing(active, tuple(self.rng.randint(1, 4) for _ in active))


class FreePrefetcher:
    """Any experts of the next layers, in any order; protects any residents."""

    def __init__(self, rng: random.Random, experts: int, into: str) -> None:
        self.rng, self.experts, self.into = rng, experts, into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        layers = range(view.layer + 1, min(len(view.costs), view.layer + 4))
        ids = [ExpertId(layer, expert) for layer in layers for expert in range(self.experts)]
        self.rng.shuffle(ids)
        return ids[: self.rng.randint(0, 8)]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        ids = [ExpertId(layer, e) for layer, held in enumerate(view.residency.resident) for e in sorted(held)]
        return frozenset(id for id in ids if self.rng.random() < 0.2)


class FreeAssigner:
    """Each expert anywhere, in any order; sometimes with a few that nobody uses, be they there, on their way or not,
    and with CPU experts that join the next layer."""

    def __init__(self, rng: random.Random, experts: int, gpu_only: bool, streams: float, defers: bool) -> None:
        self.rng, self.experts, self.gpu_only, self.streams, self.defers = rng, experts, gpu_only, streams, defers

    def assign(self, view: LayerView) -> Assignment:
        found = settle(view, [self.gpu_only or self.rng.random() < 0.5 for _ in view.routing.active])
        loads, cpu = list(found.loads), list(found.cpu)
        self.rng.shuffle(loads)
        self.rng.shuffle(cpu)
        made = found._replace(loads=tuple(loads), cpu=tuple(cpu), streamed=self._idle(view))
        return made._replace(deferred=self._later(view, made.cpu)) if self.defers else made

    def _later(self, view: LayerView, cpu: tuple[int, ...]) -> tuple[int, ...]:
        """Some of the CPU's share, from its end."""
        return () if view.layer == len(view.costs) - 1 else cpu[self.rng.randint(0, len(cpu)) :]

    def _idle(self, view: LayerView) -> tuple[int, ...]:
        idle = [expert for expert in range(self.experts) if expert not in view.routing.active]
        return tuple(self.rng.sample(idle, self.rng.randint(0, len(idle)))) if self.rng.random() < self.streams else ()


class FreeCache:
    """A known cache that declines at times, and swaps any residents of any layer at any time."""

    def __init__(self, rng: random.Random, experts: int, inner: Cache) -> None:
        self.rng, self.experts, self.inner, self.admits = rng, experts, inner, inner.admits
        self.observe, self.admitted, self.evicted = inner.observe, inner.admitted, inner.evicted

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        return self.rng.sample(list(incoming), len(incoming))

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return None if self.rng.random() < 0.2 else self.inner.victim(incoming, group, blocked)

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        if self.rng.random() < 0.6:
            return ()
        layer = view.layer if self.rng.random() < 0.5 else self.rng.randrange(len(view.costs))
        there = sorted(view.residency.resident[layer])
        absent = [e for e in range(self.experts) if e not in there]
        self.rng.shuffle(there)
        self.rng.shuffle(absent)
        pairs = zip(absent, there, strict=False)
        return [Swap(ExpertId(layer, new), ExpertId(layer, old)) for new, old in pairs][: self.rng.randint(0, 3)]


class FreeHostCache:
    """A known cache for the host's memory that admits, and gives up members, when it pleases."""

    def __init__(self, rng: random.Random, inner: HostCache, declines: float) -> None:
        self.rng, self.inner, self.admits, self.declines = rng, inner, True, declines
        self.admitted, self.evicted = inner.admitted, inner.evicted

    def observe(self, view: LayerView) -> None:
        self.admits = self.rng.random() < 0.7
        self.inner.observe(view)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return None if self.rng.random() < self.declines else self.inner.victim(incoming, group, blocked)


def with_free_host(policy: Composition, rng: random.Random, layers: int, experts: int, declines: float) -> Composition:
    """The composition with a cache for the host's memory, and perhaps reads ahead."""
    ids = [ExpertId(layer, expert) for layer in range(layers) for expert in range(experts)]
    inner: HostCache = rng.choice((LruCache(), LfuCache(), PinnedShare(0.5, LruCache())))
    return replace(
        policy, host_cache=FreeHostCache(rng, inner, declines), host_by_layer=rng.random() < 0.5,
        host_start=rng.choice((None, (), rng.sample(ids, len(ids)))),
        host_prefetcher=rng.choice((None, FreePrefetcher(rng, experts, "cache"))),
    )


def play_freely(seed: int, **parts: object) -> tuple[World, PlayedWorld]:
    """A free composition in a random world; ``parts`` fixes fields of the composition."""
    world, policy, demand = free_question(seed, **parts)
    return world, play_policy(policy, world, demand)


def free_question(seed: int, **parts: object) -> tuple[World, Composition, list[StepDemand]]:
    """A random world, a free composition that has not run, and what is asked of it; the same for the same seed."""
    rng = random.Random(seed)
    layers, experts = rng.randint(1, 5), rng.choice((1, 3, 4, 8))
    trace = _trace(np.random.default_rng(seed), layers, experts, rng.randint(1, min(experts, 3)), rng.randint(1, 3))
    world = random_world("on-demand", trace, rng)
    world = replace(world, cache_bytes=rng.choice((0, 99, 100, 160, 250, 500, world.cache_bytes, 10**6)), seed=seed)
    policy = replace(free_composition(rng, seed, experts), **parts)
    trace = with_forecasts(trace, policy.needs, rng)
    batch = compose_batch(trace, batch=world.batch, prefill_chunk_tokens=rng.choice((None, 1, 2)))
    return world, policy, demand_of(trace, batch, policy.needs)


def free_composition(rng: random.Random, seed: int, experts: int) -> Composition:
    """Draw every part."""
    inner: Cache = rng.choice((LruCache(), LfuCache(rng.random() < 0.5), RandomCache(seed)))
    free = [FreeRouter(rng, experts, commits, substitutes) for commits, substitutes in ((0.5, 0), (0.5, 0.5), (1, 0))]
    router: Router = rng.choice((TrueRouter(), *free))
    defers = type(router) is TrueRouter and seed % 2 == 0  # others do not say whose experts a token has
    prefetcher: Prefetcher | None = rng.choice(
        (None, FreePrefetcher(rng, experts, "cache"), FreePrefetcher(rng, experts, "staging"))
    )
    return Composition(
        name="free", placement=rng.choice((PoolPlacement(), NoPlacement(), RandomPlacement(seed))), router=router,
        assigner=FreeAssigner(rng, experts, rng.random() < 0.3, rng.choice((0, 0.3, 1)), defers), prefetcher=prefetcher,
        cache=FreeCache(rng, experts, inner) if rng.random() < 0.7 else inner,
        needs=Needs(forecasts=rng.choice(FORECASTS), tokens=defers, changes_routing=defers),
        swaps_before_prefetches=rng.random() < 0.5, writes_back=rng.choice(("never", "alongside", "in turn")),
        demand_slots=rng.randint(1, 3), prefetch_slots=rng.randint(0, 3), awaits_swaps=seed % 3 == 0,
    )


def _trace(rng: np.random.Generator, layers: int, experts: int, top_k: int, sequences: int) -> Trace:
    prompt, decode = (int(n) for n in rng.integers(1, (4, 6)))
    length = prompt + decode
    scores = rng.dirichlet(np.full(experts, 0.5), (sequences * length, layers)).astype(np.float16)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    tensors = {
        "sequence": np.repeat(np.arange(sequences), length).astype(np.int32),
        "position": np.tile(np.arange(length), sequences).astype(np.int32),
        "phase": np.tile([0] * prompt + [1] * decode, sequences).astype(np.uint8),
        "topk_ids": ids.astype(np.int16), "topk_weights": np.take_along_axis(scores, ids, axis=-1), "scores": scores,
    }
    return Trace.from_tensors(toy_shape(layers, experts, top_k), tensors, {"model": "free"})
