"""Parts switched off: which there are, what takes their place, and what is needed no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.ablation import PARTS, rungs, without
from policies.assigners import LoadAll, ResidentOrCpu
from policies.caches import StaticCache
from policies.placements import NoPlacement
from policies.protocols import Composition, Needs
from policies.registry import BuildContext, ChoiceError, compose
from policies.routers import TrueRouter
from policies.smoe_router import CacheRouter
from tests.strategies import toy_calibration


def build(name: str, **parameters: Any) -> Composition:
    return compose(name, parameters, context=BuildContext("toy", 8, 2, calibration=toy_calibration(2, 8, 2)))


class Committing(TrueRouter):
    """A router that may look at forecasts, as far as anybody can tell."""


def bold(**needs: Any) -> Composition:
    """DALI with a router of its own."""
    dali = build("dali")
    return replace(dali, router=Committing(), needs=replace(dali.needs, changes_routing=True, **needs))


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("dali", {}, ("placement", "assigner", "cache", "prefetcher")),
        ("dali", {"prefetch": 0}, ("placement", "assigner", "cache")),
        ("fiddler", {}, ("placement", "assigner")),
        ("layer-wise", {}, ("placement",)),
        ("on-demand", {}, ("cache",)),
        ("on-demand", {"pool": True}, ("cache",)),
    ],
)
def test_parts_that_do_something(name: str, parameters: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert rungs(build(name, **parameters)) == expected


def test_a_router_is_the_last_rung() -> None:
    assert rungs(bold()) == PARTS


def test_with_all_parts_off_experts_are_computed_where_they_lie() -> None:
    bare = without(bold(), PARTS)
    assert [type(getattr(bare, name)) for name in PARTS] == [
        NoPlacement, ResidentOrCpu, StaticCache, type(None), TrueRouter
    ]  # fmt: skip
    assert bare.needs == Needs()
    assert (bare.prefetch_slots, bare.demand_slots) == (0, 2)
    assert bare.name == "dali"
    assert rungs(bare) == ()


def test_who_runs_on_the_gpu_alone_loads_all() -> None:
    bare = without(build("on-demand"), PARTS)
    assert isinstance(bare.assigner, LoadAll)
    assert isinstance(bare.cache, StaticCache)
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


@pytest.mark.parametrize(
    ("name", "off", "cost"),
    [
        ("dali-ilp", ("cache",), "dali-ilp"),
        ("dali-ilp", ("assigner",), "default"),  # it still looks at forecasts
        ("dali-ilp", ("assigner", "prefetcher"), "layer-wise"),
        ("on-demand", ("cache",), ""),
    ],
)
def test_deciding_costs_what_the_parts_that_are_on_cost(name: str, off: tuple[str, ...], cost: str) -> None:
    assert without(build(name), off).decision_cost == cost


def test_no_such_part() -> None:
    with pytest.raises(ChoiceError, match="no part 'engine' to switch off; there are placement, assigner, cache,"):
        without(build("dali"), ["cache", "engine"])
