"""A trace cut after some layers: what is left is as it was, and nothing points past the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from traces.layout import TraceError
from traces.library import calibration_of, load_trace
from traces.models.catalogue import load_model
from traces.trace import first_layers, validate


def test_the_first_layers_stay_and_forecasts_for_later_ones_go() -> None:
    whole, cut = load_trace("mini-moe"), load_trace("mini-moe:3")
    assert (cut.shape.moe_layers, cut.shape.name, len(cut)) == (3, "mini-moe:3", len(whole))
    assert np.array_equal(cut.topk_ids, whole.topk_ids[:, :3])
    assert whole.scores is not None
    assert cut.scores is not None
    assert np.array_equal(cut.scores, whole.scores[:, :3])
    for key, forecast in cut.forecasts.items():
        there = 3 - key.lookahead
        assert np.array_equal(forecast.ids[:, :there], whole.forecasts[key].ids[:, :there])
        assert (forecast.ids[:, there:] == -1).all()
        assert forecast.scores is None or not forecast.scores[:, there:].any()
    assert any(forecast.scores is not None for forecast in cut.forecasts.values())


def test_layers_that_attend_otherwise_are_cut_too() -> None:
    cut = load_trace("gpt-oss-20b:3").shape
    assert cut == replace(load_model("gpt-oss-20b:3"), expert_biases=None, sources=cut.sources)  # not in the file


def test_a_cut_trace_obeys_the_rules_of_the_format() -> None:
    cut = load_trace("mini-moe:3")
    validate("cut", cut.shape, cut.tensors())


@pytest.mark.parametrize("layers", [0, 9])
def test_layers_that_are_not_there_are_refused(layers: int) -> None:
    with pytest.raises(TraceError, match=f"mini-moe:{layers}: expected 1 to 8 layers"):
        first_layers(load_trace("mini-moe"), layers)


def test_its_calibration_is_cut_too_and_it_is_played_with_a_model_as_short() -> None:
    assert calibration_of("mini-deepseek:4") == "mini-deepseek-calibration:4"
    asked = Scenario(trace="mini-deepseek:4", model="deepseek-v2-lite:4", policy="daop", cached_share=0.3,
                     prompt_tokens=4, generated_tokens=3)
    spans = simulate(asked).spans
    assert spans.layer.max() == 3


def test_a_trace_without_its_forecasts_is_otherwise_the_same() -> None:
    whole, bare = load_trace("mini-deepseek:3"), load_trace("mini-deepseek:3:no-forecasts")
    assert whole.forecasts
    assert bare.forecasts == {}
    assert (bare.topk_ids == whole.topk_ids).all()
    assert (bare.shape, bare.checksum) == (whole.shape, f"{whole.checksum}:no-forecasts")
    assert calibration_of("mini-deepseek:3:no-forecasts") == calibration_of("mini-deepseek:3")
