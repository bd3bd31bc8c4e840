"""Parts of a policy switched off: which parts a composition has, and the same composition without some of them.

A part that is off decides as little as it can: nobody on the GPU at the start, experts computed where they lie (copied,
where a policy runs on the GPU alone), a cache that never changes, no prefetches, the router's own experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from policies.assigners import LoadAll, ResidentOrCpu
from policies.caches import StaticCache
from policies.placements import NoPlacement, PoolPlacement
from policies.protocols import Composition, Needs
from policies.routers import TrueRouter
from policies.smoe_router import CacheRouter
from policies.system import ChoiceError

PARTS = ("placement", "assigner", "cache", "prefetcher", "router")  # in the order in which a ladder adds them

_BLIND = (TrueRouter, CacheRouter)  # routers that look at no forecast


def rungs(composition: Composition) -> tuple[str, ...]:
    """The parts that do something, in the order of ``PARTS``: those that can be switched off."""
    off = _off(composition)
    present = {name: getattr(composition, name) for name in PARTS}
    if isinstance(present["placement"], PoolPlacement):  # nobody is in the pool at the start
        present["placement"] = off["placement"]
    return tuple(name for name in PARTS if type(present[name]) is not type(off[name]))


def without(composition: Composition, parts: Collection[str]) -> Composition:
    """The same policy with ``parts`` switched off, and without what only they needed. Raises ChoiceError for a name
    that is no part.

    The parts that stay are those of ``composition``, which learn as they run: give a fresh one for every run.
    """
    if strangers := [name for name in parts if name not in PARTS]:
        raise ChoiceError(f"there is no part {strangers[0]!r} to switch off; there are {', '.join(PARTS)}")
    off = {name: part for name, part in _off(composition).items() if name in parts and name in rungs(composition)}
    if not off:
        return composition
    less = replace(composition, **off)
    needs = _needs(less)
    return replace(
        less,
        needs=needs,
        prefetch_slots=0 if less.prefetcher is None else less.prefetch_slots,
        decision_cost=_decision_cost(composition, less, needs),
    )


def _off(composition: Composition) -> Mapping[str, Any]:
    """Each part as it is when it is off."""
    return {
        "placement": NoPlacement(),
        "assigner": LoadAll() if composition.needs.gpu_only else ResidentOrCpu(),
        "cache": StaticCache(),
        "prefetcher": None,
        "router": TrueRouter(),
    }


def _needs(less: Composition) -> Needs:
    """Forecasts are for the prefetcher, and for routers that commit to them. Only a router changes the routing."""
    needs = less.needs
    if less.prefetcher is None and type(less.router) in _BLIND:
        needs = replace(needs, forecasts=())
    return replace(needs, changes_routing=needs.changes_routing and type(less.router) is not TrueRouter)


def _decision_cost(whole: Composition, less: Composition, needs: Needs) -> str:
    """Deciding is mostly assigning. Without an assigner it costs what it costs those that never had one, or the default
    where forecasts are still looked at. Who knows the future decides for free in any case."""
    if type(less.assigner) is type(whole.assigner) or needs.future:
        return whole.decision_cost
    if needs.forecasts:
        return "default"
    return "on-demand" if needs.gpu_only else "layer-wise"
