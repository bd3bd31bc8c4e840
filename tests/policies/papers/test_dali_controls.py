"""What DALI is compared with: random prefetching, seeded and never of what is there, and the beam search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import ExpertId, LayerView, ResidencyView
from policies.papers.dali.controls import RandomPrefetcher
from policies.papers.dali.parts import BeamAssigner
from policies.registry import BuildContext, ChoiceError, compose
from tests.kit.views_for_tests import NO_PLAN, costs, view

EXPERTS, LAYERS = 8, 3
COST = costs((10,), (30,))


def here(layer: int, resident: Collection[int], staged: Collection[int] = ()) -> LayerView:
    """``layer`` at work, with these experts of the next one on the GPU."""
    of_next = [[some if place == layer + 1 else () for place in range(LAYERS)] for some in (resident, staged)]
    return view({0: 1}, COST, layer=layer)._replace(residency=ResidencyView(*of_next))


def drawn(prefetcher: RandomPrefetcher, layer: LayerView) -> list[ExpertId]:
    return list(prefetcher.rank(layer, (), NO_PLAN))


some = st.sets(st.integers(0, EXPERTS - 1))


@given(some, some, st.integers(1, 9), st.integers(0, 99))
def test_draws_so_many_absent_experts_of_the_next_layer_or_all(
    resident: set[int], staged: set[int], size: int, seed: int
) -> None:
    absent = set(range(EXPERTS)) - resident - staged
    chosen = drawn(RandomPrefetcher(EXPERTS, size, seed), here(1, resident, staged))
    assert len(chosen) == len(set(chosen)) == min(size, len(absent))
    assert set(chosen) <= {ExpertId(2, expert) for expert in absent}


def test_is_a_function_of_its_seed() -> None:
    def course(seed: int) -> list[list[ExpertId]]:
        prefetcher = RandomPrefetcher(EXPERTS, 2, seed)
        return [drawn(prefetcher, here(layer, {1, 4})) for _ in range(20) for layer in range(2)]

    assert course(3) == course(3)
    assert course(3) != course(4)


def test_every_absent_expert_has_the_same_chance() -> None:
    prefetcher = RandomPrefetcher(EXPERTS, 2, seed=1)
    counts = Counter(id.expert for _ in range(3000) for id in drawn(prefetcher, here(0, {1, 4})))
    assert set(counts) == {0, 2, 3, 5, 6, 7}
    assert all(900 <= count <= 1100 for count in counts.values())  # 1000 expected, standard deviation 26


@pytest.mark.parametrize(("experts", "size"), [(8, 1), (64, 4)])
def test_takes_its_size_from_dali(experts: int, size: int) -> None:
    built = compose("random-prefetch", context=BuildContext("m", experts, LAYERS, seed=7))
    assert (built.parameters["prefetch"], built.prefetch_slots) == (size, 2 * size)
    assert built.needs.forecasts == ()
    assert built.prefetcher is not None
    assert compose("random-prefetch", {"prefetch": 2}, context=BuildContext("m", 8, 2)).prefetch_slots == 4


def test_the_beam_differs_from_dali_in_its_assigner_alone() -> None:
    context = BuildContext("m", 64, LAYERS, seed=7)
    beam, greedy = compose("dali-beam", {"beam_width": 3}, context=context), compose("dali", context=context)
    assert isinstance(beam.assigner, BeamAssigner)
    assert beam.assigner.width == 3
    assert beam.decision_cost == "dali-beam"
    shared = {name: value for name, value in greedy.parameters.items() if name not in ("assigner", "solver")}
    assert beam.parameters == {**shared, "beam_width": 3}


@pytest.mark.parametrize(("name", "foreign"), [
    ("dali-ilp", "assigner"), ("dali-ilp", "beam_width"), ("dali-beam", "assigner"), ("dali-beam", "solver"),
])
def test_a_dali_whose_assigner_is_fixed_takes_no_other(name: str, foreign: str) -> None:
    with pytest.raises(ChoiceError, match=f"policy '{name}': there is no key '{foreign}'"):
        compose(name, {foreign: "greedy"}, context=BuildContext("m", 8, LAYERS))


@pytest.mark.parametrize("assigner", ["beam", "exact"])
def test_dali_with_another_assigner_decides_as_the_one_named_after_it(assigner: str) -> None:
    context = BuildContext("m", 8, LAYERS)
    twin = compose({"beam": "dali-beam", "exact": "dali-ilp"}[assigner], context=context)
    built = compose("dali", {"assigner": assigner}, context=context)
    assert type(built.assigner) is type(twin.assigner)
    assert (built.name, built.decision_cost, built.parameters["assigner"]) == ("dali", twin.name, assigner)


def test_dali_does_not_take_forecasts_that_are_the_future() -> None:
    with pytest.raises(ChoiceError, match="forecast: expected 'residual', 'gate' or 'statistical', got 'oracle'"):
        compose("dali", {"forecast": "oracle"}, context=BuildContext("m", 8, LAYERS))
