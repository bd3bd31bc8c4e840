"""Fitting: what was put in comes out, and what a trace is too short to say is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import ndtri

from tests.kit.depth import thinned
from tests.kit.toys import toy_trace
from traces.layout import TraceError
from traces.library import calibration_of, load_trace
from traces.models.catalogue import load_model, model_names
from traces.models.shape import ModelShape, ShapeError
from traces.statistics import lag_profile
from traces.synthesis.estimate import _moves, _within, correlation_of, estimate_routing, overlap_of
from traces.synthesis.latent import best, coarse, skewed_scores, token_states
from traces.synthesis.measured import OverlapStatistics, _distinct, choices_of, measure, measure_trace
from traces.synthesis.named import nearest_routing
from traces.synthesis.routing_model import stored_models
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace

SHAPE = ModelShape("made-up", moe_layers=10, dense_layers=0, experts=32, top_k=4, hidden=8, expert_width=4)
TRUE = replace(
    nearest_routing(SHAPE), preference_share=tuple(np.linspace(0.2, 0.6, 10).tolist()), preference_tail=0.1,
    model_share=0.2,
    autocorrelation=(0.6, 0.3, *[0.0] * 14), state_width=4, noise_share=0.1, layer_drift=0.02, sharpness=1.7,
    text="given",
)


def trace(prompt_tokens: int, generated_tokens: int) -> Trace:
    return synthetic_trace(SHAPE, Synthesis(TRUE, 8, prompt_tokens, generated_tokens))


@pytest.fixture(scope="module")
def fitted():  # type: ignore[no-untyped-def]
    return estimate_routing(trace(24, 96), "known", "made-up", "a test")


def test_what_was_put_in_comes_out(fitted) -> None:  # type: ignore[no-untyped-def]
    assert abs(fitted.state_width - TRUE.state_width) <= 1
    np.testing.assert_allclose(fitted.preference_share, TRUE.preference_share, atol=0.15)
    np.testing.assert_allclose(fitted.autocorrelation, TRUE.autocorrelation, atol=0.12)
    for name, tolerance in {"model_share": 0.1, "noise_share": 0.1, "layer_drift": 0.02, "sharpness": 0.2}.items():
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), abs=tolerance), name
    assert fitted.text == "given"
    assert fitted.forecast_accuracy == pytest.approx(TRUE.forecast_accuracy, abs=0.05)


def test_its_residuals_are_small_and_say_what_was_not_fitted(fitted) -> None:  # type: ignore[no-untyped-def]
    by_name = {residual.statistic: residual for residual in fitted.residuals}
    assert [name for name, one in by_name.items() if not one.fitted] == [
        "prompt token's used in the prompt", "different experts of 2 tokens"
    ]
    for residual in fitted.residuals:
        assert residual.synthetic == pytest.approx(residual.real, rel=0.12, abs=0.01), residual


def test_its_residuals_are_of_all_statistics_that_were_measured(fitted) -> None:  # type: ignore[no-untyped-def]
    made, weights = measure_trace(trace(24, 96)), trace(24, 96).topk_weights.astype(np.float64).mean(axis=(0, 1))
    assert {residual.statistic: residual.real for residual in fitted.residuals} == pytest.approx({
        **{f"used again {lag} tokens later": made.lags[lag - 1] for lag in (1, 2, 4, 8, 16)},
        "used again later than that": made.far.mean(),
        "the same, spread over layers": made.far.std(),
        "used by a token of another text": made.across,
        "prompt token's used in the answer": made.prompt_answer,
        "prompt token's used in the prompt": made.prompt,
        "likeness of two tokens, spread": made.spread,
        "cross-layer gain, next layer": made.gain,
        "cross-layer gain, 8 layers ahead": made.far_gain,
        "different experts of 2 tokens": made.distinct[0],
        "different experts of 8 tokens": made.distinct[1],
        "different experts of 32 tokens": made.distinct[2],
        "different experts of a prompt": made.prompt_distinct,
        "weight of the first expert": weights[0],
        "weight of the last expert": weights[-1],
    }, abs=1e-4)


def test_a_trace_too_short_to_see_what_persists_is_refused() -> None:
    for lengths in ((24, 31), (3, 64)):
        with pytest.raises(TraceError, match="at least 4 prompt and 32 decode tokens, found none"):
            estimate_routing(trace(*lengths), "short", "made-up", "a test")


@pytest.mark.parametrize("correlation", [-0.3, 0.0, 0.4, 0.9])
def test_the_closed_form_is_what_one_counts(correlation: float) -> None:
    rng = np.random.default_rng(0)
    one, fresh = rng.standard_normal((2, 400_000))
    other = correlation * one + np.sqrt(1 - correlation**2) * fresh
    threshold = 1.2815515655446004  # of the best tenth
    counted = ((one > threshold) & (other > threshold)).sum() / (one > threshold).sum()
    assert overlap_of(np.array(correlation), 0.1) == pytest.approx(counted, abs=0.01)


def test_no_correlation_is_chance_and_the_inverse_inverts() -> None:
    assert overlap_of(np.array(0.0), 0.1) == pytest.approx(0.1)
    correlations = np.array([-0.2, 0.1, 0.5, 0.95])
    assert correlation_of(overlap_of(correlations, 0.05), 0.05) == pytest.approx(correlations, abs=1e-3)


# --- Logits of synthetic routers --------------------------------------------------------------------------------------


def streams(*seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in seeds]


def circular(states: np.ndarray, lag: int) -> np.ndarray:
    return (states * np.roll(states, lag, axis=0)).mean(axis=0)


def test_every_text_has_the_autocorrelation_itself() -> None:
    states = token_states(streams(1, 2), [0.5, 0.2], tokens=40, width=3)
    assert states.shape == (2, 40, 3)
    for text in states:
        for lag, wanted in enumerate([1, 0.5, 0.2, 0, 0]):
            assert circular(text, lag) == pytest.approx([wanted] * 3, abs=1e-5)


@given(tokens=st.integers(1, 70), width=st.integers(1, 5), first=st.floats(-0.3, 0.95), seed=st.integers(0, 9))
def test_lengths_and_impossible_autocorrelations_give_variance_one(
    tokens: int, width: int, first: float, seed: int
) -> None:
    states = token_states(streams(seed), [first, first], tokens, width)
    assert states.shape == (1, tokens, width)
    assert (states**2).mean(axis=1)[0] == pytest.approx([1] * width, rel=1e-3)


def test_texts_differ() -> None:
    one, other = token_states(streams(1, 2), [0.5], 30, 1)
    assert not np.allclose(one, other)


@given(tokens=st.integers(1, 40), seeds=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_text_does_not_depend_on_which_others_are_made_with_it(tokens: int, seeds: list[int]) -> None:
    alone = [token_states(streams(seed), [0.5, 0.2], tokens, 3)[0].tolist() for seed in seeds]
    assert token_states(streams(*seeds), [0.5, 0.2], tokens, 3).tolist() == alone


def test_skewed_scores_have_their_longer_tail_where_they_should() -> None:
    for tail in (-0.5, 0.0, 0.5):
        scores = skewed_scores(101, tail)
        assert (scores.mean(), scores.std()) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
        assert (np.diff(scores) > 0).all()
        assert np.sign((scores**3).mean().round(9)) == -np.sign(tail)
    assert skewed_scores(1, 0.0).tolist() == [0]


@pytest.mark.parametrize("tail", sorted({fit.preference_tail for fit in stored_models().values()}))
def test_in_single_precision_they_are_scipys_quantiles(tail: float) -> None:
    for count in (*range(1, 513, 7), 8, 16, 32, 60, 64, 128, 160, 256, 384, 512):
        normal = ndtri((np.arange(count) + 0.5) / count)
        skewed = -np.expm1(-tail * normal) / tail
        wanted = (skewed - skewed.mean()) / max(float(skewed.std()), np.finfo(float).tiny)
        assert skewed_scores(count, tail).astype(np.float32).tolist() == wanted.astype(np.float32).tolist()


ROWS = st.tuples(st.integers(1, 5), st.integers(2, 40))
LOGITS = st.floats(-50, 50, width=32)


@given(arrays(np.float32, ROWS, elements=LOGITS), st.data())
def test_the_best_are_the_largest_in_descending_order(values: np.ndarray, data: st.DataObject) -> None:
    rounded, count = coarse(values), data.draw(st.integers(1, values.shape[1]))
    chosen = np.take_along_axis(rounded, best(values, count).astype(np.intp), axis=1)
    assert chosen.tolist() == np.sort(rounded, axis=1)[:, ::-1][:, :count].tolist()
    assert all(len(set(row)) == count for row in best(values, count).tolist())


def test_rounding_is_fine() -> None:
    values = np.random.default_rng(0).standard_normal((100, 128)).astype(np.float32)
    np.testing.assert_allclose(coarse(values), values, rtol=2e-5)
    assert (best(values, 6) == np.argsort(-values, axis=1)[:, :6]).mean() > 0.999


# --- what is measured of a trace, and what estimation makes of a difference -------------------------------------------


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


# --- what is taken from where for a model whose routing nobody has recorded -------------------------------------------


SMALL = "/2x8+16"


@pytest.mark.parametrize(("model", "fit"), [
    ("qwen3-30b-a3b", "qwen"),  # the same model
    ("gemma-4-26b-a4b", "gemma"),
    ("qwen3-235b-a22b", "qwen"),  # the nearest: 128 experts too
    ("deepseek-v2-lite", "deepseek-v2-lite"),
    ("qwen2-57b-a14b", "deepseek-v2-lite"),  # 64 experts; before mini-deepseek, which is as near
    ("mini-deepseek", "mini-deepseek"),
    ("gpt-oss-20b", "gpt-oss-20b"),
    ("mixtral-8x7b", "mixtral-8x7b"),
    ("phi-3.5-moe", "mini-moe"),  # 16 experts, 2 a token
    ("mini-moe", "mini-moe"),
])
def test_the_nearest_fit_is_taken_and_named(model: str, fit: str) -> None:
    routing = nearest_routing(load_model(model))
    assert routing.name == fit
    assert routing.source.startswith((f"fitted to {fit} (", f"fitted to {fit}, "))


def test_the_shape_is_the_models_and_layers_are_interpolated() -> None:
    qwen, shape = stored_models()["qwen"], load_model("qwen3-30b-a3b")
    same = nearest_routing(shape)
    assert (same.moe_layers, same.experts, same.top_k) == (48, 128, 8)
    assert same.preference_share == pytest.approx(qwen.preference_share)
    halved = nearest_routing(replace(shape, moe_layers=24)).preference_share
    assert halved[0] == pytest.approx((qwen.preference_share[0] + qwen.preference_share[1]) / 2)


def test_accuracy_is_published_for_the_model_or_measured_on_the_bundled_trace() -> None:
    measured = stored_models()["mini-deepseek"].forecast_accuracy
    qwen = nearest_routing(load_model("qwen3-30b-a3b"))
    assert (qwen.forecast_accuracy["gate@1"], qwen.forecast_accuracy["residual@1"]) == (0.776, 0.933)  # DALI, Table 5
    assert qwen.forecast_accuracy["estimator@1"] == 0.9  # Speculating Experts, Sec. 6.2
    assert qwen.forecast_accuracy["partial@1"] == measured["partial@1"]
    assert qwen.forecast_accuracy["gate@2"] == pytest.approx(measured["gate@2"] * 0.776 / measured["gate@1"], abs=1e-4)
    assert "as published for qwen3-30b-a3b" in qwen.source
    lite = nearest_routing(load_model("deepseek-v2-lite"))
    assert lite.forecast_accuracy["gate@1"] == 0.726
    assert nearest_routing(load_model("mini-deepseek")).forecast_accuracy == measured


def test_a_gate_with_residuals_keeps_its_ratio_to_the_published_accuracy_of_the_gate() -> None:
    measured = stored_models()["mini-moe"].forecast_accuracy
    mixtral = nearest_routing(load_model("mixtral-8x7b")).forecast_accuracy
    assert mixtral["gate@1"] == 0.8411  # DAOP, Sec. III
    assert mixtral["residual@1"] == pytest.approx(measured["residual@1"] * 0.8411 / measured["gate@1"], abs=1e-4)
    assert mixtral["quasi_hidden@1"] == measured["quasi_hidden@1"]


@pytest.mark.parametrize("model", model_names())
def test_every_model_of_the_catalogue_has_routing_of_its_shape(model: str) -> None:
    shape = load_model(model)
    routing = nearest_routing(shape)
    assert (routing.moe_layers, routing.experts, routing.top_k) == (shape.moe_layers, shape.experts, shape.top_k)


@thinned(11)
@pytest.mark.parametrize("model", model_names())
def test_every_model_of_the_catalogue_has_a_synthetic_trace(model: str) -> None:
    trace = load_trace(f"synthetic:{model}{SMALL}")
    assert (len(trace), trace.shape.moe_layers) == (48, load_model(model).moe_layers)
    assert trace.provenance["synthetic"]


def test_a_name_is_one_trace_and_its_calibration_is_of_other_texts() -> None:
    name = f"synthetic:mini-moe{SMALL}"
    assert load_trace(name).checksum == load_trace(name).checksum
    calibration = calibration_of(name)
    assert calibration == "synthetic:mini-moe-calibration"
    assert calibration_of(calibration) is None
    other = load_trace(f"{calibration}{SMALL}")
    assert other.checksum != load_trace(name).checksum
    assert other.provenance["model_seed"] == load_trace(name).provenance["model_seed"]


def test_layers_and_weights_can_be_named_too() -> None:
    cut = load_trace(f"synthetic:mixtral-8x7b{SMALL}:3")
    assert cut.shape.moe_layers == 3
    assert load_trace(f"synthetic:qwen3-30b-a3b@q4_k_m{SMALL}").shape.name == "qwen3-30b-a3b@q4_k_m"
    assert calibration_of(f"synthetic:mixtral-8x7b{SMALL}:3") == "synthetic:mixtral-8x7b-calibration:3"


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(TraceError, match="expected synthetic:MODEL, synthetic:MODEL~TEXT"):
        load_trace("synthetic:mini-moe/lots")
    with pytest.raises(ShapeError, match="did you mean 'mini-moe'"):
        load_trace("synthetic:mini-mo")


def test_eight_experts_a_token_are_as_persistent_as_published() -> None:
    """Nothing was fitted to it: the log has six. Published for eight: 42.7 % (25 prompts: 35.3 to 51.1) and 45 %."""
    again = lag_profile(load_trace("synthetic:qwen3-30b-a3b"), range(1, 2))["probability"][0]
    assert 0.39 <= again <= 0.47
