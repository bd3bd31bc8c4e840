"""DeepSpeed: what it streams, what it ranks, and that it keeps nothing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import ExpertCosts, ExpertId, LayerInput, Routing
from policies.protocols import Budget, Composition
from policies.registry import BuildContext, ChoiceError, compose
from tests.kit.views import NO_PLAN, costs, view

LAYERS, EXPERTS = 2, 4
COST = ExpertCosts((0, 5), (0, 50), 0, 20, 100)


def deepspeed(**parameters: object) -> Composition:
    return compose("deepspeed", parameters, context=BuildContext("toy", EXPERTS, LAYERS))


def test_idle_experts_are_streamed_before_the_loads_of_the_busy() -> None:
    layer = view({1: 1, 3: 2}, costs(gpu_ns=(5, 5), cpu_ns=(50, 99), copy_ns=20))
    decided = deepspeed().assigner.assign(layer)
    assert (decided.gpu, decided.cpu, decided.loads, decided.streamed) == ((3, 1), (), (3, 1), (0, 2))


def test_the_whole_next_layer_comes_ahead() -> None:
    policy = deepspeed()
    assert policy.prefetcher is not None
    layer = view({1: 1}, COST)
    assert policy.prefetcher.rank(layer, (), NO_PLAN) == [ExpertId(1, expert) for expert in range(EXPERTS)]
    assert (policy.prefetch_slots, policy.prefetcher.into) == (EXPERTS, "staging")


@pytest.mark.parametrize(("given", "slots"), [({}, 4), ({"prefetch_slots": 2}, 2), ({"prefetch": False}, 0)])
def test_slots_for_what_comes_ahead(given: Mapping[str, object], slots: int) -> None:
    policy = deepspeed(**given)
    assert (policy.prefetch_slots, policy.prefetcher is None) == (slots, slots == 0)


def test_nothing_is_cached_however_much_memory_there_is() -> None:
    session = Session(deepspeed(prefetch=False), Budget(EXPERTS, (100, 100), 800), (COST, COST))
    for step in range(2):
        session.begin_step(step)
        for layer in range(LAYERS):
            plan = session.plan_layer(LayerInput(step, layer, "decode", Routing((2,), (1,))))
            assert (plan.loads, plan.streamed) == ((2,), (0, 1, 3))
            while (copy := session.next_copy()) is not None:
                if session.copied(copy):
                    session.computed(copy.key)
            session.end_layer()
        session.end_step()
    assert session.residency.resident == [set(), set()]


def test_a_load_needs_a_slot() -> None:
    with pytest.raises(ChoiceError, match="demand_slots: expected a whole number >= 1"):
        deepspeed(demand_slots=0)
