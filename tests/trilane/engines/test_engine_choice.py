"""Which engine answers, and cards, weights and settings that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sim.costs.engine import load_engine
from sim.machine.hardware import load_hardware
from tests.kit.fit_questions import QWEN, answered
from traces.models.catalogue import model_names
from traces.models.names import parted
from trilane.engines.question import FitError, Question, engine_of, reads
from trilane.engines.speed import engine_answer
from trilane.fit.fit import fit


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


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpu": "none", "ram": "ddr5-5600", "engine": "llama.cpp-rocm"}, "llama.cpp-rocm: expected a machine with a"),
        ({"gpu": "gb10", "n_cpu_moe": 5}, "all of gb10 is in one memory"),
        ({"gpu": "none", "ram": "ddr5-5600", "n_cpu_moe": 4}, "is in one memory"),
        ({"gpu": "none", "ram": "ddr5-5600", "engine": "ktransformers"}, "expected a machine with a GPU, got none"),
        ({"gpu": "none", "ram": "ddr5-5600", "engine": "llama.cpp-vulkan"}, "with a GPU, got none.*; choose llama.cpp"),
        ({"gpu": "rtx-4080", "ram": "ddr5-5600", "cores": 6, "threads": 13}, "expected at most 12, 2 on each of the 6"),
    ],
)
def test_a_setting_that_the_machine_has_no_use_for_is_refused(asked: dict[str, Any], message: str) -> None:
    question = Question("qwen3-30b-a3b", **asked)
    with pytest.raises(FitError, match=message):
        engine_answer(question, question.model_shape, load_hardware(question.hardware))


RX = {"gpu": "rx-7900-xtx", "ram": "ddr5-5600"}
ARC = {"gpu": "arc-b580", "ram": "ddr5-5600"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
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
    ],
)
def test_a_card_or_weights_that_the_engine_does_not_take_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        answered(**{"model": "qwen3-30b-a3b", **asked})


def test_what_a_model_is_published_in_is_read_by_the_usual_engine() -> None:
    llama_cpp = load_engine("llama.cpp")
    for model in model_names():
        weights = parted(Question(model, **RX).shape).weights
        assert weights is None or reads(llama_cpp, weights), model
