"""Fitting: what was put in comes out, and what a trace is too short to say is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traces.layout import TraceError
from traces.models.shape import ModelShape
from traces.synthesis.estimate import correlation_of, estimate_routing, overlap_of
from traces.synthesis.measured import measure_trace
from traces.synthesis.named import nearest_routing
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
