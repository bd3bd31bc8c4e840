"""The lower bound by hand and against brute force; the null model by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Phase, Routing
from sim.machine.devices import Power
from sim.machine.hardware import load_hardware
from sim.runs.bounds import (
    LowerBound,
    LowerBounds,
    StepBytes,
    _fractional_split,
    least_misses,
    lower_bound,
    null_model,
    step_bytes,
)
from sim.runs.demand import StepDemand
from sim.runs.prepare import prepare
from sim.runs.run import bounds_of, joules_per_token
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.toys import uniform_costs
from trilane.testing.random_worlds import scaled
from trilane.testing.worlds import toy_shape


def step(index: int, phase: Phase, *routings: dict[int, int]) -> StepDemand:
    layers = tuple(Routing(tuple(r), tuple(r.values())) for r in routings)
    return StepDemand(index, phase, max(sum(r.values()) for r in routings), (8,), layers, ((),) * len(layers), None)


PLENTY = 100 * 100


class TestChain:
    def test_one_layer_split_between_the_devices(self) -> None:
        """7 once (launch, head, tokens home, sync), 12 to the gate, then 2 to sync, 1 + 7 on the CPU, combine 2."""
        demand = [step(0, "prefill", {0: 1, 1: 1})]
        assert lower_bound(demand, uniform_costs(1), PLENTY) == LowerBound(7 + 12 + 12, None)

    def test_all_on_the_gpu_where_the_cpu_is_slow(self) -> None:
        """From the gate: 2 to sync, launch 1, two experts 10, combine 1."""
        demand = [step(0, "prefill", {0: 1, 1: 1})]
        assert lower_bound(demand, uniform_costs(1, cpu_ns=70), PLENTY).ttft_ns == 7 + 12 + 14

    def test_all_on_the_cpu_where_the_gpu_is_slow(self) -> None:
        """From the gate: 2 to sync, activations 1, first 3, experts 2 x 7, result 1 on the link, combine 1."""
        demand = [step(0, "prefill", {0: 1, 1: 1})]
        costs = uniform_costs(1, gpu_ns=70, first_cpu_ns=3, result_path="h2d")
        assert lower_bound(demand, costs, PLENTY).ttft_ns == 7 + 12 + 2 + 1 + 3 + 14 + 1 + 1

    def test_launches_bound_it_where_the_host_is_slow(self) -> None:
        """CPU alone needs the fewest launches: 2 to sync, combine 50, and the next layer's, or the head's, own 50."""
        demand = [step(0, "prefill", {0: 1, 1: 1})]
        costs = uniform_costs(1, attention_launch_ns=50, expert_launch_ns=50, combine_launch_ns=50, head_launch_ns=50)
        assert lower_bound(demand, costs, PLENTY).ttft_ns == (50 + 4 + 1 + 1) + 12 + 2 + 50 + 50

    @pytest.mark.parametrize(("head_launch_ns", "last"), [(1, 2), (2, 2), (20, 20), (60, 60)])
    def test_the_heads_launch_follows_the_last_layer(self, head_launch_ns: int, last: int) -> None:
        """After the launch of combine: combine itself, with the result 2, or the launch behind it."""
        demand = [step(0, "prefill", {0: 1, 1: 1})]
        costs = uniform_costs(
            1, attention_launch_ns=50, expert_launch_ns=50, combine_launch_ns=50, head_launch_ns=head_launch_ns
        )
        assert lower_bound(demand, costs, PLENTY).ttft_ns == (50 + 4 + 1 + 1) + 12 + 2 + 50 + last

    def test_the_dense_layers_are_launched_once_a_step(self) -> None:
        demand = [step(0, "prefill", {0: 1, 1: 1}, {0: 1, 1: 1})]
        one, more = (lower_bound(demand, uniform_costs(2, dense_launch_ns=ns), PLENTY).ttft_ns for ns in (0, 30))
        assert more == (one or 0) + 30

    def test_the_dense_layers_run_once_a_step(self) -> None:
        demand = [step(0, "prefill", {0: 1, 1: 1}, {0: 1, 1: 1})]
        one, more = (lower_bound(demand, uniform_costs(2, dense_ns=ns), PLENTY).ttft_ns for ns in (0, 30))
        assert more == (one or 0) + 30

    def test_tpot_is_the_mean_of_the_decode_steps(self) -> None:
        demand = [step(0, "prefill", {0: 2, 1: 2}), step(1, "decode", {0: 1, 1: 1}), step(2, "decode", {0: 1})]
        one = 7 + 12 + 2 + 1 + 5 + 1
        assert lower_bound(demand, uniform_costs(1, cpu_ns=70), PLENTY).tpot_ns == (33 + one) / 2

    @given(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=7),
        st.integers(0, 30), st.integers(0, 30),
    )
    def test_the_fractional_split_is_below_every_whole_one(
        self, times: list[tuple[int, int]], gpu_from: int, cpu_from: int
    ) -> None:
        def ends(on_gpu: tuple[bool, ...]) -> int:
            gpu = sum(g for (g, _), there in zip(times, on_gpu, strict=True) if there)
            cpu = sum(c for (_, c), there in zip(times, on_gpu, strict=True) if not there)
            return max(gpu_from + gpu, cpu_from + cpu)

        best = min(ends(on_gpu) for on_gpu in product([False, True], repeat=len(times)))
        gpu, cpu = zip(*times, strict=True)
        assert _fractional_split(gpu, cpu, gpu_from, cpu_from) <= best

    def test_the_fractional_split_by_hand(self) -> None:
        """10 ns of CPU work, or 5 of GPU work: 10/3 each. Rounded down, less one, unless nothing is divided."""
        assert _fractional_split((5,), (10,), 0, 0) == 3 - 1
        assert _fractional_split((4,), (6,), 0, 4) == 4 - 1, "a division that leaves nothing to the CPU is one too"
        assert _fractional_split((4,), (6,), 0, 5) == 5, "the CPU begins after the GPU has ended"


class TestTraffic:
    def test_a_copy_for_each_miss_where_the_cpu_is_slow(self) -> None:
        """Two experts by turns and one slot: every other request misses, and a copy takes 1000."""
        demand = [step(n, "decode", {n % 2: 1}) for n in range(8)]
        costs = uniform_costs(1, copy_ns=1000, cpu_ns=10**6)
        assert lower_bound(demand, costs, 100).tpot_ns == 4 * 1000 / 8  # keep one of the two

    def test_the_cpu_and_the_link_share_the_misses(self) -> None:
        """No slot: the CPU does 5 of 8 runs, 1000 each beside 22 a step, while the link copies 3, 2000 each."""
        demand = [step(n, "decode", {n % 2: 1}) for n in range(8)]
        costs = uniform_costs(1, copy_ns=2000, cpu_ns=1000)
        assert lower_bound(demand, costs, 0).tpot_ns == 3 * 2000 / 8
        slower = uniform_costs(1, copy_ns=2000, cpu_ns=1200)
        assert lower_bound(demand, slower, 0).tpot_ns == (8 * 22 + 5 * 1200) / 8

    @given(st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=7), st.integers(0, 5))
    def test_least_misses_is_what_trying_everything_finds(self, events: list[set[int]], capacity: int) -> None:
        assert least_misses([sorted(event) for event in events], capacity) == _tried(events, capacity)

    def test_bigger_experts_count_as_the_smallest(self) -> None:
        """Room is counted in the smallest experts, and a copy takes the shortest copy's time: never too much."""
        small, large = uniform_costs(1).experts[0], uniform_costs(1, expert_bytes=300, copy_ns=60).experts[0]
        costs = replace(uniform_costs(2), experts=(small, large))
        demand = [step(n, "decode", {n % 2: 1}, {n % 2: 1}) for n in range(8)]
        assert lower_bound(demand, costs, 299) == lower_bound(demand, costs, 200)


def _tried(events: list[set[int]], capacity: int) -> int:
    """Fewest misses over all that a cache could hold between events."""

    def subsets(experts: set[int]) -> list[frozenset[int]]:
        return [frozenset(c) for n in range(min(capacity, len(experts)) + 1) for c in combinations(sorted(experts), n)]

    best = dict.fromkeys(subsets(set(range(5))), 0)
    for event in events:
        after: dict[frozenset[int], int] = {}
        for held, misses in best.items():
            for kept in subsets(held | event):
                after[kept] = min(after.get(kept, 10**9), misses + len(event - held))
        best = after
    return min(best.values())


DEMAND = [
    step(0, "prefill", {0: 3, 1: 2}, {1: 3, 3: 2}),
    *(step(n, "decode", {n % 4: 1, (n + 1) % 4: 1}, {n % 3: 1, 3: 1}) for n in range(1, 9)),
]


def test_more_memory_never_raises_the_bound() -> None:
    bounds = [lower_bound(DEMAND, uniform_costs(2, copy_ns=300, cpu_ns=400), slots * 100) for slots in range(9)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_the_bound_scales_with_the_costs() -> None:
    one = lower_bound(DEMAND, uniform_costs(2, copy_ns=300, cpu_ns=400), 200)
    ten = lower_bound(DEMAND, scaled(uniform_costs(2, copy_ns=300, cpu_ns=400), 10), 200)
    assert (ten.ttft_ns, ten.tpot_ns) == ((one.ttft_ns or 0) * 10, (one.tpot_ns or 0) * 10)


def test_bounds_at_several_capacities_are_those_at_each() -> None:
    costs = uniform_costs(2, copy_ns=300, cpu_ns=400)
    bounds = LowerBounds(DEMAND, costs)
    assert [bounds.at(capacity) for capacity in (0, 400, 200, 0)] == [
        lower_bound(DEMAND, costs, capacity) for capacity in (0, 400, 200, 0)
    ]


def test_the_null_model_by_hand() -> None:
    """Half of 4 GB of active experts at 10 GB/s or over the link at 4, all else at 100 GB/s, with 3 GB of KV cache."""
    shape = toy_shape(1, 4, 2, vocab=1000)
    hardware = load_hardware("rtx3090-ddr4", {
        "gpu.bandwidth_bytes_per_s": 125e9, "gpu.bandwidth_fraction": 0.8, "cpu.read_bytes_per_s": 10e9,
        "link.h2d_bytes_per_s": 4e9, "link.copies": "pinned",
    })
    rest = shape.non_expert_bytes - 1000 * 8 * 2  # of the input embedding one row is read
    on_gpu, read = (rest + 2e9 + 3e9) / 100e9, StepBytes(experts=4e9, cache=3e9)
    assert null_model(shape, hardware, read, 0.5, gpu_only=False) == pytest.approx(on_gpu + 2e9 / 10e9)
    assert null_model(shape, hardware, read, 0.5, gpu_only=True) == pytest.approx(on_gpu + 2e9 / 4e9)


def test_a_step_reads_its_active_experts_and_the_cache_of_every_sequence() -> None:
    """Two steps: 2 and 1 active experts of 100 bytes; contexts of 3 and 4 tokens, then 4 and 5, at 8 bytes a token."""
    shape = toy_shape(1, 4, 2, kv_width=4, expert_bytes=(100,))
    first, second = step(1, "decode", {0: 1, 1: 1}), step(2, "decode", {0: 2})
    steps = [first._replace(context=(3, 4)), second._replace(context=(4, 5))]
    assert step_bytes(steps, shape) == StepBytes(experts=150, cache=8 * (7 + 9) / 2)


# --- Bounds that a run is compared with, and its energy, by hand ------------------------------------------------------


POWER = Power(gpu_idle_w=20, gpu_busy_w=320, cpu_idle_w=40, cpu_busy_w=140)


def test_busy_and_idle_watts_over_a_decode_step() -> None:
    run = simulate(Scenario(trace="mini-moe", model=None, generated_tokens=2, cached_share=0.5))
    metrics = replace(run.metrics, tpot_ms=10.0, busy_share={"gpu": 0.5, "cpu": 0.25})
    # gpu 20 + 0.5 x 300 = 170 W, cpu 40 + 0.25 x 100 = 65 W; 235 W x 10 ms = 2.35 J for a batch of 2
    assert joules_per_token(metrics, POWER, batch=2) == pytest.approx(2.35 / 2)
    platform = replace(POWER, platform_w=65)
    assert joules_per_token(metrics, platform, batch=2) == pytest.approx(3.0 / 2)  # 65 W more
    assert joules_per_token(metrics, None, batch=2) is None
    assert joules_per_token(replace(metrics, tpot_ms=None), POWER, batch=2) is None
    assert run.to_dict()["energy_j_per_token"] > 0


def test_bounds_are_named_as_columns_and_those_that_do_not_apply_left_out() -> None:
    prepared = prepare(Scenario(policy="fiddler", cached_share=0.25, prompt_tokens=4, generated_tokens=2))
    memory, both = prepared.memory, bounds_of(prepared)
    assert list(both) == ["lower_bound_ttft_ms", "lower_bound_tpot_ms", "null_model_tpot_ms"]
    found = lower_bound(prepared.demand, prepared.costs, memory.cache_bytes + memory.staging_bytes)
    assert (both["lower_bound_ttft_ms"], both["lower_bound_tpot_ms"]) == (found.ttft_ns / 1e6, found.tpot_ns / 1e6)
    assert list(bounds_of(prepared.over(prepared.demand[:1]))) == ["lower_bound_ttft_ms"]
    assert list(bounds_of(prepared.with_policy("smoe"))) == ["null_model_tpot_ms"]


def test_bounds_are_shared_by_all_that_they_depend_on_and_by_nothing_else() -> None:
    """However a variant is made."""
    prepared = prepare(Scenario(policy="fiddler", cached_share=0.25, prompt_tokens=4, generated_tokens=2))
    own = prepared.lower_bounds
    assert prepared.with_policy("dali").lower_bounds is own
    twice = prepared.costs.map_experts(lambda expert: expert._replace(cpu_ns=tuple(2 * ns for ns in expert.cpu_ns)))
    for variant in (
        replace(prepared, costs=twice), replace(prepared, trace=replace(prepared.trace)),
        replace(prepared, steps=prepared.steps[:2]), prepared.over(prepared.demand[:1]),
    ):
        assert variant.lower_bounds is not own
    assert prepared.lower_bounds is own
