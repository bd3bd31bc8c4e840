"""Stored fits are those of the traces that they name, and hold for other texts of the same model and published figures.

Hit rates are of LRU by layer, decode tokens, each text from an empty cache; none was fitted.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.traces.measured_logs import LOGS, needs_logs
from tools.refit_routing import (
    BUNDLED,
    FIRST,
    FITTED,
    IN_COMMON,
    LRU,
    MODEL,
    REPEATED,
    fit_repetitions,
    made_statistics,
    mean_over_layers,
    published,
    refit_bundled,
    repetitions,
)
from tools.refit_routing import LOGS as LOG_NAMES
from traces.importers.route_trace_v1 import import_route_trace
from traces.layout import DECODE, TraceError
from traces.library import load_trace
from traces.models.catalogue import model_names
from traces.statistics import lru_hit_rates
from traces.synthesis.estimate import Layout, simulated
from traces.synthesis.latent import Texts, best, layer_logits
from traces.synthesis.measured import choices_of, measure_trace
from traces.synthesis.published import published_routing
from traces.synthesis.routing_model import RoutingModel, stored_models
from traces.trace import Trace


def recorded(name: str) -> Trace:
    return load_trace(BUNDLED[name]) if name in BUNDLED else import_route_trace(LOGS / f"{name}.route.csv")


NAMES = [pytest.param(name, marks=needs_logs) for name in LOG_NAMES] + list(BUNDLED)


def test_there_is_one_of_each_trace_at_hand_two_of_published_figures_and_those_of_published_routing() -> None:
    fitted = dict.fromkeys(one.model for one in published_routing() if one.fitted and not one.kind)
    assert list(stored_models()) == [*LOG_NAMES, MODEL, REPEATED, *BUNDLED, *fitted]
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


@pytest.mark.parametrize(("change", "message"), [
    ({"model_share": 1.5}, "model_share: expected a number from 0 to 1"),
    ({"preference_share": [0.5]}, "expected 8 preference_shares"),
    ({"forecast_accuracy": {"gate": 0.5}}, "forecasts such as gate@1"),
    ({"skew": 1.0}, "there is no key 'skew'"),
])
def test_a_fit_with_one_thing_wrong_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        RoutingModel.from_dict({**stored_models()["mini-moe"].to_dict(), **change})


SEED = 1000  # other texts, and another model, than those that were made for the fit
OTHERS = {
    "gpt-oss-20b": "gpt-oss-20b",
    "mini-deepseek": "mini-deepseek-calibration",
    "mini-moe": "mini-moe-calibration",
}
SHARES = (0.125, 0.25, 0.5, 0.75)


def answers(name: str) -> np.ndarray:
    """[texts, tokens, layers, k]."""
    trace = load_trace(name)
    mine = [(trace.sequence == sequence) & (trace.phase == DECODE) for sequence in np.unique(trace.sequence)]
    return np.stack([trace.topk_ids[rows] for rows in mine])


def made(name: str, texts: int, tokens: int, seed: int = SEED) -> np.ndarray:
    """The same, made up; another ``seed`` gives other texts of the same model."""
    fit = stored_models()[name]
    logits = layer_logits(fit, Texts(tuple((seed, text) for text in range(texts)), 1, tokens), SEED)
    ids = np.stack([best(layer, fit.top_k) for layer in logits], axis=1)
    return ids.reshape(texts, 1 + tokens, *ids.shape[1:])[:, 1:]


def hit_rates(ids: np.ndarray, experts: int) -> np.ndarray:
    return lru_hit_rates(ids, experts)[[round(share * experts) - 1 for share in SHARES]]


@pytest.mark.parametrize("model", OTHERS)
def test_lru_hits_within_three_points_over_capacity_on_texts_that_the_fit_did_not_see(model: str) -> None:
    assert OTHERS[model] != BUNDLED[model]
    real, experts = answers(OTHERS[model]), stored_models()[model].experts
    off = 100 * (hit_rates(made(model, len(real), real.shape[1]), experts) - hit_rates(real, experts))
    print(f"{model}: {off.round(1).tolist()} points")
    assert np.abs(off).max() <= 3


def test_the_check_can_fail() -> None:
    """Tokens in another order have the same popularity, and other hit rates."""
    real = answers("gpt-oss-20b")[:20]
    shuffled = np.random.default_rng(0).permuted(real, axis=1)
    assert 100 * np.abs(hit_rates(shuffled, 32) - hit_rates(real, 32)).max() > 3


# --- DeepSeek-V2-Lite, of which only figures are published ------------------------------------------------------------


@pytest.fixture(scope="module")
def lite() -> dict[str, float]:
    return made_statistics(stored_models()[MODEL], SEED)


@pytest.mark.parametrize("quantity", FITTED)
def test_what_was_fitted_is_as_published(lite: dict[str, float], quantity: str) -> None:
    assert lite[quantity] == pytest.approx(published()[quantity], rel=0.05)


def test_lru_hits_within_three_points_of_the_published_rates(lite: dict[str, float]) -> None:
    for rate in (0.480, 0.477):  # measured; HybriMoE, Fig. 9
        assert lite["layer_lru_hit_rate"] == pytest.approx(rate, abs=0.03)


def test_experts_that_all_texts_like_are_as_often_the_busiest_of_a_batch_as_published() -> None:
    """DALI, Table 2, batch 64: EdgeMoE's forecast, from statistics, has 11.8 % of the busiest experts and 15.4 % of the
    two busiest. (Of a batch of 8 it has 35 % and must know more than popularity, which then has fewer.)
    """
    past, batch = (made(MODEL, 64, 48, seed) for seed in (SEED + 1, SEED))
    popular = {count: busiest(np.concatenate(past), count) for count in (1, 2)}
    found = [
        len(set(now) & set(liked)) / count
        for count in popular
        for token in range(48)
        for now, liked in zip(busiest(batch[:, token], count), popular[count], strict=True)
    ]
    assert np.mean(found) == pytest.approx((0.118 + 0.154) / 2, abs=0.03)


# --- Mixtral-8x7B, of which repetitions are published -----------------------------------------------------------------


def test_neighbours_have_experts_in_common_as_often_as_published_and_hit_rates_follow() -> None:
    """First choices and hit rates (HybriMoE, Fig. 9) were not fitted."""
    mixtral = repetitions(stored_models()[REPEATED], SEED)
    assert mixtral.in_common == pytest.approx(mean_over_layers(IN_COMMON), abs=0.01)
    assert mixtral.first == pytest.approx(mean_over_layers(FIRST), abs=0.03)
    rates = lru_hit_rates(mixtral.ids, 8)
    assert [rates[cached - 1] for cached in LRU] == pytest.approx(list(LRU.values()), abs=0.04)


def busiest(ids: np.ndarray, count: int) -> list[list[int]]:
    """Of each layer; ``ids`` [tokens, layers, k]."""
    uses = [np.bincount(ids[:, layer].ravel(), minlength=64) for layer in range(ids.shape[1])]
    return [np.argsort(-of, kind="stable")[:count].tolist() for of in uses]
