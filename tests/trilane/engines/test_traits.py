"""Engines are what their files say: one that is only ``like`` another answers as it does, whatever it is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.costs.engine import EngineError, FittedEngine, engine_names, load_engine, load_fitted
from sim.machine.hardware import load_hardware
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.results import row
from trilane.common.schema import to_dict
from trilane.engines.accuracy.errors import REGIMES, read_predictions, regime_error, regime_of_row
from trilane.engines.accuracy.measured_rows import predict, read_rows
from trilane.engines.question import FitError, Question
from trilane.engines.speed import engine_answer
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune

OWN = "of_my_own"
FITTED = [name for name in engine_names() if isinstance(load_engine(name), FittedEngine)]
MACHINES: dict[str, dict[str, Any]] = {  # with less memory than the model takes, where the GPU has its own
    "nvidia": {"gpu": "gtx-1650-super", "ram": "ddr4-3200"}, "amd": {"gpu": "rx-6700-xt", "ram": "ddr4-3200"},
    "apple": {"gpu": "apple-m2-pro"},
}
of_all_engines = pytest.mark.parametrize("name", engine_names())
of_fitted_engines = pytest.mark.parametrize("name", FITTED)


@pytest.fixture
def like(tmp_path: Path) -> Callable[[str], str]:
    """Write a file that is only ``like`` an engine, and return its path."""

    def write(name: str) -> str:
        path = tmp_path / f"{OWN}.yaml"
        path.write_text(f"like: {name}\n")
        return str(path)

    return write


def question(engine: str, name: str) -> Question:
    machine = MACHINES[(load_fitted(name).vendors or ("nvidia",))[0]]
    return Question("deepseek-v2-lite", **machine, prompt_tokens=256, generated=32, engine=engine)


def text_of(answer: Callable[[], Any], engine: str, name: str) -> str:
    """An answer or a refusal as text, in which the engine has the name of the one that it is like."""
    try:
        text = json.dumps(to_dict(answer()))
    except FitError as error:
        text = str(error)
    return text.replace(engine, name).replace(OWN, name)


@of_fitted_engines
def test_fit_answers_alike(name: str, like: Callable[[str], str]) -> None:
    def answer(engine: str) -> Callable[[], Any]:
        asked = question(engine, name)
        return lambda: engine_answer(asked, asked.model_shape, load_hardware(asked.hardware))

    own = like(name)
    assert text_of(answer(own), own, name) == text_of(answer(name), name, name)


@of_fitted_engines
def test_tune_answers_alike(name: str, like: Callable[[str], str]) -> None:
    own = like(name)
    assert text_of(lambda: tune(TuneQuestion(question(own, name))), own, name) == tuned(name)


@cache
def tuned(name: str) -> str:
    return text_of(lambda: tune(TuneQuestion(question(name, name))), name, name)


@of_fitted_engines
def test_accuracy_answers_alike(name: str, like: Callable[[str], str]) -> None:
    rows = [row(engine=engine, cpu_layers=14, prompt_tokens=512, prompt_tokens_per_s=500.0)
            for engine in (like(name), name)]
    [own, other] = [(predict(one), regime_of_row(one)) for one in rows]
    assert own == other
    engines = [load_fitted(one.engine) for one in rows]
    for regime in REGIMES:
        assert len({regime_error(regime, engine) for engine in engines}) == 1


@of_all_engines
def test_policies_take_the_same_time(name: str, like: Callable[[str], str]) -> None:
    scenario = Scenario(policy="dali", engine=name, hardware="rtx-4080+ddr5-5600", generated_tokens=4)
    own, other = simulate(scenario.with_(engine=like(name))), simulate(scenario)
    assert own.spans.equals(other.spans)


def test_a_profile_takes_the_plain_engine_under_any_name(like: Callable[[str], str]) -> None:
    scenario = Scenario(policy="dali", engine=like("pytorch"), hardware="rtx3090-ddr4", generated_tokens=4)
    assert simulate(scenario).spans.equals(simulate(scenario.with_(engine="pytorch")).spans)


@of_fitted_engines
def test_the_names_in_a_file_are_those_of_engines(name: str) -> None:
    engine = load_fitted(name)
    for other in (engine.superseded_by, engine.cache_costs):
        assert other is None or other in FITTED
    newer = engine.superseded_by
    assert newer is None or load_fitted(newer).superseded_by is None


def test_numbers_of_an_engine_stay_its_own_with_a_cache_of_experts() -> None:
    """The wait for the routing alone is that of the engine in ``cache_costs``."""
    engine = load_fitted("llama.cpp").with_numbers({"gpu.layer_ns.grouped": 38_000})
    cached, costs = engine.with_expert_cache(), load_fitted("llama.cpp-cache")
    assert cached == replace(engine, decides=costs.decides, spin_ns=costs.spin_ns)
    assert cached.decides


def test_a_cache_of_experts_needs_its_costs() -> None:
    with pytest.raises(EngineError, match="expected cache_costs, since it has an expert_cache"):
        replace(load_fitted("ik_llama.cpp"), options=("expert_cache",), cache_costs=None)


def test_every_row_and_every_prediction_is_of_an_engine_with_a_program() -> None:
    assert {load_fitted(one.engine).program for one in read_rows() if one.id in read_predictions()} == {
        "llama.cpp", "ik_llama.cpp", "ktransformers"
    }
