"""Expert deferral: which of a layer's CPU experts join the next layer, and in which order the CPU computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import Assignment, ExpertCosts, ExpertId, LayerInput, LayerView, Phase, Routing
from policies.papers.ktransformers import DeferLowest, covering
from policies.papers.llama_cpp import FromPool, HostLayersLru, HostLayersPool
from policies.parts.assigners import ResidentOrCpu
from policies.protocols import Budget, Composition, Needs
from policies.registry import BuildContext, ChoiceError, compose, system
from tests.kit.views import NO_PLAN, costs, scored_view, view
from trilane.testing.worlds import toy_calibration

COST = costs((5, 6, 7), (10, 20, 30), copy_ns=30)
ONE = ((0.1, 0.4, 0.05, 0.3, 0.15),)  # by descending score: 1, 3, 4, 0, 2


def decided(
    scores: Sequence[Sequence[float]], k: int, *, resident: Collection[int] = (), deferred: int | None = None,
    immediate: int = 2, cost: ExpertCosts = COST,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The CPU's experts in order, and those of them that join later, in the first of two layers."""
    view = scored_view(scores, k, resident=resident, cost=cost)
    made = DeferLowest(ResidentOrCpu(), deferred, immediate).assign(view)
    return made.cpu, made.deferred


@pytest.mark.parametrize(("deferred", "expected"), [
    (0, ((0, 1, 3, 4), ())),
    (1, ((1, 3, 4, 0), (0,))),
    (3, ((1, 0, 3, 4), (0, 3, 4))),
    (4, ((0, 1, 3, 4), (0, 1, 3, 4))),
    (9, ((0, 1, 3, 4), (0, 1, 3, 4))),
])
def test_the_lowest_weights_of_a_token_join_later(
    deferred: int, expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert decided(ONE, 4, deferred=deferred) == expected


def test_experts_on_the_gpu_are_ranked_with_the_others_and_never_deferred() -> None:
    assert decided(ONE, 4, resident=(4,), deferred=2) == ((1, 3, 0), (0,))
    assert decided(ONE, 4, resident=(1, 3), deferred=2) == ((0, 4), (0, 4))


def test_in_a_batch_an_expert_that_is_among_the_first_of_any_token_is_waited_for() -> None:
    two = (*ONE, (0.6, 0.1, 0.05, 0.05, 0.2))  # the second token: 0, 4, 1
    assert decided(two, 3, deferred=2) == ((1, 0, 4, 3), (4, 3))  # 4 and 1 have two tokens


@pytest.mark.parametrize(("chosen", "joining_later"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 3)])
def test_two_experts_of_a_token_stay_and_one_of_two(chosen: int, joining_later: int) -> None:
    long = COST._replace(between_ns=1000)
    assert len(decided(ONE, chosen, cost=long)[1]) == joining_later
    assert len(decided(ONE, chosen, cost=long, immediate=4)[1]) == min(1, joining_later)


@pytest.mark.parametrize(
    ("between_ns", "exchange_ns", "fewest"), [(0, 0, 1), (10, 0, 1), (5, 6, 2), (20, 0, 2), (21, 0, 3)]
)
def test_as_many_as_cover_the_time_in_which_the_cpu_would_wait(between_ns: int, exchange_ns: int, fewest: int) -> None:
    cost = COST._replace(between_ns=between_ns, exchange_ns=exchange_ns)
    assert covering(cost) == fewest
    assert len(decided(ONE, 5, cost=cost)[1]) == fewest


def test_the_last_layer_defers_none() -> None:
    view = scored_view(ONE, 4)
    last = view._replace(costs=view.costs[:1])
    assert DeferLowest(ResidentOrCpu(), 3).assign(last) == ResidentOrCpu().assign(last)


def of_phase(phase: Phase, **parameters: object) -> Assignment:
    context = BuildContext("toy", 5, 2, top_k=4, calibration=toy_calibration(2, 5, 4))
    view: LayerView = scored_view(ONE, 4, phase=phase)
    return compose("kt-deferral", parameters, context=context).assigner.assign(view)


@pytest.mark.parametrize("prefill", ["gpu", "cpu"])
def test_prompts_are_those_of_ktransformers(prefill: str) -> None:
    made = of_phase("prefill", prefill=prefill, deferred=4)
    assert (made.gpu, made.deferred) == ((0, 1, 3, 4) if prefill == "gpu" else (), ())
    assert of_phase("decode", prefill=prefill, deferred=4).deferred == (0, 1, 3, 4)


def test_without_deferral_it_keeps_the_routing_and_reads_no_tokens() -> None:
    entry = system("kt-deferral")
    assert entry.parse({"deferred": 0}).needs == Needs(calibration=True)
    assert entry.parse({}).needs == Needs(tokens=True, calibration=True, changes_routing=True)
    assert replace(entry.parse({"strategy": "uniform"}).needs, tokens=False) == Needs(changes_routing=True)
    assert of_phase("decode", deferred=0).deferred == ()


# --- llama.cpp's cache of experts -------------------------------------------------------------------------------------


CACHE_COST = costs(gpu_ns=(10,) * 200, cpu_ns=(20,) * 200, copy_ns=100)
EXPERTS, TOP_K = 8, 2


def placed(host_layers: int = 3, slots: int = 6, most_tokens: int = 32) -> HostLayersPool:
    """Three layers of eight experts, one byte each; those after ``host_layers`` are wholly on the GPU."""
    pool = HostLayersPool(host_layers, TOP_K, most_tokens)
    pool.place(Budget(EXPERTS, (1, 1, 1), slots + EXPERTS * (3 - host_layers)))
    return pool


def step(tokens: int, layer: int = 0) -> LayerView:
    """So many tokens, which chose experts 0 and 1."""
    return view({0: tokens, 1: tokens}, CACHE_COST, layer=layer)


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


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


LAYERS, STREAMED = 2, 4
STREAMED_COST = ExpertCosts((0, 5), (0, 50), 0, 20, 100)


def deepspeed(**parameters: object) -> Composition:
    return compose("deepspeed", parameters, context=BuildContext("toy", STREAMED, LAYERS))


def test_idle_experts_are_streamed_before_the_loads_of_the_busy() -> None:
    layer = view({1: 1, 3: 2}, costs(gpu_ns=(5, 5), cpu_ns=(50, 99), copy_ns=20))
    decided = deepspeed().assigner.assign(layer)
    assert (decided.gpu, decided.cpu, decided.loads, decided.streamed) == ((3, 1), (), (3, 1), (0, 2))


def test_the_whole_next_layer_comes_ahead() -> None:
    policy = deepspeed()
    assert policy.prefetcher is not None
    layer = view({1: 1}, STREAMED_COST)
    assert policy.prefetcher.rank(layer, (), NO_PLAN) == [ExpertId(1, expert) for expert in range(STREAMED)]
    assert (policy.prefetch_slots, policy.prefetcher.into) == (STREAMED, "staging")


@pytest.mark.parametrize(("given", "slots"), [({}, 4), ({"prefetch_slots": 2}, 2), ({"prefetch": False}, 0)])
def test_slots_for_what_comes_ahead(given: Mapping[str, object], slots: int) -> None:
    policy = deepspeed(**given)
    assert (policy.prefetch_slots, policy.prefetcher is None) == (slots, slots == 0)


def test_nothing_is_cached_however_much_memory_there_is() -> None:
    session = Session(deepspeed(prefetch=False), Budget(STREAMED, (100, 100), 800), (STREAMED_COST, STREAMED_COST))
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


def test_resident_layers_are_not_copied() -> None:
    session = Session(deepspeed(resident=True), Budget(STREAMED, (100, 100), 450), (STREAMED_COST, STREAMED_COST))
    assert session.residency.resident == [set(), {0, 1, 2, 3}]
    session.begin_step(0)
    plan = session.plan_layer(LayerInput(0, 0, "decode", Routing((2,), (1,))))
    assert (plan.loads, plan.streamed) == ((2,), (0, 1, 3))
    session.foresee(())
    copied = []
    while (copy := session.next_copy()) is not None:
        copied.append(copy.key)
        if session.copied(copy):
            session.computed(copy.key)
    assert copied == [ExpertId(0, expert) for expert in (0, 1, 3, 2)]


def test_a_load_needs_a_slot() -> None:
    with pytest.raises(ChoiceError, match="demand_slots: expected a whole number >= 1"):
        deepspeed(demand_slots=0)
