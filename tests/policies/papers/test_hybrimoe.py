"""HybriMoE: its schedule, and the whole policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.mechanism.views import INFINITE_NS, Assignment, LayerView
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.hybrimoe.prefetch import ImpactPrefetcher
from policies.papers.hybrimoe.schedule import Rule, Schedule, SimulationAssigner
from policies.papers.hybrimoe.system import CacheScorePrefetcher, HssAssigner
from policies.parts.assigners import ByPhase, LoadAll
from policies.parts.placements import PoolPlacement, PopularityPlacement, RandomPlacement
from policies.protocols import Composition
from policies.registry import BuildContext, ChoiceError, compose
from tests.kit.depth import examples
from tests.kit.views import costs, view, views
from trilane.testing.worlds import toy_calibration

UNITS = costs(gpu_ns=(1,) * 9, cpu_ns=tuple(range(1, 10)), copy_ns=3)  # as in Fig. 5: GPU 1, CPU as the load, copy 3


def assign(layer: LayerView, rule: Rule = "finish", guard: bool = True) -> Assignment:
    return SimulationAssigner(Schedule(rule, guard)).assign(layer)


def listing(layer: LayerView, rule: Rule, guard: bool) -> Assignment:
    """The loop of Section IV-B over experts: among all operations that are possible, the earliest is carried out."""
    cost, load, ready = layer.costs[0], layer.routing.workload(), layer.ready_ns
    queue = {e: ready[e] for e in load if ready[e] != INFINITE_NS}  # the GPU's: when each is there
    absent = {e for e in load if ready[e] == INFINITE_NS}
    cached = {e for e in load if ready[e] == 0}
    gpu, cpu, link, first = 0, layer.cpu_backlog_ns, layer.h2d_backlog_ns, cost.first_cpu_ns
    on_cpu: list[int] = []
    loads: list[int] = []
    while queue or absent:
        options: list[tuple[int, int, str, int]] = []  # key, order among equals, operation, expert
        if queue:
            there = [e for e in queue if queue[e] <= gpu or not guard]
            if there:
                head = min(there, key=lambda e: (-load[e], queue[e], e))
            else:
                head = min(queue, key=lambda e: (queue[e], -load[e], e))
            start = max(gpu, queue[head])
            options.append((start + cost.gpu_ns[load[head]] if rule == "finish" else start, 0, "gpu", head))
        takes = absent or cached & set(queue)
        if takes:
            tail = max(takes, key=lambda e: (-load[e], e))
            end = cpu + first + cost.cpu_ns[load[tail]]
            if absent or not guard or end <= end_of(queue, gpu, layer):
                options.append((end if rule == "finish" else cpu, 1, "cpu", tail))
        if absent:
            brought = max(absent, key=lambda e: (load[e], -e))
            here = link + cost.copy_ns
            done = here + cost.gpu_ns[load[brought]]
            too_late = guard and done > cpu + first + sum(cost.cpu_ns[load[e]] for e in absent)
            if rule == "finish":
                options.append((done if guard else here, 2, "load", brought))
            elif not too_late:
                options.append((link, 2, "load", brought))
        _, _, operation, expert = min(options)
        if operation == "gpu":
            gpu = max(gpu, queue.pop(expert)) + cost.gpu_ns[load[expert]]
        elif operation == "cpu":
            cpu, first = cpu + first + cost.cpu_ns[load[expert]], 0
            absent.discard(expert)
            queue.pop(expert, None)
            on_cpu.append(expert)
        else:
            link = queue[expert] = link + cost.copy_ns
            absent.remove(expert)
            loads.append(expert)
    on_gpu = sorted(set(load) - set(on_cpu))
    return Assignment(tuple(on_gpu), tuple(on_cpu), tuple(loads), max(gpu, cpu))


def end_of(queue: dict[int, int], now: int, layer: LayerView) -> int:
    """When the GPU is done with its queue, if it takes what comes first."""
    for expert in sorted(queue, key=queue.__getitem__):
        now = max(now, queue[expert]) + layer.costs[0].gpu_ns[layer.routing.workload()[expert]]
    return now


@pytest.mark.parametrize("rule", ["finish", "device_free"])
@pytest.mark.parametrize("guard", [True, False])
@settings(max_examples=examples(100))
@given(layer=views(most=14, longest_ns=40), link=st.integers(0, 60), cpu=st.integers(0, 60))
def test_is_the_listing(layer: LayerView, link: int, cpu: int, rule: Rule, guard: bool) -> None:
    layer = layer._replace(h2d_backlog_ns=link, cpu_backlog_ns=cpu)
    got, expected = assign(layer, rule, guard), listing(layer, rule, guard)
    assert got._replace(gpu=tuple(sorted(got.gpu))) == expected


@settings(max_examples=examples(75))
@given(data=st.data(), rule=st.sampled_from(["finish", "device_free"]))
def test_is_the_listing_where_many_are_cached(data: Any, rule: Rule) -> None:
    """Tables that grow, and a CPU fast enough to take cached experts."""
    gpu, cpu = (sorted(data.draw(st.lists(st.integers(1, 12), min_size=6, max_size=6))) for _ in range(2))
    cost = costs(gpu, cpu, first_cpu_ns=data.draw(st.integers(0, 9)), copy_ns=data.draw(st.integers(1, 20)))
    workload = data.draw(st.dictionaries(st.integers(0, 63), st.integers(1, 6), min_size=1, max_size=30))
    ready = {e: data.draw(st.sampled_from((0, 0, 0, 5, INFINITE_NS))) for e in sorted(workload)}
    link_ns = 5 if 5 in ready.values() else 0  # loads follow what is being copied
    layer = view(workload, cost, ready=ready)._replace(h2d_backlog_ns=link_ns)
    got = assign(layer, rule)
    assert got._replace(gpu=tuple(sorted(got.gpu))) == listing(layer, rule, guard=True)


@pytest.mark.parametrize("rule", ["finish", "device_free"])
def test_in_the_manner_of_figure_5(rule: Rule) -> None:
    # GPU 0 [0-1], 1 [1-2]; CPU 4 [0-1], 3 [1-3]; the link brings 2 (load 5) [0-3], which the GPU runs [3-4]; the CPU is
    # left with 5 [3-6], which a second copy would have brought only by 6, to be done at 7
    layer = view({0: 4, 1: 1, 2: 5, 3: 2, 4: 1, 5: 3}, UNITS, ready={0: 0, 1: 0})
    assert assign(layer, rule) == Assignment(gpu=(0, 1, 2), cpu=(4, 3, 5), loads=(2,), makespan_ns=6)


def test_equal_loads_go_over_the_link_from_the_lower_id_and_to_the_cpu_from_the_higher() -> None:
    # CPU 9 [0-2] and 7 [2-4] (done at 4 as a copy would be: ties to the CPU), link 1 [0-3], CPU 5 [4-6], link 3 [3-6]
    layer = view(dict.fromkeys((1, 3, 5, 7, 9), 2), UNITS)
    assert assign(layer) == Assignment((1, 3), (9, 7, 5), (1, 3), 7)


def test_the_cpu_takes_cached_experts_when_nobody_is_absent() -> None:
    # GPU 0 [0-1], CPU 3 [0-1], GPU 1 [1-2], CPU 2 [1-2]
    layer = view(dict.fromkeys(range(4), 1), UNITS, ready=dict.fromkeys(range(4), 0))
    assert assign(layer) == Assignment((0, 1), (3, 2), (), 2)


def test_the_first_expert_of_the_cpu_costs_more() -> None:
    slow_start = UNITS._replace(first_cpu_ns=2)
    layer = view({0: 1, 1: 1, 2: 1}, slow_start)
    # CPU 2 [0-3], 1 [3-4]; 0 would be copied by 3 and done at 4, which is when the CPU is done with 1: ties to the CPU;
    # then 0: CPU 5, link 4
    assert assign(layer) == Assignment((0,), (2, 1), (0,), 4)
    assert assign(view({0: 1}, slow_start._replace(first_cpu_ns=4))).gpu == (0,)  # 5 on the CPU, 4 by a copy


def test_a_copy_on_its_way_is_awaited_and_delays_the_loads() -> None:
    # 0 is here at 2; the link is free then, and brings 1 by 5: done at 6, before the CPU would be at 7; the CPU runs 2
    layer = view({0: 1, 1: 7, 2: 5}, UNITS, ready={0: 2})._replace(h2d_backlog_ns=2)
    assert assign(layer) == Assignment((0, 1), (2,), (1,), 6)
    assert assign(layer._replace(h2d_backlog_ns=20)).loads == ()


def test_rules_differ_when_the_device_that_is_free_is_slow() -> None:
    layer = view({0: 1}, UNITS._replace(first_cpu_ns=9))
    assert assign(layer) == Assignment((0,), (), (0,), 4)  # 10 on the CPU
    assert assign(layer, "device_free") == Assignment((), (0,), (), 10)  # CPU before link


def test_without_guard_a_useless_load_is_made() -> None:
    layer = view({0: 4}, UNITS._replace(gpu_ns=(0, 2, 2, 2, 2)))
    assert assign(layer) == Assignment((), (0,), (), 4)  # copied by 3, done at 5
    assert assign(layer, guard=False) == Assignment((0,), (), (0,), 5)


def test_without_guard_the_cpu_takes_cached_experts_that_lengthen_the_layer() -> None:
    layer = view({0: 3, 1: 3}, UNITS, ready={0: 0, 1: 0})
    assert assign(layer, "device_free") == Assignment((0, 1), (), (), 2)
    assert assign(layer, "device_free", guard=False) == Assignment((0,), (1,), (), 3)


def test_without_guard_the_gpu_waits_for_its_highest_load() -> None:
    layer = view({0: 1, 1: 5}, costs((1,) * 5, (50,) * 5, copy_ns=3), ready={0: 0, 1: 10})
    assert assign(layer).makespan_ns == 11
    assert assign(layer, guard=False).makespan_ns == 12
    equal = view({0: 5, 1: 5}, layer.costs[0], ready={0: 10, 1: 2})
    assert assign(equal, guard=False).makespan_ns == 11, "of equal loads the first to arrive"


def test_a_copy_on_its_way_is_never_left_to_the_cpu() -> None:
    layer = view({0: 1, 1: 1}, UNITS, ready={0: 100, 1: 90})
    for guard in (True, False):
        assert assign(layer, guard=guard)[:3] == ((1, 0), (), ())


# --- the released code ------------------------------------------------------------------------------------------------


def test_hss_by_hand() -> None:
    # the row: 0 (cached), then 2, 3, 1 by load. GPU 0: 1 <= 1. GPU 2: copied 3, 4 > 1, so the CPU takes 1 [0-1].
    # GPU 2: 4 > 3, CPU 3 [1-3]. GPU 2: 4 <= 8.
    layer = view({0: 4, 1: 1, 2: 5, 3: 2}, UNITS, ready={0: 0})
    assert HssAssigner().assign(layer) == Assignment((0, 2), (1, 3), (2,), 4)


def test_hss_lets_the_cpu_take_cached_experts_and_waits_for_the_link() -> None:
    cached = view(dict.fromkeys(range(4), 1), UNITS, ready=dict.fromkeys(range(4), 0))
    # GPU 0 [0-1]; GPU 1 would end at 2, CPU 3 at 1; GPU 1 [1-2] (tie); CPU 2 [1-2]
    assert HssAssigner().assign(cached) == Assignment((0, 1), (3, 2), (), 2)
    coming = view({0: 1, 1: 9}, UNITS, ready={0: 2})._replace(h2d_backlog_ns=2)
    # GPU 0 [2-3]; 1 is copied by 5, done at 6, before 9 on the CPU
    assert HssAssigner().assign(coming) == Assignment((0, 1), (), (1,), 6)


def built(name: str = "hybrimoe", **parameters: object) -> Composition:
    return compose(name, parameters, context=BuildContext("toy", 64, 3, top_k=6))


def test_as_published() -> None:
    policy = built()
    assert isinstance(policy.placement, RandomPlacement)
    assert isinstance(policy.assigner, SimulationAssigner)
    assert isinstance(policy.prefetcher, ImpactPrefetcher)
    assert isinstance(policy.cache, MrsCache)
    assert policy.prefetcher.schedule is policy.assigner.schedule
    assert (policy.assigner.schedule.rule, policy.assigner.schedule.guard) == ("finish", True)
    assert (policy.prefetcher.size, policy.prefetcher.discount, policy.prefetcher.pooled) == (4, 1.0, False)
    assert policy.prefetcher.arrival
    assert (policy.cache.keep, policy.cache.alpha, policy.cache.tokens) == (12, 0.3, "mean")
    assert policy.needs.forecasts == (("gate", 1), ("gate", 2), ("gate", 3))


def test_parameters_choose_the_readings() -> None:
    policy = built(rule="device_free", guard=False, prefetch=2, lookahead=1, discount=0.5, pool=True, keep=3)
    assert isinstance(policy.placement, PoolPlacement)
    assert isinstance(policy.assigner, SimulationAssigner)
    assert isinstance(policy.prefetcher, ImpactPrefetcher)
    assert isinstance(policy.cache, MrsCache)
    assert (policy.assigner.schedule.rule, policy.assigner.schedule.guard) == ("device_free", False)
    assert (policy.prefetcher.size, policy.prefetcher.discount, policy.prefetcher.pooled) == (2, 0.5, True)
    assert (policy.cache.keep, policy.needs.forecasts) == (3, (("gate", 1),))
    unhurried = built(arrival=False).prefetcher
    assert isinstance(unhurried, ImpactPrefetcher)
    assert not unhurried.arrival
    without = built(prefetch=0)
    assert (without.prefetcher, without.needs.forecasts) == (None, ())


def test_as_released() -> None:
    policy = built("hybrimoe@impl")
    assert isinstance(policy.assigner, ByPhase)
    assert isinstance(policy.assigner.prefill, LoadAll)
    assert isinstance(policy.assigner.decode, HssAssigner)
    assert isinstance(policy.cache, MrsCache)
    assert (policy.cache.keep, policy.cache.alpha, policy.cache.tokens) == (12, 0.5, "first")
    assert policy.prefetcher is None
    prefetcher = built("hybrimoe@impl", prefetch_size=2).prefetcher
    assert isinstance(prefetcher, CacheScorePrefetcher)
    assert (prefetcher.size, prefetcher.into) == (2, "cache")


@pytest.mark.parametrize(("name", "value"), [("discount", 2.0), ("lookahead", 4), ("rule", "latest"), ("prefetch", -1)])
def test_refuses_what_makes_no_sense(name: str, value: object) -> None:
    with pytest.raises(ChoiceError, match=f"{name}: expected"):
        built(**{name: value})


def test_its_cache_may_start_with_popular_experts_and_bring_others_in_the_background() -> None:
    context = BuildContext("toy", 64, 3, top_k=6, calibration=toy_calibration(3, 64, 6))
    parameters = {"start": "popular", "background": True, "admit_by_score": True}
    policy = compose("hybrimoe", parameters, context=context)
    assert isinstance(policy.placement, PopularityPlacement)
    assert policy.placement.uniform
    assert policy.needs.calibration
    assert isinstance(policy.cache, MrsCache)
    assert (policy.cache.background, policy.cache.by_score) == ("decode", True)
    with pytest.raises(ChoiceError, match="'popular' fills slots by layer; leave 'pool'"):
        built(start="popular", pool=True)
