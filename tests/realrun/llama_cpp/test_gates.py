"""Gate matrices of a GGUF file: as the package gguf wrote them, and the experts that they choose, worked by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from realrun.llama_cpp.gates import (
    BlockRouting,
    Gate,
    GateForecasts,
    Gates,
    RoutingObserver,
    Scoring,
    mean_change,
    read_gates,
    routing_rows,
    score_rows,
    scores_of,
)
from traces.capture.settings import CaptureError
from traces.layout import ForecastKey
from traces.models.shape import ModelShape, ShapeError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'trilane[llama]'")


HIDDEN, EXPERTS = 64, 8


def write(path: Path, tensors: dict[str, tuple[Any, Any]], arch: str = "deepseek2", **keys: int) -> Path:
    """A file with these arrays, in these types, by the package."""
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": 3, "embedding_length": HIDDEN, "expert_count": EXPERTS, "expert_used_count": 2}
    for key, number in (sizes | keys).items():
        writer.add_uint32(f"{arch}.{key}", number)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_matrices_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    """One in each type; the last block predicts several tokens and is left out."""
    number, matrix, other = gguf.GGMLQuantizationType[kind], floats(EXPERTS, HIDDEN), floats(EXPERTS, HIDDEN, seed=1)
    bias, f32 = floats(EXPERTS, seed=2), gguf.GGMLQuantizationType.F32
    tensors = {
        "blk.0.ffn_gate_inp.weight": (matrix, number), "blk.1.ffn_gate_inp.weight": (other, f32),
        "blk.1.exp_probs_b.bias": (bias, f32), "blk.1.ffn_gate_inp.bias": (2 * bias, f32),
        "blk.2.ffn_gate_inp.weight": (other, f32),
    }
    gates = read_gates(write(tmp_path / "m.gguf", tensors, nextn_predict_layers=1))
    assert list(gates.by_block) == [0, 1]
    expected = gguf.quants.dequantize(gguf.quants.quantize(matrix, number), number)
    np.testing.assert_array_equal(gates.by_block[0].weight, expected)
    assert np.abs(gates.by_block[0].weight - matrix).max() < 0.02
    assert gates.by_block[0].bias is None
    np.testing.assert_array_equal(gates.by_block[1].weight, other)
    np.testing.assert_array_equal(gates.by_block[1].selection_bias, bias)
    np.testing.assert_array_equal(gates.by_block[1].bias, 2 * bias)
    assert (gates.top_k, gates.scoring, gates.groups) == (2, "sigmoid", 1)


@pytest.mark.parametrize(("arch", "keys", "biased", "scoring"), [
    ("qwen3moe", {}, False, "softmax"),
    ("glm4moe", {}, True, "sigmoid"),
    ("ernie4_5-moe", {}, True, "softmax"),
    ("deepseek2", {"expert_gating_func": 1}, True, "softmax"),
    ("gpt-oss", {"expert_gating_func": 3}, False, "logits"),
    ("deepseek4", {}, True, "sqrt_softplus"),
])
def test_how_experts_are_scored(arch: str, keys: dict[str, int], biased: bool, scoring: str, tmp_path: Path) -> None:
    f32 = gguf.GGMLQuantizationType.F32
    tensors = {"blk.0.ffn_gate_inp.weight": (floats(EXPERTS, HIDDEN), f32)}
    tensors |= {"blk.0.exp_probs_b.bias": (floats(EXPERTS), f32)} if biased else {}
    assert read_gates(write(tmp_path / "m.gguf", tensors, arch, **keys)).scoring == scoring


ONE = np.ones((1, 1), np.float32)
LOGITS = np.array([[1.0], [3.0], [2.0], [0.0]], np.float32)  # of the input 1


def test_the_largest_logits_are_chosen_and_a_bias_counts() -> None:
    plain = Gates({0: Gate(LOGITS)}, 2, "softmax")
    assert plain.ranked(0, ONE, 4).tolist() == [[1, 2, 0, 3]]
    assert plain.ranked(0, -ONE, 2).tolist() == [[3, 0]]
    biased = Gates({0: Gate(LOGITS, bias=np.array([0, 0, 0, 9], np.float32))}, 2, "logits")
    assert biased.ranked(0, ONE, 2).tolist() == [[3, 1]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("scoring", "expected"), [
    ("sigmoid", [0.0, 0.5, 1.0]), ("sqrt_softplus", [0.0, 0.8325546, 14.142136]), ("softmax", [0.0, 0.0, 1.0]),
])
def test_large_logits_overflow_no_score(scoring: Scoring, expected: list[float]) -> None:
    """In 32 bits e^89 is infinite. Of 0: 1 / 2 and sqrt(log 2); of 200: 1 and sqrt(200)."""
    found = scores_of(np.array([[-200.0, 0.0, 200.0]], np.float32), scoring)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [expected], atol=1e-6)


def test_a_selection_bias_is_added_to_the_scores() -> None:
    """Sigmoids of 1, 3, 2, 0: 0.731, 0.953, 0.881, 0.5; with 0.3 for the last, it is third: 0.8."""
    bias = np.array([0, 0, 0, 0.3], np.float32)
    gates = Gates({0: Gate(LOGITS, selection_bias=bias)}, 2, "sigmoid")
    assert gates.ranked(0, ONE, 4).tolist() == [[1, 2, 3, 0]]


def test_experts_of_groups_that_are_not_used_come_last() -> None:
    """Groups 0-2 and 3-5; the two best of each sum to 0.9 + 0.1 and 0.6 + 0.5: the second is used."""
    logits = np.array([[0.9], [0.1], [0.0], [0.6], [0.5], [-9.0]], np.float32)
    gates = Gates({0: Gate(logits)}, 2, "logits", groups=2, groups_used=1)
    assert gates.ranked(0, ONE, 6).tolist() == [[3, 4, 5, 0, 1, 2]]


@pytest.mark.parametrize(("tensors", "keys", "words"), [
    ({"blk.0.attn_q.weight": (8, HIDDEN)}, {}, "expected gates (blk.N.ffn_gate_inp) of 1 to 32,768 experts, got"),
    ({"blk.0.ffn_gate_inp.weight": (7, HIDDEN)}, {}, "'blk.0.ffn_gate_inp.weight': expected sizes [64, 8], those"),
    ({"blk.0.exp_probs_b.bias": (8,)}, {}, "expected a gate matrix next to 'blk.0.exp_probs_b.bias', there"),
    ({"blk.0.ffn_gate_inp.weight": (8, HIDDEN)}, {"expert_gating_func": 9}, "expert_gating_func: expected 1 to 4"),
    ({"blk.0.ffn_gate_inp.weight": (8, HIDDEN)}, {"expert_group_count": 3}, "expected groups of equal size, got 8"),
])
def test_what_is_missing_or_wrong_is_named(
    tensors: dict[str, tuple[int, ...]], keys: dict[str, int], words: str, tmp_path: Path
) -> None:
    arrays = {name: (floats(*shape), gguf.GGMLQuantizationType.F32) for name, shape in tensors.items()}
    file = write(tmp_path / "m.gguf", arrays, **keys)
    with pytest.raises(ShapeError) as caught:
        read_gates(file)
    assert str(caught.value).startswith(f"{file}: {words}")


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


@pytest.mark.parametrize(("tensors", "missing"), [
    ([tensor("ffn_moe_topk-1", [[0, 1]])], r"ffn_moe_inputs-1 of 1 tokens with 2 elements .* found 0 elements"),
    (
        [tensor("ffn_moe_logits-1", [[1, 2, 3]], inputs=[[1, 0]]), tensor("ffn_moe_topk-1", [[0, 1, 2]])],
        r"ffn_moe_topk-1 of 1 tokens with 2 elements .* found 3 elements",
    ),
])
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
