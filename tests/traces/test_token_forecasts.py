"""Forecasts of the next token: in the file, in statistics, made up with a stated recall, and as policies get them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Forecast
from policies.protocols import Needs
from sim.runs.demand import MissingFromTraceError, StepDemand, demand_of
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.toy_traces import toy_trace
from traces.batches import compose
from traces.file import read_trace, write_trace
from traces.forecasts import NoisyForecasts
from traces.layout import ForecastKey, TraceError
from traces.library import load_trace
from traces.models.shape import ModelShape
from traces.statistics import forecast_statistics
from traces.synthesis.named import nearest_routing
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace, first_layers, rows_apart
from trilane.testing.strategies import traces

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
