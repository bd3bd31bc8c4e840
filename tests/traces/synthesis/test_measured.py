"""What is measured of a trace, and what estimation makes of a difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.toys import toy_trace
from traces.models.shape import ModelShape
from traces.synthesis.estimate import _moves, _within, correlation_of
from traces.synthesis.measured import OverlapStatistics, _distinct, choices_of, measure, measure_trace
from traces.synthesis.named import nearest_routing
from traces.trace import Trace

SHAPE = ModelShape("made-up", moe_layers=10, dense_layers=0, experts=32, top_k=4, hidden=8, expert_width=4)


def random_trace() -> Trace:
    """A text of 12 prompt and 150 answer tokens."""
    draw = np.random.default_rng(1)
    ids = draw.permuted(np.broadcast_to(np.arange(32), (162, 10, 32)), axis=-1)[..., :4]
    return toy_trace(ids.tolist(), prompt_tokens=12, experts=32)


def test_texts_are_measured_apart() -> None:
    one = random_trace()
    two = {name: np.concatenate([values, values]) for name, values in one.tensors().items()}
    two["sequence"] = np.repeat(np.arange(2, dtype=np.int32), len(one))
    texts, [alone] = choices_of(Trace.from_tensors(one.shape, two, {})), choices_of(one)
    assert [(text.prompt == alone.prompt).all() and (text.answer == alone.answer).all() for text in texts] == [True] * 2


def test_the_last_layer_of_prompts_is_left_out_where_an_importer_has_filled_it_in() -> None:
    trace = random_trace()
    filled = Trace.from_tensors(trace.shape, trace.tensors(), {"filled_rows": 12})
    prompts = [measure(choices_of(trace), 32, layers).prompt for layers in (9, 10)]
    assert [measure_trace(filled).prompt, measure_trace(trace).prompt] == prompts
    assert prompts[0] != prompts[1]


@pytest.fixture
def real() -> OverlapStatistics:
    return measure(choices_of(random_trace()), 32)


@pytest.mark.parametrize(("times", "move"), [(1.0, 0.0), (2.0, 2 * np.log(2)), (0.5, -2 * np.log(2))])
def test_prompts_of_too_many_experts_have_too_small_a_share_of_preferences(
    real: OverlapStatistics, times: float, move: float
) -> None:
    made = replace(real, prompt_distinct=real.prompt_distinct * times)
    assert _moves(nearest_routing(SHAPE), real, made)["prompt_preference_share"] == pytest.approx(move)


@pytest.mark.filterwarnings("error")
def test_texts_shorter_than_a_window_have_no_number_of_distinct_experts() -> None:
    used = np.ones((2, 3, 4), np.float32)
    assert _distinct(used, 3) == 4
    assert np.isnan(_distinct(used, 4))


@pytest.mark.parametrize(("name", "least", "most"), [
    ("preference_share", 0.01, 0.98), ("preference_tail", -1.5, 1.5), ("prompt_preference_share", 0.05, 1.5),
    ("prompt_likeness", 0, 1), ("model_share", 0, 1), ("autocorrelation", -0.3, 0.95), ("layer_drift", 0, 0.5),
    ("noise_share", 0, 0.9),
])
def test_a_parameter_stays_within_what_could_be_told_apart(name: str, least: float, most: float) -> None:
    assert [_within(name, 0.4, np.float64(move)) for move in (-9, 0.05, 9)] == [least, pytest.approx(0.45), most]


def test_layers_move_by_themselves() -> None:
    assert _within("prompt_preference_share", 1.0, np.float64(9)) == 1.5
    assert _within("preference_share", (0.5, 0.5), np.array([-9, 0.1])) == (0.01, 0.6)


def test_too_little_overlap_nearby_lengthens_the_autocorrelation(real: OverlapStatistics) -> None:
    """By what is missing, as a share of what preferences leave to the states of tokens."""
    routing, made = nearest_routing(SHAPE), replace(real, lags=real.lags * 0.75)
    missing = correlation_of(real.lags, 4 / 32) - correlation_of(made.lags, 4 / 32)
    left = 1 - np.mean(routing.preference_share)
    np.testing.assert_allclose(_moves(routing, real, made)["autocorrelation"], missing / left)
