"""llama.cpp's cache of experts: which steps use it, what it keeps, what they change."""

from __future__ import annotations

import pytest

from policies.mechanism.views import ExpertId, LayerView
from policies.papers.llama_cpp import FromPool, HostLayersLru, HostLayersPool
from policies.protocols import Budget
from policies.registry import BuildContext, compose
from tests.kit.views import costs, view

COST = costs(gpu_ns=(10,) * 200, cpu_ns=(20,) * 200, copy_ns=100)
EXPERTS, TOP_K = 8, 2


def placed(host_layers: int = 3, slots: int = 6, most_tokens: int = 32) -> HostLayersPool:
    """Three layers of eight experts, one byte each; those after ``host_layers`` are wholly on the GPU."""
    pool = HostLayersPool(host_layers, TOP_K, most_tokens)
    pool.place(Budget(EXPERTS, (1, 1, 1), slots + EXPERTS * (3 - host_layers)))
    return pool


def step(tokens: int, layer: int = 0) -> LayerView:
    """So many tokens, which chose experts 0 and 1."""
    return view({0: tokens, 1: tokens}, COST, layer=layer)


def test_whole_layers_are_placed_and_the_rest_is_one_empty_pool() -> None:
    pool = HostLayersPool(2, TOP_K, 32)
    found = pool.place(Budget(EXPERTS, (1, 1, 1), 13))
    assert found.slots is None
    assert found.residents == ((), (), tuple(range(8)))
    assert pool.slots == 5


@pytest.mark.parametrize(("slots", "tokens", "used"), [
    (6, 1, True), (6, 3, True), (6, 4, False), (8, 4, True), (8, 32, True), (8, 33, False), (1, 1, False),
], ids=["a token", "all slots", "more experts than slots", "all experts", "32 tokens", "33", "no room for one token"])
def test_a_step_uses_the_pool_where_it_has_room_for_whatever_its_tokens_may_choose(
    slots: int, tokens: int, used: bool
) -> None:
    assert placed(slots=slots).serves(step(tokens)) is used


@pytest.mark.parametrize(("tokens", "layer", "where"), [
    (1, 0, "gpu"), (16, 0, "cpu"), (32, 0, "gpu"), (16, 2, "gpu"),
], ids=["out of the pool", "too many for it, too few to copy", "copied", "a layer of the GPU's own"])
def test_where_experts_are_computed(tokens: int, layer: int, where: str) -> None:
    plan = FromPool(placed(host_layers=2, slots=4), 32).assign(step(tokens, layer))
    assert set(plan.cpu if where == "cpu" else plan.gpu) == {0, 1}


def test_only_steps_that_use_the_pool_count_as_uses() -> None:
    lru = HostLayersLru(placed(slots=4))
    for expert in range(4):
        lru.admitted(ExpertId(0, expert), 0)
    lru.observe(step(64))
    assert not lru.admits
    assert lru.victim(ExpertId(0, 7), 0, ()) == (0, 0)
    lru.observe(step(1))
    assert lru.admits
    assert lru.victim(ExpertId(0, 7), 0, ()) == (0, 2)


def test_experts_of_the_gpus_own_layers_never_leave() -> None:
    lru = HostLayersLru(placed(host_layers=2))
    lru.admitted(ExpertId(2, 0), 0)
    lru.admitted(ExpertId(1, 5), 0)
    assert lru.victim(ExpertId(0, 0), 0, ()) == (1, 5)
    assert lru.victim(ExpertId(0, 0), 0, {ExpertId(1, 5)}) is None


def test_all_layers_are_the_hosts_unless_it_is_said_otherwise() -> None:
    context = BuildContext("toy", EXPERTS, 3, top_k=TOP_K)
    assert compose("llama.cpp@cache", context=context).parameters["host_layers"] == 3
    assert compose("llama.cpp@cache", {"host_layers": 2}, context=context).parameters["host_layers"] == 2
