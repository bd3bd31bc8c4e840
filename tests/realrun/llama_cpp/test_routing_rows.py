"""Routing of llama.cpp's passes as rows of a trace, on hand-made numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from realrun.llama_cpp.gate_matrices import Gate, Gates, Scoring
from realrun.llama_cpp.routing_observer import BlockRouting, RoutingObserver
from realrun.llama_cpp.routing_rows import GateForecasts, mean_change, routing_rows, score_rows
from traces.capture.settings import CaptureError
from traces.layout import ForecastKey
from traces.models.shape import ModelShape

SHAPE = ModelShape("m", moe_layers=1, dense_layers=4, experts=3, top_k=2, hidden=2, expert_width=1)


def tensor(name: str, values: Any, inputs: Any = None) -> Any:
    """A tensor of the graph, and for a router's product what the gate was multiplied with."""
    source = SimpleNamespace(values=lambda: np.array(inputs, np.float32))
    return SimpleNamespace(name=name, values=lambda: np.array(values), source=lambda number: source)


def observed(*tensors: Any, tokens: int) -> dict[int, BlockRouting]:
    """One pass of the router of ``SHAPE``."""
    observer = RoutingObserver(Path("m.gguf"), SHAPE)
    for each in tensors:
        assert observer.wants(each.name)
        observer.take(each)
    return observer.take_pass(tokens)


def test_a_pass_in_two_pieces_is_one_and_the_last_weights_count() -> None:
    routing = observed(
        tensor("ffn_moe_logits-4", [[1, 2, 3], [3, 2, 1]], inputs=[[1, 0], [0, 1]]),
        tensor("ffn_moe_topk-4", [[2, 1], [0, 1]]),
        tensor("ffn_moe_weights-4", [[[0.5], [0.3]], [[0.6], [0.2]]]),
        tensor("ffn_moe_weights_norm-4", [[0.6, 0.4], [0.75, 0.25]]),
        tensor("ffn_moe_logits-4", [[5, 6, 7]], inputs=[[2, 2]]),
        tensor("ffn_moe_topk-4", [[2, 1]]),
        tensor("ffn_moe_weights-4", [[0.5], [0.3]]),  # of one token: the axis of tokens is gone
        tensor("ffn_moe_weights_norm-4", [[0.7, 0.3]]),
        tokens=3,
    )
    found = routing[4]
    assert found.inputs.tolist() == [[1, 0], [0, 1], [2, 2]]
    assert found.logits.tolist() == [[1, 2, 3], [3, 2, 1], [5, 6, 7]]
    assert found.ids.tolist() == [[2, 1], [0, 1], [2, 1]]
    assert found.weights.tolist() == [[0.6, 0.4], [0.75, 0.25], [0.7, 0.3]]


def test_other_names_are_not_asked_for() -> None:
    observer = RoutingObserver(Path("m.gguf"), SHAPE)
    names = ["ffn_moe_logits-12", "ffn_moe_topk-0", "ffn_moe_probs-0", "ffn_moe_weights-0 (reshaped)", "l_out-1"]
    assert [observer.wants(name) for name in names] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        ([tensor("ffn_moe_topk-1", [[0, 1]])], r"ffn_moe_inputs-1 of 1 tokens with 2 elements .* found 0 elements"),
        (
            [tensor("ffn_moe_logits-1", [[1, 2, 3]], inputs=[[1, 0]]), tensor("ffn_moe_topk-1", [[0, 1, 2]])],
            r"ffn_moe_topk-1 of 1 tokens with 2 elements .* found 3 elements",
        ),
    ],
)
def test_a_graph_without_a_tensor_is_refused(tensors: list[Any], missing: str) -> None:
    with pytest.raises(CaptureError, match=rf"m\.gguf: expected {missing}; routing of this family is not supported"):
        observed(*tensors, tokens=1)


def block(inputs: Any, logits: Any = None, ids: Any = None, weights: Any = None) -> BlockRouting:
    arrays = [np.array(each if each is not None else [[0.0]] * len(inputs), np.float32) for each in (logits, weights)]
    return BlockRouting(np.array(inputs, np.float32), arrays[0], np.array(ids or [[0]] * len(inputs)), arrays[1])


def test_experts_are_ordered_by_weight_and_equal_ones_as_the_router_has_them() -> None:
    rows = routing_rows({0: block([[0], [0]], ids=[[4, 1, 2], [3, 0, 5]], weights=[[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]])})
    assert rows["topk_ids"].tolist() == [[[1, 2, 4]], [[3, 0, 5]]]
    assert rows["topk_weights"].astype(float).round(3).tolist() == [[[0.5, 0.3, 0.2]], [[0.4, 0.4, 0.2]]]


def scored(routing: dict[int, BlockRouting], scoring: Scoring, bias: Any = None) -> Any:
    gates = Gates({0: Gate(np.zeros((2, 1), np.float32), bias)}, 1, scoring)
    return score_rows(routing, gates).astype(float).round(3).tolist()


def test_scores_are_the_routers_own_and_of_logits_their_softmax() -> None:
    routing = {0: block([[0]], logits=[[0.0, np.log(3.0)]])}
    assert scored(routing, "softmax") == [[[0.25, 0.75]]]
    assert scored(routing, "logits") == [[[0.25, 0.75]]]
    assert scored(routing, "sigmoid") == [[[0.5, 0.75]]]


def test_scores_contain_the_routers_bias() -> None:
    routing = {0: block([[0]], logits=[[0.0, 0.0]])}
    assert scored(routing, "softmax", np.array([0.0, np.log(3.0)], np.float32)) == [[[0.25, 0.75]]]


EYE = np.eye(4, dtype=np.float32)
FOUR = Gates({2: Gate(EYE), 5: Gate(-EYE), 7: Gate(EYE)}, 1, "softmax")
SEEN = {2: block([[4, 3, 2, 1]]), 5: block([[1, 4, 3, 2]]), 7: block([[0, 0, 0, 9]])}


def test_gate_forecasts_apply_a_later_router_to_the_input_of_this_one() -> None:
    forecasts = GateForecasts(FOUR, (ForecastKey("gate", 1), ForecastKey("gate", 2)), count=2)
    assert {name: ids.tolist() for name, ids in forecasts.rows(SEEN).items()} == {
        "forecast/gate@1/ids": [[[3, 2], [1, 2], [-1, -1]]],
        "forecast/gate@2/ids": [[[0, 1], [-1, -1], [-1, -1]]],
    }


def test_residual_forecasts_add_the_mean_change_first() -> None:
    """From (4, 3, 2, 1) and (0, 1, 0, 1) to (1, 4, 3, 2) and (2, 1, 0, 1): -0.5, 0.5, 0.5, 0.5 in the mean."""
    passes = [{2: SEEN[2], 5: SEEN[5]}, {2: block([[0, 1, 0, 1]]), 5: block([[2, 1, 0, 1]])}]
    assert mean_change(passes).tolist() == [[-0.5, 0.5, 0.5, 0.5]]
    swap = np.array([[0, 0, 0, 0], [-9, 0, 0, 9]], np.float32)
    forecasts = GateForecasts(FOUR, (ForecastKey("residual", 1),), count=1, change=swap)
    assert forecasts.rows(SEEN)["forecast/residual@1/ids"].tolist() == [[[3], [3], [-1]]]
