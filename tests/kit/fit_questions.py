"""Questions of ``trilane fit`` that several tests ask, and their answers with the engine."""

from __future__ import annotations

from functools import cache
from typing import Any

from sim.machine.hardware import load_hardware
from trilane.engines.memory import Splitter
from trilane.engines.question import Question, engine_of
from trilane.engines.speed import EngineAnswer, engine_answer

QWEN: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "rtx-4080", "ram": "ddr5-5600", "cores": 16}
GEMMA: dict[str, Any] = {"model": "gemma-4-26b-a4b", "gpu": "rtx-3060", "ram": "ddr4-3200"}
SMALL: dict[str, Any] = {"model": "deepseek-v2-lite:4", "gpu": "rtx-3060", "ram": "ddr4-3200", "prompt_tokens": 64}


@cache
def answered(**asked: Any) -> EngineAnswer:
    """The engine's answer, made once for each question."""
    question = Question(**asked)
    return engine_answer(question, question.model_shape, load_hardware(question.hardware))


def splitter(**asked: Any) -> Splitter:
    """The splits of a question."""
    question = Question(**asked)
    hardware = load_hardware(question.hardware)
    engine = engine_of(question, hardware)
    return Splitter(question, question.model_shape, hardware, engine)
