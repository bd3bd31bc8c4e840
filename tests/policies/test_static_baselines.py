"""Baselines that never change their mind: who is resident, and what becomes of an expert that is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from policies.mechanism.views import Assignment, LayerView, Phase
from policies.parts.placements import RandomPlacement
from policies.protocols import Budget, Composition, InitialPlacement
from policies.registry import BuildContext, compose
from tests.kit.views import costs, view
from trilane.testing.worlds import toy_calibration

LAYERS, EXPERTS, TOP_K = 3, 4, 2
POPULARITY = np.array([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
FULL = (0, 1, 2, 3)
TOKENS = tuple(range(1, 101))
COST = costs(gpu_ns=(10,) * 100, cpu_ns=[40 * w for w in TOKENS], copy_ns=70)  # two tokens tie: 80 and 80


def policy(name: str, run_seed: int = 0, **parameters: object) -> Composition:
    calibration = toy_calibration(LAYERS, EXPERTS, TOP_K)
    context = BuildContext("toy", EXPERTS, LAYERS, TOP_K, seed=run_seed, calibration=calibration)
    return compose(name, parameters, context=context)


def placed(name: str, cache_bytes: int, **parameters: object) -> InitialPlacement:
    return policy(name, **parameters).placement.place(Budget(EXPERTS, (10, 10, 10), cache_bytes, POPULARITY))


def decided(name: str, layer: LayerView, **parameters: object) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """(gpu, cpu, loads)."""
    found: Assignment = policy(name, **parameters).assigner.assign(layer)
    assert found.streamed == ()
    return found.gpu, found.cpu, found.loads


def layer(workload: dict[int, int], phase: Phase = "decode") -> LayerView:
    """Expert 1 is resident."""
    return view(workload, COST, ready={1: 0}, phase=phase)


def test_naive_cpu_leaves_the_memory_empty_and_has_the_cpu_do_it_all() -> None:
    assert placed("naive-cpu", 120).residents == ((), (), ())
    assert decided("naive-cpu", view({0: 1, 3: 9}, COST, phase="prefill")) == ((), (3, 0), ())
    assert policy("naive-cpu").demand_slots == 0


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp@impl", "ktransformers@layer-wise", "layer-wise"])
def test_layers_are_whole_and_the_first_are_the_cpus(name: str) -> None:
    assert placed(name, 119) == InitialPlacement((0, 4, 4), ((), FULL, FULL))
    assert placed(name, 39).residents == ((), (), ())


@pytest.mark.parametrize("name", ["llama.cpp", "ktransformers@layer-wise", "layer-wise"])
def test_who_decides_the_same_is_charged_the_same(name: str) -> None:
    assert policy(name).decision_cost == "layer-wise"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_llama_cpp_runs_everything_where_it_lies(phase: Phase) -> None:
    assert decided("llama.cpp", layer({0: 64, 1: 1}, phase)) == ((1,), (0,), ())
    assert policy("llama.cpp").demand_slots == 0


@pytest.mark.parametrize(("pairs", "least", "on_gpu"), [
    ((31, 31), 32, False), ((32, 32), 32, True), ((1, 63), 32, True), ((1, 62), 32, False), ((1, 1), 1, True),
])
def test_llama_cpp_as_released_copies_what_a_large_step_uses(pairs: tuple[int, int], least: int, on_gpu: bool) -> None:
    """A token makes two pairs: 32 tokens are 64."""
    got = decided("llama.cpp@impl", view(dict(enumerate(pairs)), COST), offload_min_tokens=least)
    busiest = (0, 1) if pairs[0] >= pairs[1] else (1, 0)
    assert got == ((busiest, (), busiest) if on_gpu else ((), busiest, ()))


@pytest.mark.parametrize("name", ["llama.cpp@impl", "fiddler@impl"])
def test_released_code_copies_into_one_slot(name: str) -> None:
    assert (policy(name).demand_slots, policy(name).cache.admits) == (1, False)


def test_ktransformers_keeps_the_most_frequent_of_the_model() -> None:
    assert placed("ktransformers", 50).residents == ((1, 2), (0,), (0, 1))


@pytest.mark.parametrize(("strategy", "residents"), [
    ("uniform", ((0, 1), (0, 1), (0,))), ("front-loading", (FULL, (0,), ())),
])
def test_ktransformers_without_statistics(strategy: str, residents: object) -> None:
    assert placed("ktransformers", 50, strategy=strategy).residents == residents
    assert not policy("ktransformers", strategy=strategy).needs.calibration


def test_ktransformers_random_is_the_same_whatever_the_seed_of_the_run() -> None:
    several = (policy("ktransformers", seed, strategy="random").placement for seed in (0, 1))
    one, two = (placement.place(Budget(EXPERTS, (10,) * LAYERS, 60)) for placement in several)
    assert one == two
    assert [len(residents) for residents in one.residents] == [2, 2, 2]
    assert one == RandomPlacement(42).place(Budget(EXPERTS, (10,) * LAYERS, 60)), "the seed of the released code"


def test_front_loading_goes_on_where_a_larger_expert_does_not_fit() -> None:
    placement = policy("ktransformers", strategy="front-loading").placement
    assert placement.place(Budget(EXPERTS, (10, 30, 5), 58)).slots == (4, 0, 3)


@pytest.mark.parametrize(("name", "given", "prefill_on_gpu", "demand_slots"), [
    ("ktransformers", {}, True, 2),
    ("ktransformers", {"demand_slots": 64}, True, 64),
    ("ktransformers", {"prefill": "cpu"}, False, 0),
    ("ktransformers@layer-wise", {}, False, 0),
    ("ktransformers@layer-wise", {"prefill": "gpu"}, True, 2),
])
def test_ktransformers_uses_the_cpu_in_decode_and_in_prefill_by_choice(
    name: str, given: dict[str, object], prefill_on_gpu: bool, demand_slots: int
) -> None:
    on_cpu = ((1,), (2, 0), ())
    assert decided(name, layer({0: 1, 1: 1, 2: 5}), **given) == on_cpu
    expected = ((1, 2, 0), (), (2, 0)) if prefill_on_gpu else on_cpu
    assert decided(name, layer({0: 1, 1: 1, 2: 5}, "prefill"), **given) == expected
    assert policy(name, **given).demand_slots == demand_slots


@pytest.mark.parametrize(("which", "workload", "loaded"), [
    ("planner", 2, False), ("planner", 3, True), ("constants", 9, False), ("constants", 10, True),
])
def test_fiddler_as_released_takes_the_cheaper_device_for_each_expert(which: str, workload: int, loaded: bool) -> None:
    """7 ms a token against 70 ms: ten tokens cost 70 on the CPU, which is not less. That is what it compares."""
    assert policy("fiddler@impl").parameters == {"costs": "constants"}
    expected = ((1, 0), (), (0,)) if loaded else ((1,), (0,), ())
    assert decided("fiddler@impl", layer({0: workload, 1: 1}), costs=which) == expected
    assert placed("fiddler@impl", 50) == placed("fiddler", 50)


def test_fiddlers_least_sum_of_all_configurations_is_the_cheaper_device_of_each() -> None:
    """The released code tries them all; a sum leaves each expert to itself."""
    workload = {0: 12, 1: 3, 2: 9, 3: 10}
    cheapest = min(range(16), key=lambda on_gpu: sum(_ms(e, w, on_gpu >> e & 1) for e, w in workload.items()))
    gpu, _, loads = decided("fiddler@impl", layer(workload), costs="constants")
    on_gpu = {e for e in workload if cheapest >> e & 1}
    assert on_gpu <= set(gpu) == {0, 1, 3}  # 3 costs the same on both
    assert set(gpu) - on_gpu <= {3}
    assert loads == (0, 3)


def _ms(expert: int, workload: int, on_gpu: int) -> int:
    """The released constants; expert 1 is resident."""
    return (0 if expert == 1 else 70) if on_gpu else 7 * workload
