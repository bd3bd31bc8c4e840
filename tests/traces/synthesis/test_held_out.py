"""Generators against what they were not fitted to: other texts of the same model, and published figures.

Hit rates are of LRU by layer, decode tokens, each text from an empty cache; none was fitted.
"""

from __future__ import annotations

import numpy as np
import pytest

from tools.refit_repetitions import FIRST, IN_COMMON, LRU, REPEATED, mean_over_layers, repetitions
from tools.refit_routing import BUNDLED
from tools.refit_routing_figures import FITTED, MODEL, made_statistics, published
from traces.layout import DECODE
from traces.library import load_trace
from traces.statistics import lru_hit_rates
from traces.synthesis.latent import Texts, best, layer_logits
from traces.synthesis.routing_model import stored_models

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
