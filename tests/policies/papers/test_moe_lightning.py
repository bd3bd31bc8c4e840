"""MoE-Lightning's search against an independent one, at its edges, and the parts that carry out what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.calibration import Calibration
from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import ExpertCosts, ExpertId, PolicyError
from policies.papers.moe_lightning import ONE, LayerModel, Split, search, spread
from policies.protocols import Budget, Composition
from policies.registry import BuildContext, ChoiceError, compose, system
from tests.kit.views import NO_PLAN, view
from trilane.testing.worlds import toy_calibration

COST = ExpertCosts((0, 10, 12), (0, 40, 80), 8, 30, 10)
FREE_COPIES = COST._replace(copy_ns=1, cpu_ns=(0, 4000, 8000))
SLOW_COPIES = COST._replace(copy_ns=100_000)
FAST_CPU = COST._replace(cpu_ns=(0, 1, 1), first_cpu_ns=0)


def test_spread_is_even_and_grows_with_the_total_in_every_layer() -> None:
    assert [spread(total, 3) for total in range(5)] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]


def test_the_model_of_a_layer_worked_out_by_hand() -> None:
    model = LayerModel(COST, (0.75, 0.25), top_k=1, batch=1)
    both_on_cpu = 40 * 0.75 + 40 * 0.25 + 8 * (1 - 0.25 * 0.75)
    expected = {(0, 0): both_on_cpu, (1, 1): 40 * 0.25 + 8 * 0.25, (2, 2): 10, (0, 1): 30, (0, 2): 60, (1, 2): 30}
    assert {shares: model.time(*shares) / ONE for shares in expected} == expected
    assert {type(model.time(*shares)) for shares in expected} == {int}


def test_streaming_and_the_cpu_slow_each_other_down() -> None:
    """At half speed the CPU's 12 take 24, in which 12 of the copy's 30 are done; 18 are left."""
    model = LayerModel(COST._replace(cpu_permille=500, copy_permille=500), (0.75, 0.25), top_k=1, batch=1)
    assert {shares: model.time(*shares) / ONE for shares in ((0, 1), (1, 1), (0, 2))} == {
        (0, 1): 24 + 18, (1, 1): 12, (0, 2): 60,
    }


def test_a_batch_uses_more_experts_and_gives_each_more_tokens() -> None:
    # Chosen by a token with 1/2: by one of four at least with 15/16, and then by 2 / (15/16), about 2 of them.
    assert LayerModel(COST, (0.5, 0.5), top_k=1, batch=4).time(1, 1) / ONE == 80 * 15 / 16 + 8 * 15 / 16


# --- the search -------------------------------------------------------------------------------------------------------

TABLE = st.lists(st.integers(1, 90), min_size=4, max_size=4).map(lambda t: (0, *np.cumsum(t).tolist()))
RATE = st.sampled_from((1000, 700, 400))
COSTS = st.builds(
    ExpertCosts, TABLE, TABLE, st.integers(0, 50), st.integers(1, 300), st.sampled_from((10, 10, 16)),
    cpu_permille=RATE, copy_permille=RATE,
)
QUESTIONS = st.tuples(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.integers(0, 5), st.integers(0, 2**32 - 1)
)  # layers, experts, steps, streamed, seed


def model_of(layers: Sequence[ExpertCosts], popularity: np.ndarray, top_k: int, batch: int) -> list[LayerModel]:
    return [LayerModel(c, sorted(row, reverse=True), top_k, batch) for c, row in zip(layers, popularity, strict=True)]


def slow_search(
    layers: Sequence[ExpertCosts], popularity: np.ndarray, top_k: int, batch: int, budget: Budget, steps: int, most: int
) -> dict[Split, float]:
    """Expected ns of every split of the grid that fits: experts dealt one by one, and their times added one by one."""
    totals = {len(layers) * budget.experts * i // steps for i in range(steps + 1)}
    times = {}
    for split in {Split(r, g) for r in totals for g in totals if r <= g}:
        staying, running = (list(islice(cycle(range(len(layers))), total)) for total in split)
        streamed = [running.count(layer) - staying.count(layer) for layer in range(len(layers))]
        if sum(layers[layer].expert_bytes for layer in staying) <= budget.cache_bytes and max(streamed) <= most:
            times[split] = sum(
                _slow_time(costs, sorted(popularity[layer])[::-1], top_k, batch, running.count(layer), streamed[layer])
                for layer, costs in enumerate(layers)
            )
    return times


def _slow_time(costs: ExpertCosts, shares: list[float], top_k: int, batch: int, gpu: int, streamed: int) -> float:
    on_gpu, on_cpu, reads, unused, idle = 0.0, 0.0, 0.0, [], 1.0
    for place, share in enumerate(shares):
        chosen = min(1, share * top_k)
        used = 1 - (1 - chosen) ** batch
        tokens = min(round(batch * chosen / used) if used else 0, len(costs.gpu_ns) - 1)
        if place < gpu:
            on_gpu += used * costs.gpu_ns[tokens]
            idle *= 1 - used
        else:
            on_cpu += used * costs.cpu_ns[tokens]
            reads += used * costs.cpu_ns[1]
            unused.append(1 - used)
    first = costs.first_cpu_ns * (1 - prod(unused))
    on_cpu, reads, copies = on_cpu + first, reads + first, streamed * costs.copy_ns
    cpu_rate, copy_rate = (rate / 1000 for rate in rates_together(costs, round(on_cpu * ONE), round(reads * ONE)))
    shared = min(on_cpu / cpu_rate, copies / copy_rate)  # one of them is done
    on_gpu += costs.first_gpu_ns * (1 - idle)
    return max(on_gpu, shared + on_cpu - shared * cpu_rate, shared + copies - shared * copy_rate)


@given(QUESTIONS, st.data())
def test_the_search_finds_the_least_time_of_its_grid(question: tuple[int, ...], data: st.DataObject) -> None:
    layers, experts, steps, most, seed = question
    costs = data.draw(st.lists(COSTS, min_size=layers, max_size=layers))
    popularity = np.random.default_rng(seed).dirichlet(np.ones(experts), layers)
    top_k, batch = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 4))
    budget = Budget(experts, tuple(c.expert_bytes for c in costs), data.draw(st.integers(0, 300)))
    times = slow_search(costs, popularity, top_k, batch, budget, steps, most)
    found = search(model_of(costs, popularity, top_k, batch), budget, steps, most)
    assert times[found] == pytest.approx(min(times.values()), rel=1e-4, abs=1e-2)


@given(QUESTIONS, st.lists(COSTS, min_size=4, max_size=4), st.tuples(st.integers(0, 400), st.integers(0, 400)))
def test_more_memory_never_gives_a_longer_modelled_time(
    question: tuple[int, ...], costs: list[ExpertCosts], memory: tuple[int, int]
) -> None:
    layers, experts, steps, most, seed = question
    popularity = np.random.default_rng(seed).dirichlet(np.ones(experts), layers)
    models = model_of(costs[:layers], popularity, 1, 2)
    times = []
    for cache_bytes in sorted(memory):
        budget = Budget(experts, tuple(c.expert_bytes for c in costs[:layers]), cache_bytes)
        resident, gpu = search(models, budget, steps, most)
        shares = zip(models, spread(resident, layers), spread(gpu, layers), strict=True)
        times.append(sum(model.time(*counts) for model, *counts in shares))
    assert times[1] <= times[0]


@pytest.mark.parametrize(("costs", "cache_bytes", "streamed", "expected"), [
    (SLOW_COPIES, 0, 4, Split(0, 0)),  # all on the CPU
    (FREE_COPIES, 0, 4, Split(0, 8)),  # all streamed
    (FREE_COPIES, 0, 0, Split(0, 0)),  # nothing may be
    (FREE_COPIES, 40, 4, Split(4, 8)),  # what fits stays, the rest is streamed
    (SLOW_COPIES, 80, 4, Split(8, 8)),  # all resident
    (FAST_CPU, 80, 4, Split(0, 0)),  # memory is no reason to use the GPU
])
def test_degenerate_shares(costs: ExpertCosts, cache_bytes: int, streamed: int, expected: Split) -> None:
    models = [LayerModel(costs, (0.25,) * 4, 2, 1)] * 2
    assert search(models, Budget(4, (10, 10), cache_bytes), 8, streamed) == expected


def test_a_grid_of_one_step_is_all_or_nothing() -> None:
    models = [LayerModel(SLOW_COPIES, (0.25,) * 4, 2, 1)] * 2
    assert [search(models, Budget(4, (10, 10), cache), 1, 4) for cache in (79, 80)] == [Split(0, 0), Split(8, 8)]


# --- the policy -------------------------------------------------------------------------------------------------------

LAYERS, EXPERTS = 2, 4
SHARES = np.array([[[4, 1, 3, 2], [1, 2, 3, 4]]])  # tokens of one sequence
CALIBRATION = Calibration("hand", SHARES, SHARES, np.zeros((1, LAYERS, 1), np.int16))


def lightning(costs: ExpertCosts = FREE_COPIES, **parameters: object) -> Composition:
    context = BuildContext("toy", EXPERTS, LAYERS, calibration=CALIBRATION, costs=[costs] * LAYERS)
    return compose("moe-lightning", parameters, context=context)


def test_the_most_popular_stay_the_next_are_streamed_the_rest_is_the_cpus() -> None:
    policy = lightning(COST._replace(copy_ns=5), prefetch_slots=1)  # one expert of a layer may be streamed
    placed = policy.placement.place(Budget(EXPERTS, (10, 10), 20))
    assert (placed.slots, placed.residents) == ((1, 1), ((0,), (3,)))
    layer = view({0: 1, 1: 1, 2: 1, 3: 1}, COST, ready={0: 0})
    decided = policy.assigner.assign(layer)
    assert (decided.gpu, decided.cpu, decided.loads, decided.streamed) == ((0, 2), (1, 3), (2,), ())
    assert policy.prefetcher is not None
    assert policy.prefetcher.rank(layer, (), decided) == [ExpertId(1, 2)]


def test_what_is_streamed_comes_in_order_of_popularity() -> None:
    policy = lightning()
    policy.placement.place(Budget(EXPERTS, (10, 10), 0))
    assert policy.prefetcher is not None
    layer = view({0: 1}, COST)
    ranked = policy.prefetcher.rank(layer, (), policy.assigner.assign(layer))
    assert ranked == [ExpertId(1, expert) for expert in (3, 2, 1, 0)]


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_no_layer_streams_more_than_there_are_slots_for(slots: int) -> None:
    policy = lightning(prefetch_slots=slots)
    policy.placement.place(Budget(EXPERTS, (10, 10), 0))
    layer = view({0: 1}, COST)
    assert policy.prefetcher is not None
    assert len(policy.prefetcher.rank(layer, (), policy.assigner.assign(layer))) == policy.prefetch_slots == slots


def test_its_parts_say_that_they_carry_out_what_its_placement_finds() -> None:
    policy, layer = lightning(), view({0: 1}, COST)
    with pytest.raises(PolicyError, match=r"the plan that its placement searches for.* keep the placement"):
        policy.assigner.assign(layer)


@pytest.mark.parametrize(("parameter", "least"), [("steps", 1), ("prefetch_slots", 0), ("demand_slots", 1)])
def test_a_grid_has_two_ends_and_streamed_experts_may_be_needed_before_their_turn(parameter: str, least: int) -> None:
    assert getattr(system("moe-lightning").parse({parameter: least}), parameter) == least
    with pytest.raises(ChoiceError, match=f"{parameter}: expected a whole number >= {least}.*, got {least - 1}"):
        system("moe-lightning").parse({parameter: least - 1})


def test_without_staging_for_it_nothing_is_streamed() -> None:
    policy = lightning(prefetch_slots=0)
    policy.placement.place(Budget(EXPERTS, (10, 10), 40))
    assert (policy.prefetcher, policy.prefetch_slots) == (None, 0)
    assert policy.assigner.assign(view({0: 1, 3: 1}, COST, ready={0: 0}))[:3] == ((0,), (3,), ())


def test_it_asks_for_costs_of_every_layer() -> None:
    context = BuildContext("toy", EXPERTS, LAYERS, calibration=toy_calibration(LAYERS, EXPERTS, 1))
    with pytest.raises(ChoiceError, match="searches with the planner's costs of 2 layers, got 0"):
        compose("moe-lightning", context=context)


def test_the_search_has_an_end() -> None:
    with pytest.raises(ChoiceError, match="steps: expected a whole number >= 1 and <= 1000, got 1000000000000"):
        system("moe-lightning").parse({"steps": 10**12})


# --- as released ------------------------------------------------------------------------------------------------------


def test_as_released_all_experts_run_on_the_gpu_and_all_absent_ones_are_streamed() -> None:
    calibration = toy_calibration(LAYERS, EXPERTS, 1)
    context = BuildContext("toy", EXPERTS, LAYERS, calibration=calibration)
    policy = compose("moe-lightning@impl", context=context)
    budget = Budget(EXPERTS, (10, 10), 20, calibration.popularity)
    [first, second] = policy.placement.place(budget).residents
    assert len(first) == len(second) == 1
    assert policy.prefetcher is not None
    everything = [ExpertId(1, expert) for expert in range(EXPERTS)]
    assert policy.prefetcher.rank(view({0: 1}, COST), (), NO_PLAN) == everything
    decided = policy.assigner.assign(view({0: 1, 3: 1}, COST, ready={0: 0}))
    assert (decided.gpu, decided.cpu, decided.loads) == ((0, 3), (), (3,))
    assert decided.streamed == tuple(expert for expert in range(EXPERTS) if expert not in (0, 3))
    assert policy.prefetch_slots == EXPERTS
