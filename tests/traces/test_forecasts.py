"""Noisy forecasts: right as often as stated, the same for whoever asks, and called by their name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Forecast
from policies.protocols import Needs
from sim.runs.demand import MissingFromTraceError, StepDemand, demand_of
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate
from tests.kit.toys import toy_trace
from traces.batches import compose
from traces.file import read_trace, write_trace
from traces.forecasts import NoisyForecasts, noisy_ids
from traces.layout import ForecastKey, TraceError
from traces.library import load_trace
from traces.models.shape import ModelShape
from traces.statistics import forecast_statistics
from traces.synthesis.named import nearest_routing
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace, first_layers, rows_apart
from trilane.study.compare import compare
from trilane.testing.worlds import traces


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
    code = "from tests.traces.test_forecasts import drawn; print(drawn())"
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
    assert simulate(noisy).scenario.noisy_forecast_recall == (0.8, 0.75)
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


NEXT = ForecastKey("token", 1)
NEEDS = Needs(forecasts=(("token", 1),))
SHAPE = ModelShape("made-up", moe_layers=4, dense_layers=0, experts=32, top_k=4, hidden=8, expert_width=4)


def told(trace: Trace, **changes: Any) -> Trace:
    """The trace with forecasts that are right; those of the last tokens of sequences repeat their own routing."""
    later = rows_apart(trace, 1)
    about = np.where(later < 0, np.arange(len(trace)), later)
    ids = np.stack([_ranked(row, trace.shape.experts) for row in trace.topk_ids[about]])
    return Trace.from_tensors(trace.shape, {**trace.tensors(), NEXT.ids_name: ids, **changes}, {})


def _ranked(chosen: np.ndarray, experts: int) -> np.ndarray:
    """All experts of each layer, the chosen ones first."""
    return np.stack([[*row, *sorted(set(range(experts)) - set(row))] for row in chosen.tolist()]).astype(np.int16)


PLAIN = toy_trace([[[0, 1], [2, 3]], [[4, 5], [0, 1]], [[1, 2], [3, 4]], [[5, 0], [1, 2]]], prompt_tokens=2, experts=6)


# --- in a trace -------------------------------------------------------------------------------------------------------


@given(traces())
def test_rows_are_apart_by_so_many_tokens_of_a_sequence(trace: Trace) -> None:
    for tokens in (1, 2, -1):
        for row, other in enumerate(rows_apart(trace, tokens).tolist()):
            there = (trace.sequence == trace.sequence[row]) & (trace.position == trace.position[row] + tokens)
            assert np.flatnonzero(there).tolist() == ([] if other < 0 else [other])


def test_a_file_holds_them_for_every_layer(tmp_path: Path) -> None:
    trace = told(PLAIN)
    write_trace(trace, tmp_path / "t.safetensors")
    assert read_trace(tmp_path / "t.safetensors").forecasts[NEXT].ids.tolist() == trace.forecasts[NEXT].ids.tolist()
    assert first_layers(trace, 1).forecasts[NEXT].ids.min() == 0  # no layer is past the last one
    lacking = np.array(trace.forecasts[NEXT].ids)
    lacking[:, 1] = -1
    with pytest.raises(TraceError, match=r"forecast/token@1/ids row 0 layer 1: expected expert ids in 0\.\.5"):
        told(PLAIN, **{NEXT.ids_name: lacking})


def test_accuracy_is_that_for_the_next_decode_token() -> None:
    ids = np.array(told(PLAIN).forecasts[NEXT].ids)
    assert forecast_statistics(told(PLAIN)).accuracy_at_k.tolist() == [1.0, 1.0]
    ids[2, 0] = [5, 1, 2, 3, 4, 0]  # at the first decode token, of the second, which uses 5 and 0 in this layer
    ids[:2], ids[3] = ids[:2, :, ::-1], ids[3, :, ::-1]  # of no decode token by one, or of no token
    assert forecast_statistics(told(PLAIN, **{NEXT.ids_name: ids})).to_dict("records") == [
        {"forecast": "token@1", "layer": 0, "accuracy_at_k": 0.5, "recall_at_m": 1.0},
        {"forecast": "token@1", "layer": 1, "accuracy_at_k": 1.0, "recall_at_m": 1.0},
    ]


@pytest.mark.parametrize("accuracy", [0.3, 0.7, 1.0])
def test_synthetic_ones_are_as_accurate_as_asked(accuracy: float) -> None:
    routing = replace(nearest_routing(SHAPE), forecast_accuracy={"token@1": accuracy})
    trace = synthetic_trace(SHAPE, Synthesis(routing, sequences=4, prompt_tokens=4, generated_tokens=64))
    assert forecast_statistics(trace).accuracy_at_k.mean() == pytest.approx(accuracy, abs=0.04)


# --- as policies get them ---------------------------------------------------------------------------------------------


def given_with(demand: StepDemand) -> list[list[tuple[int, tuple[int, ...]]]]:
    return [[(forecast.layer, forecast.active) for forecast in some] for some in demand.forecasts]


def test_they_are_known_from_the_first_layer_of_a_decode_step_until_their_own() -> None:
    prefill, *decode = demand_of(told(PLAIN), compose(PLAIN, batch=1), NEEDS)
    assert given_with(prefill) == [[], []]
    assert [given_with(step) for step in decode] == [[[(1, (3, 4))], []], [[(1, (1, 2))], []]]


def test_a_sequence_without_a_prompt_has_none_for_its_first_token() -> None:
    bare = toy_trace([[[0], [1]], [[1], [0]]], experts=2)
    steps = compose(told(bare), batch=1)
    assert [given_with(step) for step in demand_of(told(bare), steps, NEEDS)] == [[[], []], [[(1, (0,))], []]]


@given(traces(min_decode=1, forecasts=False), st.booleans())
def test_right_forecasts_of_a_batch_name_what_each_later_layer_uses(trace: Trace, noisy: bool) -> None:
    """And so do noisy ones of recall 1. None is given with its own layer, or after it."""
    whole, batch = trace if noisy else told(trace), len(set(trace.sequence.tolist()))
    perfect = NoisyForecasts((1.0,)) if noisy else None
    for step in demand_of(whole, compose(whole, batch=batch), NEEDS, perfect):
        for layer, forecasts in enumerate(step.forecasts):
            assert [forecast.layer for forecast in forecasts] == (
                [] if step.phase == "prefill" else [*range(layer + 1, trace.shape.moe_layers)]
            )
            for forecast in forecasts:
                assert (
                    dict(zip(forecast.active, forecast.tokens, strict=True)) == step.routings[forecast.layer].workload()
                )


def test_noisy_ones_have_the_stated_recall_and_errors_of_their_own() -> None:
    trace = load_trace("mini-moe:2")
    rows = np.arange(0, len(trace), 7)
    noisy = NoisyForecasts((0.6,))
    ids = noisy.ids(trace, rows, NEXT)[:, :, : trace.shape.top_k]
    found = (ids[..., None] == trace.topk_ids[rows][:, :, None, :]).any(axis=2)
    assert found.mean() == pytest.approx(0.6, abs=4 * np.sqrt(0.24 / found.size))
    assert not np.array_equal(ids[:, 0], noisy.ids(trace, rows, ForecastKey("gate", 1))[:, 0, : trace.shape.top_k])


def test_a_policy_plays_with_them_and_without_them_is_told_how() -> None:
    parameters = {"forecast": "token", "prefetch": "top"}
    plain = Scenario(trace="mini-moe:4", model=None, policy="mix", parameters=parameters, cached_share=0.5, batch=2,
                     prompt_tokens=4, generated_tokens=8)
    with pytest.raises(MissingFromTraceError, match=r"needs the forecast token@1, .* or state their recall"):
        simulate(plain)
    shares = (0.0, 0.5, 1.0)
    hits = [simulate(plain.with_(noisy_forecast_recall=[recall])).metrics.resident_hit_rate for recall in shares]
    assert hits == sorted(set(hits)), hits


def test_forecast_views_say_which_layer_they_are_of() -> None:
    step = demand_of(told(PLAIN), compose(PLAIN, batch=1), NEEDS)[1]
    assert step.forecasts[0] == (Forecast(1, "token", (3, 4), (1, 1)),)
