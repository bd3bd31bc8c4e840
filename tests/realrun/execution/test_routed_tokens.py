"""Rows that every expert computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Routing
from realrun.execution.routed_tokens import as_it_is, choices_of, descending, rerouted, routed, routing_of


def listed(choices: dict[int, torch.Tensor]) -> dict[int, list[int]]:
    return {expert: part.tolist() for expert, part in choices.items()}


def test_choice_j_of_token_n_has_the_number_n_k_plus_j() -> None:
    assert listed(choices_of(np.array([[5, 2], [2, 0], [9, 5]]))) == {0: [3], 2: [1, 2], 5: [0, 5], 9: [4]}


def test_negative_ids_are_nobodys() -> None:
    assert listed(choices_of(np.array([[3, -1], [-1, -1]]))) == {3: [0]}
    assert listed(choices_of(np.array([[-1]]))) == {}


@given(st.integers(1, 4).flatmap(lambda k: st.lists(st.lists(st.integers(-1, 6), min_size=k, max_size=k), min_size=1)))
def test_every_choice_is_somebodys_exactly_once(ids: list[list[int]]) -> None:
    flat = [expert for token in ids for expert in token]
    choices = listed(choices_of(np.array(ids)))
    assert list(choices) == sorted(set(flat) - {-1})
    assert {number: expert for expert, some in choices.items() for number in some} == {
        number: expert for number, expert in enumerate(flat) if expert >= 0
    }
    assert all(some == sorted(some) for some in choices.values())


def test_routed_keeps_the_routers_weights_in_the_order_of_choices() -> None:
    given = routed(np.array([[1, 0], [1, 3]]), torch.tensor([[0.7, 0.3], [0.9, 0.1]]))
    assert (given.tokens, given.top_k, given.complete) == (2, 2, True)
    assert torch.equal(given.weights, torch.tensor([0.7, 0.3, 0.9, 0.1]))
    assert routing_of(given) == Routing((0, 1, 3), (1, 2, 1))


def test_what_a_policy_decides_token_by_token_may_be_ragged() -> None:
    """AdapMoE drops the second expert of some tokens."""
    routing = Routing((1, 4), (2, 1), ((4, 1), (1,)), ((0.75, 0.25), (1.0,)))
    given = rerouted(routing, top_k=2, dtype=torch.float32)
    assert listed(dict(given.choices)) == {1: [1, 2], 4: [0]}
    assert given.weights.tolist() == [0.75, 0.25, 1.0, 0.0]
    assert not given.complete
    assert routing_of(given)[:2] == routing[:2]


@pytest.mark.parametrize(("dtype", "third"), [(torch.float32, 0.3333), (torch.bfloat16, 0.333984375)])
def test_a_policys_weights_come_in_the_type_of_the_routers(dtype: torch.dtype, third: float) -> None:
    routing = as_it_is(Routing((0, 2), (1, 1), ((2,), (0,)), ((0.3333,), (1.0,))))
    weights = rerouted(routing, 1, dtype).weights
    assert torch.equal(weights, torch.tensor([third, 1.0], dtype=dtype))
    assert weights.dtype == dtype


def test_descending_sorts_every_token_and_keeps_equals_in_order() -> None:
    ids, weights = descending(np.array([[7, 3, 5], [1, 2, 4]]), torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]))
    assert ids == [[3, 5, 7], [1, 2, 4]]
    assert torch.allclose(torch.tensor(weights), torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]]))
