"""Routing that policies make up: tokens counted, and weights in the model's way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.mechanism.views import Forecast, Routing
from policies.papers.daop import PredictingRouter
from policies.papers.smoe import CacheRouter
from policies.papers.speculating_experts import SpeculativeRouter
from policies.parts.routers import combine_weights, routing_of_tokens, scores_by_expert
from policies.registry import BuildContext, compose
from trilane.testing.worlds import toy_calibration


def test_tokens_are_counted_by_expert() -> None:
    ids, weights = [(3, 1), (3, 0)], [(0.6, 0.4), (0.5, 0.5)]
    assert routing_of_tokens(ids, weights) == Routing((0, 1, 3), (1, 1, 2), ids, weights)


@pytest.mark.parametrize(("scores", "norm_topk", "weights"), [
    ((0.5, 0.125, 0.375), True, [0.75, 0.25]),  # of 0.375 and 0.125
    ((0.5, 0.125, 0.375), False, [0.375, 0.125]),
    ({1: 0.125, 2: 0.375}, True, [0.75, 0.25]),
    ({}, True, [0.5, 0.5]),
    ((), False, [0.5, 0.5]),
    ((1.0, 0.0, 0.0), True, [0.5, 0.5]),  # scores too small for their 16 bits
    ((1.0, 0.0, 0.0), False, [0.0, 0.0]),
])
def test_weights_of_experts_2_and_1(
    scores: tuple[float, ...] | dict[int, float], norm_topk: bool, weights: list[float]
) -> None:
    assert combine_weights(scores, (2, 1), norm_topk) == weights


def test_scores_by_expert() -> None:
    forecast = Forecast(1, "gate", (), (), [(2, 0), (1, 2)])
    assert scores_by_expert(forecast) == [{}, {}]
    assert scores_by_expert(forecast._replace(token_scores=[(0.5, 0.25), (0.75, 0.125)])) == [
        {2: 0.5, 0: 0.25}, {1: 0.75, 2: 0.125},
    ]


@pytest.mark.parametrize("name", ["smoe", "daop", "daop@impl", "router-pf", "hybrid-pf", "quasi-pf@impl"])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_who_makes_up_routing_does_it_in_the_models_way(name: str, norm_topk: bool) -> None:
    recalls = {("quasi_hidden", 1): [0.9] * 3}
    calibration = replace(toy_calibration(3, 8, 2), recalls=recalls)
    context = BuildContext("toy", 8, 3, top_k=2, calibration=calibration, norm_topk=norm_topk)
    router = compose(name, context=context).router
    assert isinstance(router, CacheRouter | PredictingRouter | SpeculativeRouter)
    assert router.norm_topk is norm_topk
