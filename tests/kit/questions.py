"""Questions of ``trilane fit`` and ``trilane pays`` that several tests ask, and answers made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from sim.machine.hardware import load_hardware
from trilane.engines.memory import Splitter
from trilane.engines.question import Question, engine_of
from trilane.engines.speed import EngineAnswer, engine_answer
from trilane.study.pays.dimensions import Dimension, Values
from trilane.study.pays.gain_map import Cell, GainMap
from trilane.study.pays.ideas import Idea, PaysQuestion
from trilane.study.pays.played_map import FACTS, PlayedSide

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


# --- questions of pays ------------------------------------------------------------------------------------------------

MACHINE = {"gpu": "gtx-1650-super", "ram": "ddr4-3200"}  # a card that holds 4 of the 16 experts
MODEL, WEIGHTS = "mixtral-8x7b:2", "bf16"
WORDS = ("--model", MODEL, "--weights", WEIGHTS, *(f"--{name}={part}" for name, part in MACHINE.items()))


def small_question(
    idea: str = "cache", draws: int = 1, policy: str | None = None, x: float | None = None, y: float | None = None,
    **changes: Any,
) -> PaysQuestion:
    """An idea, asked of two layers of large experts and a small card."""
    lengths = {"prompt_tokens": 64, "generated": 8}
    fields: dict[str, Any] = {"model": MODEL, "weights": WEIGHTS, **lengths, **MACHINE, **changes}
    return PaysQuestion(idea, Question(**fields), draws, policy, x, y)


def narrowed(idea: Idea) -> Idea:
    """The idea with the values next to the machine's own alone."""
    return replace(idea, x=_narrowed(idea.x), y=_narrowed(idea.y))


def _narrowed(dimension: Dimension) -> Dimension:
    return replace(dimension, around=_next_to_own(dimension.around))


def _next_to_own(around: Callable[[float], Values]) -> Callable[[float], Values]:
    def values(own: float) -> Values:
        place = around(own).index(own)
        return around(own)[max(place - 1, 0) : place + 2]

    return values


_ENGINES = {
    "llama.cpp": "llama.cpp", "llama-cache-lru": "llama.cpp-uploads", "llama.cpp@cache": "llama.cpp-cache"
}


def hand_made_map() -> GainMap:
    """A cache that pays where uploads take 100 us, with half of the experts, and not where they take 300."""

    def side(policy: str, *speeds: float, reason: str = "") -> PlayedSide:
        copied = 0.0 if policy == "llama.cpp" else 2.0**20
        facts = {**dict.fromkeys(FACTS, 0.5), "plan_overhead_share": 0.0, "pcie_bytes_per_token": copied}
        return PlayedSide(policy, _ENGINES[policy], speeds, facts, reason)

    split, cache = side("llama.cpp", 10.0, 20.0), "llama-cache-lru"
    cells = [
        [side(cache, 11.0, 22.0), side(cache, 12.0, 28.0)],
        [side(cache, reason="too small"), side(cache, 9.0, 18.0)],
    ]
    rows = tuple(
        tuple(Cell(x, y, split, using) for x, using in zip((0.25, 0.5), sides, strict=True))
        for y, sides in zip((100.0, 300.0), cells, strict=True)
    )
    own_cache = replace(rows[0][1], using=side("llama.cpp@cache", 11.0, 22.0))
    return GainMap(
        small_question("cache", draws=2), "model on machine: answers", rows, (1, 0), 100.0, ("4.0 x16", ""), own_cache
    )
