"""Double buffering against the closed form of Speculating Experts, Section 5.1.

The paper: on demand, a step takes the sum over layers of attention + route + copy + FFN; with prefetching, the first
copy and then, layer by layer, the longer of attention + route + FFN and copy. Here the host and everything that the
paper has no term for take no time, forecasts are right, and a layer's experts are one block (top-1), as in the paper,
which waits for all of them. With a, r, f, c for attention, route, FFN and copy, and L layers, by hand:

- expert l starts at X_l; its layer ends at X_l + f.
- X_0 = a + r + max(c, r): layer 0 is routed (r), then its copy runs while the GPU forecasts layer 1 (r).
- The copy for layer l+1 starts when that of l has arrived and its forecast is known, that is, at X_l. So
  X_(l+1) = max(X_l + f + a + r, X_l + c), without r for the last layer: it forecasts nothing, and is not routed.
- The step ends at X_(L-1) + f.

With r = 0 that is c + (L-1) max(a + f, c) + (a + f): the paper's sum, whose last layer has no copy to hide.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.mechanism.session import Session
from policies.mechanism.views import Forecast, Routing
from policies.protocols import Budget
from policies.registry import BuildContext, compose
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.kit.toys import uniform_costs

EXECUTED, EXACT = ("router-pf", "quasi-pf@impl"), ("router-pf@exact",)

few = settings(max_examples=60)
time_ns = st.integers(1, 100)
layer_counts = st.integers(1, 6)


def machine(layers: int, *, attention: int, route: int, ffn: int, copy: int) -> CostTable:
    """Nothing but the paper's terms takes time; ``ffn`` and ``copy`` are of one expert."""
    return uniform_costs(
        layers, attention_ns=attention, gate_ns=route, speculate_ns=route, gpu_ns=ffn, copy_ns=copy, combine_ns=0,
        head_ns=0, routing_ns=0, activations_ns=0, result_ns=0, attention_launch_ns=0, expert_launch_ns=0,
        combine_launch_ns=0, head_launch_ns=0, sync_ns=0, plan_ns=0, foresee_ns=0,
    )


def ends(policy: str, costs: CostTable, top_k: int = 1, steps: int = 1) -> list[int]:
    """When each decode step of a batch of one ends: experts 0..top_k-1 in every layer, as forecast."""
    layers, active, ones = len(costs.experts), tuple(range(top_k)), (1,) * top_k
    forecasts: list[tuple[Forecast, ...]] = [()] * layers
    if policy != "on-demand":
        forecasts[:-1] = [(Forecast(layer, "gate", active, ones, (active,)),) for layer in range(1, layers)]
    routings = (Routing(active, ones),) * layers
    return play(
        policy, costs, [StepDemand(i, "decode", 1, (1,), routings, tuple(forecasts), None) for i in range(steps)]
    )


def play(policy: str, costs: CostTable, demand: Sequence[StepDemand], experts: int | None = None) -> list[int]:
    """When each step ends; without room for a cache, all of ``experts`` (default: those active) absent."""
    layers, top_k = len(costs.experts), len(demand[0].routings[0].active)
    count = experts or top_k
    built = compose(policy, context=BuildContext("toy", count, layers, top_k=top_k))
    engine = Timeline(Session(built, Budget(count, (1,) * layers, 0), costs.experts), costs, demand, TokenBytes(0, 0))
    engine.run()
    return [max(row[3] for row in engine.recorder.rows if row[6] == step.index) for step in demand]


def starts_by_hand(layers: int, a: int, r: int, f: int, c: int) -> Sequence[int]:
    """X_0 to X_(L-1), from the rules above."""
    if layers == 1:
        return [a + r + c]  # nothing is forecast
    starts = [a + r + max(c, r)]
    for layer in range(1, layers):
        route = r if layer < layers - 1 else 0
        starts.append(starts[-1] + max(f + a + route, c))
    return starts


@few
@given(layer_counts, time_ns, st.integers(0, 100), time_ns, time_ns)
@pytest.mark.parametrize("policy", EXECUTED)
def test_a_speculative_step_takes_what_the_rules_say(policy: str, layers: int, a: int, r: int, f: int, c: int) -> None:
    costs = machine(layers, attention=a, route=r, ffn=f, copy=c)
    assert ends(policy, costs) == [starts_by_hand(layers, a, r, f, c)[-1] + f]


@few
@given(layer_counts, time_ns, st.integers(0, 100), time_ns, time_ns)
def test_on_demand_takes_the_sum(layers: int, a: int, r: int, f: int, c: int) -> None:
    costs = machine(layers, attention=a, route=r, ffn=f, copy=c)
    assert ends("on-demand", costs) == [layers * (a + r + c + f)]


@few
@given(layer_counts, time_ns, time_ns, time_ns)
@pytest.mark.parametrize("policy", [*EXECUTED, *EXACT])
def test_without_routers_it_is_the_papers_closed_form(policy: str, layers: int, a: int, f: int, c: int) -> None:
    """A right forecast is the true routing, so that the exact twin takes as long."""
    costs = machine(layers, attention=a, route=0, ffn=f, copy=c)
    assert ends(policy, costs) == [c + (layers - 1) * max(a + f, c) + (a + f)]


@few
@given(st.integers(2, 6), time_ns, time_ns, time_ns)
def test_the_gain_is_what_overlaps_and_bounded_by_the_compute_share(layers: int, a: int, f: int, c: int) -> None:
    costs = machine(layers, attention=a, route=0, ffn=f, copy=c)
    (on_demand,), (speculative,) = ends("on-demand", costs), ends("router-pf", costs)
    assert on_demand - speculative == (layers - 1) * min(a + f, c)
    compute_share = (a + f) / (a + f + c)
    assert 1 - speculative / on_demand < compute_share
    assert on_demand / speculative < 2


def test_the_best_speed_up_is_two_where_compute_and_copy_are_equal() -> None:
    layers = 50
    speed_up = {}
    for copy in (25, 50, 100, 200, 400):
        costs = machine(layers, attention=60, route=0, ffn=40, copy=copy)
        speed_up[copy] = ends("on-demand", costs)[0] / ends("router-pf", costs)[0]
    assert max(speed_up, key=speed_up.__getitem__) == 100
    assert speed_up[100] == 2 * layers / (layers + 1)  # 2 L x over (L + 1) x


def test_every_step_begins_with_a_copy_that_nothing_hides() -> None:
    """The last layer forecasts nothing for the first layer of the next token."""
    costs = machine(4, attention=10, route=2, ffn=5, copy=30)
    first, second, third = ends("router-pf", costs, steps=3)
    assert (second, third) == (2 * first, 3 * first)


@few
@given(layer_counts, st.integers(2, 5), time_ns, time_ns, time_ns)
@pytest.mark.parametrize("policy", [*EXECUTED, "on-demand"])
def test_several_experts_a_layer_take_no_longer_than_one_block_of_them(
    policy: str, layers: int, k: int, a: int, f: int, c: int
) -> None:
    """The paper waits for all experts of a layer, the timeline computes each when it arrives; the link is never faster.

    On the GPU's side the bound is compute and the first copy, on the link's all copies and what follows the last.
    """
    costs = machine(layers, attention=a, route=0, ffn=f, copy=c)
    (took,) = ends(policy, costs, top_k=k)
    hidden = (layers - 1) * (k * c + a + k * f if policy == "on-demand" else max(a + k * f, k * c))
    assert max(layers * (a + k * f) + c, a + layers * k * c + f) <= took <= k * c + hidden + (a + k * f)


@few
@given(layer_counts, st.integers(1, 6), time_ns, time_ns, time_ns)
def test_the_released_codes_prefill_copies_every_expert_of_every_layer(
    layers: int, experts: int, a: int, f: int, c: int
) -> None:
    """Layer 0 comes whole once it is routed, and the others after it. The link never rests where a layer's copies take
    longer than its compute, and the step ends when its last expert, the one that is active, has been copied and run."""
    costs = machine(layers, attention=a, route=0, ffn=f, copy=-(-(a + f) // experts) + c)
    demand = StepDemand(0, "prefill", 1, (1,), (Routing((experts - 1,), (1,)),) * layers, ((),) * layers, None)
    assert play("quasi-pf@impl", costs, [demand], experts) == [a + layers * experts * costs.experts[0].copy_ns + f]
