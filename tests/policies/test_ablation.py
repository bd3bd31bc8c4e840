"""Parts switched off: which there are, what takes their place, and what is needed no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.ablation import PARTS, PREFETCH_SLOTS, EmptyPlacement, FrozenCache, StagedPrefetcher, rungs, without
from policies.mechanism.views import ExpertCosts, ExpertId
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.smoe import CacheRouter
from policies.parts.assigners import LoadAll, ResidentOrCpu
from policies.parts.placements import RandomPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Budget, Composition, InitialPlacement, Needs
from policies.registry import SYSTEMS, BuildContext, ChoiceError, compose
from tests.kit.views import scored_view
from trilane.testing.worlds import toy_calibration


def build(name: str, **parameters: Any) -> Composition:
    costs = [ExpertCosts((0, 10), (0, 40), 5, 70, 1)] * 2
    context = BuildContext("toy", 8, 2, costs=costs, calibration=toy_calibration(2, 8, 2))
    return compose(name, parameters, context=context)


class Committing(TrueRouter):
    """A router that says that it looks at forecasts."""

    looks_ahead = True


def bold(**needs: Any) -> Composition:
    """DALI with a router of its own."""
    dali = build("dali")
    return replace(dali, router=Committing(), needs=replace(dali.needs, changes_routing=True, **needs))


@pytest.mark.parametrize(("name", "parameters", "expected"), [
    ("dali", {}, ("placement", "assigner", "cache", "prefetcher")),
    ("dali", {"prefetch": 0}, ("placement", "assigner", "cache")),
    ("fiddler", {}, ("placement", "assigner")),
    ("layer-wise", {}, ("placement",)),
    ("on-demand", {}, ("cache",)),
    ("on-demand", {"pool": True}, ("cache",)),
    ("adapmoe", {}, ("placement", "cache", "prefetcher")),
    ("adapmoe", {"start": "empty"}, ("cache", "prefetcher")),  # its placement only divides the budget
    ("mix", {"placement": "none", "pool": True, "prefetch": "none"}, ("assigner", "cache")),
])
def test_parts_that_do_something(name: str, parameters: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert rungs(build(name, **parameters)) == expected


def test_a_router_is_the_last_rung() -> None:
    assert rungs(bold()) == PARTS


def test_with_all_parts_off_experts_are_computed_where_they_lie() -> None:
    bare = without(bold(), PARTS)
    assert [type(getattr(bare, name)) for name in PARTS] == [
        EmptyPlacement, ResidentOrCpu, FrozenCache, type(None), TrueRouter
    ]
    assert bare.needs == Needs()
    assert (bare.prefetch_slots, bare.demand_slots) == (0, 2)
    assert bare.name == "dali"
    assert rungs(bare) == ()


def test_who_runs_on_the_gpu_alone_loads_all() -> None:
    bare = without(build("on-demand"), PARTS)
    assert isinstance(bare.assigner, LoadAll)
    assert isinstance(bare.cache, FrozenCache)
    assert bare.needs.gpu_only


def test_the_other_parts_and_what_they_need_stay() -> None:
    dali = build("dali")
    for part in rungs(dali):
        less = without(dali, [part])
        kept = [name for name in PARTS if name != part]
        assert [getattr(less, name) for name in kept] == [getattr(dali, name) for name in kept]
        assert getattr(less, part) is not getattr(dali, part)
        assert (less.needs == dali.needs) == (part != "prefetcher")
        assert (less.prefetch_slots == dali.prefetch_slots) == (part != "prefetcher")


def test_nothing_off_is_the_policy_itself() -> None:
    dali = build("dali")
    assert without(dali, ()) is dali
    assert without(dali, ["router"]) is dali  # it is the true one already


def test_forecasts_go_with_the_last_part_that_looks_at_them() -> None:
    """A router may commit to forecasts; SMoE's never does."""
    forecasts = (("residual", 1),)
    assert without(bold(), ["prefetcher"]).needs.forecasts == forecasts
    assert without(bold(), ["router"]).needs.forecasts == forecasts
    assert without(bold(), ["prefetcher", "router"]).needs.forecasts == ()
    assert without(replace(bold(), router=CacheRouter(0.25)), ["prefetcher"]).needs.forecasts == ()


def test_only_the_router_changes_the_routing() -> None:
    assert without(bold(), ["cache", "prefetcher"]).needs.changes_routing
    assert not without(bold(), ["router"]).needs.changes_routing


def test_what_others_may_need_is_kept() -> None:
    needs = without(bold(scores=True, tokens=True, future=True, max_batch=1), PARTS).needs
    assert needs == Needs(scores=True, tokens=True, future=True, max_batch=1)


@pytest.mark.parametrize(("name", "off", "cost"), [
    ("dali-ilp", ("cache",), "dali-ilp"),
    ("dali-ilp", ("assigner",), "default"),  # it still looks at forecasts
    ("dali-ilp", ("assigner", "prefetcher"), "layer-wise"),
    ("on-demand", ("cache",), ""),
])
def test_deciding_costs_what_the_parts_that_are_on_cost(name: str, off: tuple[str, ...], cost: str) -> None:
    assert without(build(name), off).decision_cost == cost


def test_no_such_part() -> None:
    with pytest.raises(ChoiceError, match="no part 'engine' to switch off; there are placement, assigner, cache,"):
        without(build("dali"), ["cache", "engine"])


# --- what the others take from a part that is off ---------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, (3, 1)])
def test_a_placement_that_is_off_keeps_its_slots(slots: tuple[int, ...] | None) -> None:
    class Uneven(RandomPlacement):
        def place(self, budget: Budget) -> InitialPlacement:
            return InitialPlacement(slots, ((0, 1), (2,)))

    less = without(replace(build("dali"), placement=Uneven(0)), ["placement"])
    assert less.placement.place(Budget(8, (1, 1), 4)) == InitialPlacement(slots, ((), ()))


def test_a_search_tells_the_other_parts_where_it_seats_nobody() -> None:
    """MoE-Lightning's assigner and prefetcher go on by the plan that its placement finds."""
    budget, whole = Budget(8, (1, 1), 4), build("moe-lightning")
    searched = build("moe-lightning").placement.place(budget)
    assert sum(map(len, searched.residents)) > 0
    assert without(whole, ["placement"]).placement.place(budget) == replace(searched, residents=((), ()))
    assert len(whole.assigner._streamed) == 2  # type: ignore[attr-defined]  # a layer each


def test_a_cache_that_is_off_goes_on_learning() -> None:
    cache = MrsCache(2, 4, 2, 0.5)
    frozen = FrozenCache(cache)
    before = list(cache.scores(0))
    frozen.observe(scored_view([[0.1, 0.2, 0.3, 0.4]], 2))
    assert list(cache.scores(0)) != before
    assert not frozen.admits
    frozen.admitted(ExpertId(0, 1), 0)
    assert cache.victim(ExpertId(0, 2), 0, ()) == ExpertId(0, 1)  # it knows who is there
    assert frozen.victim(ExpertId(0, 2), 0, ()) is None


@pytest.mark.parametrize("name", ["hybrimoe", "moe-infinity", "edgemoe", "adapmoe"])
def test_prefetches_that_have_lost_their_cache_are_staged(name: str) -> None:
    less = without(build(name), ["cache"])
    assert isinstance(less.prefetcher, StagedPrefetcher)
    assert (less.prefetcher.into, less.prefetch_slots) == ("staging", PREFETCH_SLOTS)
    assert less.needs == build(name).needs
    assert without(build(name), ["cache", "prefetcher"]).prefetch_slots == 0
    assert without(build(name), ["placement"]).prefetch_slots == 0, "those that go to the cache need no staging"


def test_prefetches_that_were_staged_stay_as_they_are() -> None:
    dali = build("dali")
    less = without(dali, ["cache"])
    assert (less.prefetcher, less.prefetch_slots) == (dali.prefetcher, dali.prefetch_slots)


@pytest.mark.parametrize("name", [name for name, entry in SYSTEMS.items() if not entry.needs.future])
def test_routers_say_whether_they_look_ahead(name: str) -> None:
    """Who needs forecasts, and has no prefetcher for GPU or host, has a router that looks at them."""
    built = build(name)
    if built.prefetcher is None and built.host_prefetcher is None and built.needs.forecasts:
        assert built.router.looks_ahead
