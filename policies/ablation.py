"""Ablation: which parts a composition has, and the same composition with some of them switched off.

A part that is off decides as little as possible: no residents at the start, experts computed where they are (copied, if
a policy runs on the GPU alone), a cache that never changes, no prefetches, the router's own experts. Whatever other
parts take from it stays: the slots of a placement and the result of its search, the statistics of a cache. Prefetches
that went to the cache go to staging slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.papers.adapmoe import SlotsByMisses
from policies.parts.assigners import LoadAll, ResidentOrCpu
from policies.parts.caches import StaticCache
from policies.parts.placements import NoPlacement, Pooled, PoolPlacement
from policies.parts.routers import TrueRouter
from policies.parts.upload_cache import CountedSlots
from policies.protocols import Budget, Cache, Composition, InitialPlacement, Needs, Placement, Prefetcher
from policies.system import ChoiceError

PARTS = ("placement", "assigner", "cache", "prefetcher", "router")  # in the order in which a ladder adds them
PREFETCH_SLOTS = 4  # staging slots of prefetches that have no cache to go to


class EmptyPlacement:
    """The slots of another placement, empty."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def place(self, budget: Budget) -> InitialPlacement:
        return replace(self.placement.place(budget), residents=((),) * budget.layers)


class FrozenCache(StaticCache):
    """Stays as it was placed. The cache that it replaces keeps observing, for parts that read it."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def observe(self, view: LayerView) -> None:
        self.cache.observe(view)

    def admitted(self, key: ExpertId, group: int) -> None:
        self.cache.admitted(key, group)


class StagedPrefetcher:
    """The prefetches of another, into staging slots."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        return self.prefetcher.rank(view, forecasts, plan)

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return self.prefetcher.protect(view, forecasts)


_WRAPPERS = (Pooled, CountedSlots)
_EMPTY = (NoPlacement, PoolPlacement, SlotsByMisses, EmptyPlacement)


def rungs(composition: Composition) -> tuple[str, ...]:
    """The parts that do something, in the order of ``PARTS``: those that can be switched off."""
    placement = composition.placement
    idle = {
        "placement": isinstance(placement.placement if isinstance(placement, _WRAPPERS) else placement, _EMPTY),
        "assigner": type(composition.assigner) is _idle_assigner(composition),
        "cache": type(composition.cache) in (StaticCache, FrozenCache),
        "prefetcher": composition.prefetcher is None,
        "router": type(composition.router) is TrueRouter,
    }
    return tuple(name for name in PARTS if not idle[name])


def without(composition: Composition, parts: Collection[str]) -> Composition:
    """A policy with ``parts`` switched off, and without the needs of these alone. Raises ChoiceError for a name that is
    no part.

    The parts that stay are those of ``composition``, which hold the state of a run: pass a fresh one for every run.
    """
    if unknown := [name for name in parts if name not in PARTS]:
        raise ChoiceError(f"there is no part {unknown[0]!r} to switch off; there are {', '.join(PARTS)}")
    off = {name: part for name, part in _off(composition).items() if name in parts and name in rungs(composition)}
    if not off:
        return composition
    less = replace(composition, **off)
    if "cache" in off and less.prefetcher is not None and less.prefetcher.into == "cache":
        less = replace(less, prefetcher=StagedPrefetcher(less.prefetcher))
    needs = _needs(composition, less)
    return replace(
        less, needs=needs, prefetch_slots=_prefetch_slots(less), decision_cost=_decision_cost(composition, less, needs)
    )


def _off(composition: Composition) -> dict[str, Any]:
    """Each part as it is when switched off."""
    return {
        "placement": EmptyPlacement(composition.placement),
        "assigner": _idle_assigner(composition)(),
        "cache": FrozenCache(composition.cache),
        "prefetcher": None,
        "router": TrueRouter(),
    }


def _idle_assigner(composition: Composition) -> type[LoadAll | ResidentOrCpu]:
    return LoadAll if composition.needs.gpu_only else ResidentOrCpu


def _needs(whole: Composition, less: Composition) -> Needs:
    """Forecasts are for prefetchers, and for routers that commit to them. It is the router that changes the routing
    or, where that is the model's own, the assigner (which defers experts)."""
    needs = less.needs
    if less.prefetcher is None and less.host_prefetcher is None and not less.router.looks_ahead:
        needs = replace(needs, forecasts=())
    part = "assigner" if type(whole.router) is TrueRouter else "router"
    kept = type(getattr(less, part)) is type(getattr(whole, part))
    return replace(needs, changes_routing=needs.changes_routing and kept)


def _prefetch_slots(less: Composition) -> int:
    """0 without prefetches; some for prefetches that the policy would put into its cache."""
    if less.prefetcher is None:
        return 0
    staged = isinstance(less.prefetcher, StagedPrefetcher)
    return max(less.prefetch_slots, PREFETCH_SLOTS if staged else 0)


def _decision_cost(whole: Composition, less: Composition, needs: Needs) -> str:
    """The assigner takes most of the time of a decision. Without it, the cost is that of policies that have none, or
    the default if forecasts are still read. A clairvoyant policy decides for free in any case."""
    if type(less.assigner) is type(whole.assigner) or needs.future:
        return whole.decision_cost
    if needs.forecasts:
        return "default"
    return "on-demand" if needs.gpu_only else "layer-wise"
