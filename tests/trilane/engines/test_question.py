"""Questions, the engine that answers, and cards, weights and settings that it refuses."""

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
from tests.kit.questions import QWEN, answered
from tests.kit.results import row
from traces.models.catalogue import model_names
from traces.models.names import parted
from trilane.common.schema import to_dict
from trilane.engines.accuracy.errors import REGIMES, error_to_expect, read_predictions, regime_of_row
from trilane.engines.accuracy.measured_rows import machine_of, predict, read_rows, shape_of
from trilane.engines.question import FitError, Question, engine_of, reads, with_weights
from trilane.engines.speed import engine_about, engine_answer
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune
from trilane.fit.fit import fit

PARTS: dict[str, Any] = {"gpu": "rtx-4080", "ram": "ddr5-5600"}


@pytest.mark.parametrize(("more", "hardware"), [
    ({}, "rtx-4080+ddr5-5600"),
    ({"cores": 16}, "rtx-4080+ddr5-5600+16-cores"),
    (
        {"cpu": "ryzen-9-7950x", "cores": 8, "channels": 2, "pcie": "4x8"},
        "rtx-4080+ddr5-5600+ryzen-9-7950x+8-cores+2-channels+pcie-4x8",
    ),
    ({"cpu": "epyc-9355", "sockets": 2}, "rtx-4080+ddr5-5600+epyc-9355+2-sockets"),
])
def test_parts_make_the_name_of_a_machine(more: dict[str, Any], hardware: str) -> None:
    assert Question("qwen3-30b-a3b", **PARTS, **more).hardware == hardware


def test_one_memory_needs_no_other_and_has_the_size_that_is_asked() -> None:
    assert Question("qwen3-30b-a3b", gpu="gb10").hardware == "gb10"
    assert Question("qwen3-30b-a3b", gpu="none", ram="ddr5-5600", ram_gb=64).hardware == "none+ddr5-5600+64gb"
    with pytest.raises(FitError, match="expected gpu and ram"):
        Question("qwen3-30b-a3b", gpu="none")


def test_the_cache_of_keys_and_values_has_the_bits_of_its_format() -> None:
    bits = {kv: Question("gpt-oss-20b", **PARTS, kv=kv).model_shape.cache_bits for kv in (None, "f16", "q8_0", "q4_0")}
    assert bits == {None: 16, "f16": 16, "q8_0": 8.5, "q4_0": 4.5}


def test_a_whole_machine_is_its_own_name() -> None:
    assert Question("qwen3-30b-a3b", machine="rtx3090-ddr4").hardware == "rtx3090-ddr4"


@pytest.mark.parametrize(("model", "weights", "shape"), [
    ("qwen3-30b-a3b", None, "qwen3-30b-a3b@q4_k_m"),
    ("qwen3-30b-a3b", "bf16", "qwen3-30b-a3b@bf16"),
    ("qwen3-30b-a3b@q8_0", None, "qwen3-30b-a3b@q8_0"),
    ("phi-3.5-moe:8", "q8_0", "phi-3.5-moe@q8_0:8"),
    ("gpt-oss-20b", None, "gpt-oss-20b@mxfp4"),
])
def test_weights_are_q4_k_m_unless_said_or_published_smaller(model: str, weights: str | None, shape: str) -> None:
    assert Question(model, **PARTS, weights=weights).shape == shape


def test_other_weights_replace_those_that_a_model_has() -> None:
    assert with_weights("phi-3.5-moe@q8_0:8", "bf16") == "phi-3.5-moe@bf16:8"


@pytest.mark.parametrize(("asked", "message"), [
    ({}, "expected gpu and ram"),
    ({"gpu": "rtx-4080"}, "expected gpu and ram"),
    ({"machine": "rtx3090-ddr4", "gpu": "rtx-4080", "cores": 8}, "got machine 'rtx3090-ddr4' and gpu and cores"),
    ({**PARTS, "prompt_tokens": 0}, "prompt_tokens: expected a whole number >= 1, got 0"),
    ({**PARTS, "batch": 1.5}, "batch: expected a whole number >= 1, got 1.5"),
    ({**PARTS, "ram_gb": -64}, "ram_gb: expected a whole number >= 1 or null, got -64"),
    ({**PARTS, "policy_engine": 3}, "policy_engine: expected text"),
    ({**PARTS, "kv": "q5_0"}, "kv: expected"),
    ({**PARTS, "n_cpu_moe": -1}, "n_cpu_moe: expected a whole number >= 0 or null, got -1"),
    ({**PARTS, "threads": 0}, "threads: expected a whole number >= 1 or null, got 0"),
    ({**PARTS, "weights": "q4", "model": "qwen3-30b-a3b@q8_0"}, "model 'qwen3-30b-a3b@q8_0' with weights 'q4' names"),
])
def test_a_question_that_is_none_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        Question(**{"model": "qwen3-30b-a3b", **asked})


def test_the_usual_engine_is_that_of_the_card() -> None:
    names = {gpu: engine_of(Question("qwen3-30b-a3b", gpu=gpu, ram="ddr5-5600"), load_hardware(f"{gpu}+ddr5-5600")).name
             for gpu in ("rtx-4080", "rx-7900-xtx")}
    assert names == {"rtx-4080": "llama.cpp", "rx-7900-xtx": "llama.cpp-vulkan"}
    apple = fit(Question("deepseek-v2-lite:4", gpu="apple-m3-max", prompt_tokens=64)).engine
    assert apple is not None
    assert (apple.engine, apple.about) == ("llama.cpp-metal", "builds with Metal, on Apple's chips")


def test_the_answer_says_what_the_engine_runs_on() -> None:
    where = {gpu: answered(**{**QWEN, "gpu": gpu, "engine": engine}).about.split(", ")[-1]
             for gpu, engine in (("rtx-4080", "llama.cpp"), ("rx-7900-xtx", "llama.cpp-rocm"), ("none", "llama.cpp"),
                                 ("rtx-3060", "llama.cpp-vulkan"))}
    assert where == {
        "rtx-4080": "CUDA",
        "rx-7900-xtx": "builds with ROCm",
        "none": "the CPU alone",
        "rtx-3060": "builds with Vulkan",
    }


@pytest.mark.parametrize(("machine", "back_end"), [
    ("rtx-4080+ddr5-5600", "CUDA"), ("rx-7900-xtx+ddr5-5600", "ROCm"), ("arc-b580+ddr5-5600", "SYCL"),
    ("apple-m3-max", "Metal"),
])
def test_an_engine_of_ones_own_that_names_no_back_end_runs_on_that_of_the_card(machine: str, back_end: str) -> None:
    engine = replace(load_fitted("llama.cpp"), about="mine")
    assert engine_about(engine, load_hardware(machine)) == f"mine, {back_end}"


@pytest.mark.parametrize(("asked", "message"), [
    ({"gpu": "none", "ram": "ddr5-5600", "engine": "llama.cpp-rocm"}, "llama.cpp-rocm: expected a machine with a"),
    ({"gpu": "gb10", "n_cpu_moe": 5}, "all of gb10 is in one memory"),
    ({"gpu": "none", "ram": "ddr5-5600", "n_cpu_moe": 4}, "is in one memory"),
    ({"gpu": "none", "ram": "ddr5-5600", "engine": "ktransformers"}, "expected a machine with a GPU, got none"),
    ({"gpu": "none", "ram": "ddr5-5600", "engine": "llama.cpp-vulkan"}, "with a GPU, got none.*; choose llama.cpp"),
    ({"gpu": "rtx-4080", "ram": "ddr5-5600", "cores": 6, "threads": 13}, "expected at most 12, 2 on each of the 6"),
])
def test_a_setting_that_the_machine_has_no_use_for_is_refused(asked: dict[str, Any], message: str) -> None:
    question = Question("qwen3-30b-a3b", **asked)
    with pytest.raises(FitError, match=message):
        engine_answer(question, question.model_shape, load_hardware(question.hardware))


RX = {"gpu": "rx-7900-xtx", "ram": "ddr5-5600"}
ARC = {"gpu": "arc-b580", "ram": "ddr5-5600"}


@pytest.mark.parametrize(("asked", "message"), [
    ({"gpu": "apple-m3-max", "engine": "ktransformers"}, "on Apple's GPUs; use llama.cpp-metal$"),
    ({"gpu": "apple-m3-max", "engine": "llama.cpp-vulkan"}, "on Apple's GPUs; use llama.cpp-metal$"),
    ({"gpu": "apple-m3-max", "engine": "llama.cpp"}, "llama.cpp does not run on Apple's GPUs; use llama.cpp-metal"),
    ({**ARC, "engine": "llama.cpp"}, "llama.cpp does not run on Intel's GPUs; use llama.cpp-vulkan"),
    ({**RX, "engine": "ktransformers"}, "on AMD's GPUs; use llama.cpp-rocm or llama.cpp-vulkan"),
    ({**RX, "engine": "llama.cpp"}, "on AMD's GPUs; use llama.cpp-rocm or llama.cpp-vulkan"),
    ({**RX, "engine": "llama.cpp-2025"}, "on AMD's GPUs; use llama.cpp-rocm or llama.cpp-vulkan"),
    ({**QWEN, "engine": "llama.cpp-rocm"}, "on NVIDIA's GPUs; use ik_llama.cpp or ktransformers or llama.cpp or"),
    ({**QWEN, "engine": "llama.cpp-metal"}, "llama.cpp-metal does not run on NVIDIA's GPUs"),
    ({**QWEN, "weights": "awq"}, "llama.cpp does not read weights in awq; ktransformers does"),
    ({**QWEN, "weights": "IQ3_K"}, "llama.cpp does not read weights in iq3_k; ik_llama.cpp does"),
    ({**RX, "weights": "fp8"}, "llama.cpp-vulkan does not read weights in fp8; choose other weights"),
])
def test_a_card_or_weights_that_the_engine_does_not_take_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        answered(**{"model": "qwen3-30b-a3b", **asked})


def test_what_a_model_is_published_in_is_read_by_the_usual_engine() -> None:
    llama_cpp = load_engine("llama.cpp")
    for model in model_names():
        weights = parted(Question(model, **RX).shape).weights
        assert weights is None or reads(llama_cpp, weights), model


# --- Engines are what their files say ---------------------------------------------------------------------------------


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
        shape, hardware = shape_of(rows[0]), machine_of(rows[0].machine)
        assert len({error_to_expect(shape, hardware, regime, engine) for engine in engines}) == 1


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


@pytest.mark.parametrize(("machine", "hardware"), [
    ("none+ddr5-5600+ryzen-9-9950x", "none+ddr5-5600+ryzen-9-9950x+96gb"),
    ("none+ddr5-5600+64gb", "none+ddr5-5600+64gb"), ("rtx-4080+ddr5-5600", "rtx-4080+ddr5-5600"), ("gb10", "gb10"),
])
def test_a_named_machine_without_a_gpu_has_the_memory_that_is_asked(machine: str, hardware: str) -> None:
    assert Question("gpt-oss-20b", machine=machine, ram_gb=96).hardware == hardware
