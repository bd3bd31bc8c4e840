"""A trace made up like a measured one: its caches hit as often, and it reuses experts as long after.

The parameters were fitted to overlaps between tokens, never to a hit rate. One text of 128 tokens is a small sample, of
the made-up model as of the real one: means over seeds are held to 2 points, single texts to 5.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.depth import deep
from tests.traces.measured_logs import LOGS, needs_logs
from traces.importers.route_trace_v1 import import_route_trace
from traces.statistics import lag_profile, prefill_decode_similarity
from traces.synthesis.estimate import Layout
from traces.synthesis.measured import choices_of
from traces.synthesis.routing_model import stored_models
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace
from trilane.study.cache_curve import cache_curve

SEEDS, OTHER = range(6), 1000  # other texts, and other models, than those that were made up for the fit
SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)  # of all experts
LONG_LAGS = (24, 32, 64)

pytestmark = needs_logs


@pytest.fixture(scope="module", params=["qwen", "gemma"])
def traces(request: pytest.FixtureRequest) -> tuple[Trace, list[Trace]]:
    """A log, and traces made up like it: another text of another model for each seed."""
    real = import_route_trace(LOGS / f"{request.param}.route.csv")
    fit, layout = stored_models()[request.param], Layout.of(choices_of(real))
    assert layout.texts == 1
    made = [synthetic_trace(real.shape, Synthesis(fit, *layout, seed, OTHER + seed)) for seed in SEEDS]
    return real, made


def points_off(real: NDArray[np.float64], made: list[NDArray[np.float64]]) -> tuple[float, float]:
    """Percentage points: the largest difference of the mean over seeds, and that of a single seed."""
    off = 100 * (np.array(made) - real)
    return float(np.abs(off.mean(axis=0)).max()), float(np.abs(off).max())


@deep
@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_hit_rates_over_capacity_are_within_two_points(traces: tuple[Trace, list[Trace]], policy: str) -> None:
    def hit_rates(trace: Trace) -> NDArray[np.float64]:
        capacities = [round(share * trace.shape.routed_bytes) for share in SHARES]
        return np.array([[p.hit_rate, p.hit_rate_decode] for p in cache_curve(trace, [policy], capacities)])

    real, made = traces
    mean, worst = points_off(hit_rates(real), [hit_rates(trace) for trace in made])
    print(f"{real.shape.name}, {policy}: mean over seeds off by at most {mean:.1f} points, one seed by {worst:.1f}")
    assert mean <= 2
    assert worst <= 5


def test_the_lag_profile_is_within_two_points(traces: tuple[Trace, list[Trace]]) -> None:
    real, made = traces
    profiles = [lag_profile(trace)["probability"].to_numpy() for trace in (real, *made)]
    mean, worst = points_off(profiles[0], profiles[1:])
    print(f"{real.shape.name}: lags 1 to 16, mean over seeds off by at most {mean:.1f} points, one seed by {worst:.1f}")
    assert mean <= 2
    assert worst <= 5


def test_reuse_long_after_is_within_the_noise_of_one_text(traces: tuple[Trace, list[Trace]]) -> None:
    """Beyond 16 tokens the fit knows the mean alone; the real text's own lags go up and down by 2 points around it."""
    real, made = traces
    profiles = [
        np.array([lag_profile(trace, range(lag, lag + 1))["probability"][0] for lag in LONG_LAGS])
        for trace in (real, *made)
    ]
    assert points_off(profiles[0], profiles[1:])[0] <= 6


def test_a_prompt_asks_for_as_many_experts_and_is_as_like_its_answer(traces: tuple[Trace, list[Trace]]) -> None:
    real, made = traces

    def distinct(trace: Trace) -> float:
        """Of the first layers, which prompts of all logs went through."""
        prompt = trace.topk_ids[trace.phase == 0, :-1]
        return float(np.mean([len(np.unique(prompt[:, layer])) for layer in range(prompt.shape[1])]))

    assert np.mean([distinct(trace) for trace in made]) == pytest.approx(distinct(real), rel=0.06)
    similarity = np.mean([prefill_decode_similarity(trace) for trace in made])
    assert similarity == pytest.approx(prefill_decode_similarity(real), abs=0.05)


def test_the_check_can_fail(traces: tuple[Trace, list[Trace]]) -> None:
    """Tokens in another order have the same popularity, and neither the lag profile nor the hit rates."""
    real, _ = traces
    decode = np.flatnonzero(real.phase == 1)
    order = np.arange(len(real))
    order[decode] = np.random.default_rng(0).permutation(decode)
    tensors = {**real.tensors(), "topk_ids": real.topk_ids[order], "topk_weights": real.topk_weights[order]}
    shuffled = Trace.from_tensors(real.shape, tensors, {})
    profiles = [lag_profile(trace)["probability"].to_numpy() for trace in (real, shuffled)]
    assert points_off(profiles[0], profiles[1:])[0] > 5
