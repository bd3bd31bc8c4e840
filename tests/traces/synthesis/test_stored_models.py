"""The stored fits are those of the traces that they name."""

from __future__ import annotations

import numpy as np
import pytest

from tests.traces.synthesis.logs import LOGS, needs_logs
from tools.refit_repetitions import REPEATED, fit_repetitions
from tools.refit_routing import BUNDLED, refit_bundled
from tools.refit_routing import LOGS as LOG_NAMES
from tools.refit_routing_figures import MODEL
from traces.importers.route_trace_v1 import import_route_trace
from traces.layout import TraceError
from traces.library import load_trace
from traces.models.catalogue import model_names
from traces.synthesis.estimate import Layout, simulated
from traces.synthesis.measured import choices_of, measure_trace
from traces.synthesis.routing_model import RoutingModel, stored_models
from traces.trace import Trace


def recorded(name: str) -> Trace:
    return load_trace(BUNDLED[name]) if name in BUNDLED else import_route_trace(LOGS / f"{name}.route.csv")


NAMES = [pytest.param(name, marks=needs_logs) for name in LOG_NAMES] + list(BUNDLED)


def test_there_is_one_of_each_trace_at_hand_and_two_of_published_figures() -> None:
    assert list(stored_models()) == [*LOG_NAMES, MODEL, REPEATED, *BUNDLED]
    assert {fit.model for fit in stored_models().values()} <= set(model_names())


def test_refitting_a_bundled_trace_gives_what_is_stored() -> None:
    """To the rounding of another processor, which may turn a near tie."""
    found, stored = refit_bundled("mini-moe").to_dict(), stored_models()["mini-moe"].to_dict()
    assert found["state_width"] == stored["state_width"]
    for name in ("preference_share", "autocorrelation", "noise_share", "prompt_likeness", "sharpness", "model_share"):
        np.testing.assert_allclose(found[name], stored[name], atol=0.03, err_msg=name)
    assert found["forecast_accuracy"] == stored["forecast_accuracy"]


def test_refitting_to_repetitions_gives_what_is_stored() -> None:
    found, stored = fit_repetitions(stored_models()["mini-moe"]), stored_models()[REPEATED]
    np.testing.assert_allclose(found.preference_share, stored.preference_share, atol=0.01)
    np.testing.assert_allclose(found.autocorrelation, stored.autocorrelation, atol=0.01)
    assert found.source == stored.source


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_residuals_are_those_of_the_trace(name: str) -> None:
    """What the fit looks at, measured again: on the trace, and on routing made up with the stored parameters."""
    trace, fit = recorded(name), stored_models()[name]
    real, made = measure_trace(trace), simulated(fit, Layout.of(choices_of(trace)), seed=10_000)
    residuals = {residual.statistic: residual for residual in fit.residuals}
    prompts = trace.provenance.get("synthetic_prompts") is None
    assert ("different experts of a prompt" in residuals) == prompts
    for statistic, there, here in (
        ("used again 1 tokens later", real.lags[0], made.lags[0]),
        ("used again later than that", real.far.mean(), made.far.mean()),
        ("cross-layer gain, next layer", real.gain, made.gain),
        *[("different experts of a prompt", real.prompt_distinct, made.prompt_distinct)] * prompts,
    ):
        assert residuals[statistic].real == pytest.approx(there, abs=1e-4), statistic
        assert residuals[statistic].synthetic == pytest.approx(here, rel=0.02), statistic


@pytest.mark.parametrize("name", stored_models())
def test_what_was_fitted_is_near(name: str) -> None:
    for residual in stored_models()[name].residuals:
        if residual.fitted:
            assert residual.synthetic == pytest.approx(residual.real, rel=0.2, abs=0.01), residual


def test_a_fit_is_its_dict() -> None:
    fit = stored_models()["mini-moe"]
    assert RoutingModel.from_dict(fit.to_dict()) == fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_share": 1.5}, "model_share: expected a number from 0 to 1"),
        ({"preference_share": [0.5]}, "expected 8 preference_shares"),
        ({"forecast_accuracy": {"gate": 0.5}}, "forecasts such as gate@1"),
        ({"skew": 1.0}, "there is no key 'skew'"),
    ],
)
def test_a_fit_with_one_thing_wrong_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        RoutingModel.from_dict({**stored_models()["mini-moe"].to_dict(), **change})
