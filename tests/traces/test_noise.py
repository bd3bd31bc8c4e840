"""Noisy forecasts: right as often as stated, the same for whoever asks, and called by their name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Forecast
from policies.protocols import Needs
from sim.runs.demand import MissingFromTraceError, StepDemand, demand_of
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate
from tests.kit.toy_traces import toy_trace
from traces.batches import compose
from traces.file import write_trace
from traces.forecasts import NoisyForecasts, noisy_ids
from traces.layout import ForecastKey
from traces.trace import Trace
from trilane.study.compare import compare
from trilane.testing.strategies import traces


def random_trace(layers: int = 6, experts: int = 16, top_k: int = 3, tokens: int = 300) -> Trace:
    """One sequence, routed evenly, without forecasts."""
    rng = np.random.default_rng(3)
    routing = rng.permuted(np.broadcast_to(np.arange(experts), (tokens, layers, experts)), axis=-1)[..., :top_k]
    return toy_trace(routing.tolist(), prompt_tokens=1, experts=experts)


def every_row(trace: Trace) -> np.ndarray:
    """Ask for all of it."""
    return np.arange(len(trace))


# --- what they hold --------------------------------------------------------------------------------------------------


@given(traces(forecasts=False), st.integers(1, 3), st.floats(0, 1), st.integers(-9, 2**40))
def test_they_are_forecasts_such_as_a_trace_may_hold(trace: Trace, lookahead: int, recall: float, seed: int) -> None:
    shape, ids = trace.shape, noisy_ids(trace, every_row(trace), lookahead, recall, seed)
    assert ids.shape == (len(trace), shape.moe_layers, min(2 * shape.top_k, shape.experts))
    tensors = {**trace.tensors(), f"forecast/noisy@{lookahead}/ids": ids}
    Trace.from_tensors(shape, tensors, {})  # distinct experts that there are; -1 exactly past the last layer


@given(traces(forecasts=False), st.integers(1, 3), st.integers(0, 9))
def test_a_recall_of_1_is_the_oracle_and_0_misses_whom_it_can(trace: Trace, lookahead: int, seed: int) -> None:
    shape, rows = trace.shape, every_row(trace)
    perfect, blind = (noisy_ids(trace, rows, lookahead, recall, seed) for recall in (1, 0))
    k, others = shape.top_k, shape.experts - shape.top_k
    for row in range(len(trace)):
        for layer in range(shape.moe_layers - lookahead):
            true = trace.topk_ids[row, layer + lookahead].tolist()
            assert perfect[row, layer, :k].tolist() == true
            found = blind[row, layer].tolist()
            assert len(set(found[:k]) & set(true)) == max(k - others, 0)
            assert len(set(found) & set(true)) == max(len(found) - others, 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recall", [0.25, 0.6, 0.9])
def test_the_recall_is_the_stated_one(recall: float, seed: int) -> None:
    """Within 4 standard errors, over all pairs and of each layer and rank by itself."""
    trace = random_trace()
    k = trace.shape.top_k
    for lookahead in (1, 2):
        first = noisy_ids(trace, every_row(trace), lookahead, recall, seed)[:, :-lookahead, :k]
        found = (trace.topk_ids[:, lookahead:, :, None] == first[:, :, None, :]).any(axis=-1)
        for part in (found, *found.swapaxes(0, 1), *np.moveaxis(found, -1, 0)):
            assert abs(part.mean() - recall) < 4 * np.sqrt(recall * (1 - recall) / part.size)


def test_the_others_are_drawn_evenly() -> None:
    """Whatever is wrong, at each of the 6 places, is every expert about as often: the true ones are even, too."""
    trace = random_trace()
    ids = noisy_ids(trace, every_row(trace), 1, 0.5, 0)[:, :-1]
    wrong = (ids[..., None] != trace.topk_ids[:, 1:, None, :]).all(axis=-1)
    for place in range(6):
        counts = np.bincount(ids[..., place][wrong[..., place]], minlength=16)
        assert (abs(counts - counts.mean()) < 4 * np.sqrt(counts.mean())).all()


# --- the same for whoever asks ---------------------------------------------------------------------------------------


@given(traces(forecasts=False), st.integers(1, 2), st.data())
def test_a_row_does_not_depend_on_the_others(trace: Trace, lookahead: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(trace) - 1), max_size=5))
    every = noisy_ids(trace, every_row(trace), lookahead, 0.5, 7)
    assert np.array_equal(noisy_ids(trace, np.asarray(rows, np.intp), lookahead, 0.5, 7), every[rows])


def test_seeds_and_lookaheads_make_other_errors_and_more_recall_keeps_the_hits() -> None:
    trace = random_trace(tokens=20)
    rows = every_row(trace)
    base = noisy_ids(trace, rows, 1, 0.5, 0)
    assert not np.array_equal(base, noisy_ids(trace, rows, 1, 0.5, 1))
    later = [noisy_ids(trace, rows, lookahead, 0.5, 0)[:, :-lookahead] for lookahead in (1, 2)]
    true = [trace.topk_ids[:, lookahead:] for lookahead in (1, 2)]
    hits = [(ids[..., :3] == right)[:, :4] for ids, right in zip(later, true, strict=True)]
    assert not np.array_equal(*hits)
    better = noisy_ids(trace, rows, 1, 0.8, 0)[:, :-1, :3]
    assert ((better == true[0]) >= (base[:, :-1, :3] == true[0])).all()


def test_without_a_seed_it_is_0() -> None:
    assert NoisyForecasts((0.5,)) == NoisyForecasts((0.5,), seed=0)


def test_another_process_finds_the_same() -> None:
    """Whose hash seed is another one: that of this process is random."""
    code = "from tests.traces.test_noise import drawn; print(drawn())"
    root = Path(__file__).parents[2]
    there = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
    ).stdout
    assert there.strip() == drawn()


def drawn() -> str:
    trace = random_trace(tokens=9)
    return sha256(noisy_ids(trace, every_row(trace), 2, 0.7, 5).tobytes()).hexdigest()


# --- in a scenario ---------------------------------------------------------------------------------------------------


def test_every_look_ahead_has_its_own_recall() -> None:
    trace = random_trace(layers=4, tokens=4)
    rows, noisy = every_row(trace), NoisyForecasts((0.25, 0.75), seed=3)
    for lookahead, recall in ((1, 0.25), (2, 0.75)):
        made = noisy.ids(trace, rows, ForecastKey("gate", lookahead))
        np.testing.assert_array_equal(made, noisy_ids(trace, rows, lookahead, recall, 3))


def demand_with(trace: Trace, forecasts: tuple[tuple[str, int], ...], recalls: tuple[float, ...]) -> list[StepDemand]:
    needs = Needs(forecasts=forecasts, tokens=True)
    return demand_of(trace, compose(trace, batch=1), needs, NoisyForecasts(recalls))


def test_they_stand_in_for_kinds_that_the_trace_lacks_and_for_no_others() -> None:
    bare = random_trace(layers=3, tokens=4)
    held = np.flip(noisy_ids(bare, every_row(bare), 1, 0.0, 9), axis=-1)
    trace = Trace.from_tensors(bare.shape, {**bare.tensors(), "forecast/gate@1/ids": held.copy()}, {})
    demand = demand_with(trace, (("gate", 1), ("residual", 1), ("estimator", 2)), (1.0, 1.0))
    for row, step in enumerate(demand):
        assert [[(f.kind, f.layer) for f in layer] for layer in step.forecasts] == [
            [("gate", 1), ("residual", 1), ("estimator", 2)], [("gate", 2), ("residual", 2)], [],
        ]
        gate, residual, estimator = step.forecasts[0]
        assert list(gate.token_ids[0]) == held[row, 0].tolist()
        assert [f.token_ids[0][:3] for f in (residual, estimator)] == [trace.topk_ids[row, n].tolist() for n in (1, 2)]
        assert residual.active == tuple(trace.topk_ids[row, 1].tolist())
        assert {len(f.token_ids[0]) for f in step.forecasts[0]} == {6}
        assert {f.token_scores for f in step.forecasts[0]} == {()}


def test_without_a_recall_for_the_lookahead_the_error_names_the_way_out() -> None:
    trace = random_trace(layers=3, tokens=4)
    with pytest.raises(MissingFromTraceError, match=r"gate@2, the trace has none: .*_recall='\[0\.8, 0\.8\]'"):
        demand_with(trace, (("gate", 1), ("gate", 2)), (1.0,))


def test_a_forecast_of_which_scores_are_read_cannot_be_noisy() -> None:
    trace = random_trace(layers=3, tokens=4)
    with pytest.raises(MissingFromTraceError, match=r"the forecast partial@1, .* \(noisy forecasts have no scores\)"):
        demand_with(trace, (("partial", 1),), (1.0,))


def test_a_held_forecast_of_which_scores_are_read_must_have_them() -> None:
    bare = random_trace(layers=3, tokens=4)
    ids = noisy_ids(bare, every_row(bare), 1, 0.5, 9)
    trace = Trace.from_tensors(bare.shape, {**bare.tensors(), "forecast/partial@1/ids": ids}, {})
    with pytest.raises(MissingFromTraceError, match=r"needs the scores of the forecast partial@1, the trace has its"):
        demand_with(trace, (("partial", 1),), (1.0,))
    assert demand_with(trace, (("gate", 1),), (1.0,))
    needs = Needs(forecasts=(("partial", 1),))  # whoever does not look at tokens does not read scores
    assert demand_of(trace, compose(trace, batch=1), needs)


def test_all_recalls_1_are_as_good_as_the_oracle() -> None:
    trace = random_trace(layers=3, tokens=4)
    for step in demand_with(trace, (("gate", 1), ("oracle", 1)), (1.0,)):
        for gate, oracle in (layer for layer in step.forecasts if layer):
            assert sorted(zip(gate.active, gate.tokens, strict=True)) == sorted(
                zip(oracle.active, oracle.tokens, strict=True)
            )
            assert isinstance(gate, Forecast)


@pytest.fixture
def bare(tmp_path: Path) -> Scenario:
    """A recorded trace without forecasts."""
    path = tmp_path / "bare.safetensors"
    write_trace(random_trace(), path)
    return Scenario(trace=str(path), model=None, prompt_tokens=1, generated_tokens=5, cached_share=0.3, policy="dali")


def test_a_run_with_noisy_forecasts_is_called_so(bare: Scenario) -> None:
    with pytest.raises(MissingFromTraceError, match="noisy_forecast_recall"):
        simulate(bare)
    noisy = bare.with_(noisy_forecast_recall=(0.8, 0.75))
    assert simulate(noisy).labels == ("noisy forecasts (recall 0.8, 0.75)",)
    assert simulate(noisy).scenario["noisy_forecast_recall"] == [0.8, 0.75]
    found = compare(noisy, ["dali", "on-demand"], draws=2)
    assert {row["policy"]: row["labels"] for row in found.rows()} == {
        "dali": ["noisy forecasts (recall 0.8, 0.75)"], "on-demand": []
    }


def test_a_trace_that_has_forecasts_is_not_made_noisy() -> None:
    recorded = Scenario(trace="mini-moe", model=None, generated_tokens=2, cached_share=0.5, policy="dali")
    plain, noisy = (simulate(s) for s in (recorded, replace(recorded, noisy_forecast_recall=(0.1,))))
    assert plain.labels == noisy.labels == ()
    assert plain.spans.equals(noisy.spans)


@pytest.mark.parametrize("recalls", [(), (1.5,), (0.5, -0.1), (float("nan"),)])
def test_a_recall_is_a_share(recalls: tuple[float, ...]) -> None:
    with pytest.raises(ScenarioError, match="noisy_forecast_recall"):
        Scenario(noisy_forecast_recall=recalls)
