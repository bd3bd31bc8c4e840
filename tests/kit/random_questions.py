"""Questions drawn at random from the catalogue: a model and its weights, a machine of parts, lengths and settings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from sim.machine.assembly import NO_GPU
from sim.machine.hardware import load_hardware
from sim.machine.parts import CpuPart, GpuPart, MemoryPart, UnifiedPart, all_parts
from sim.machine.plausibility import HardwareError
from traces.models.catalogue import load_model, model_names
from traces.models.quantisation import quantisations_of
from trilane.engines.question import FitError, Question, check_engine, check_setting, engine_of, fitted_engines

RAM_GB = (None, 8, 16, 32, 64, 128, 256, 512)
_WITH_GPU = 0.8  # of all machines


def random_questions(seed: int, count: int, **fixed: Any) -> Iterator[Question]:
    """So many questions that an engine takes, whether there is room or not; ``fixed``: fields of all of them."""
    draw = random.Random(seed)
    while count:
        question = _question(draw, fixed)
        if question is not None:
            count -= 1
            yield question


def _question(draw: random.Random, fixed: dict[str, Any]) -> Question | None:
    """A question, or None if its parts do not go together or no engine takes it."""
    model = draw.choice(model_names())
    fields: dict[str, Any] = {
        "model": model, "weights": draw.choice([None, *_formats(model)]), **_machine(draw),
        "prompt_tokens": round(2 ** draw.uniform(4, 17)), "generated": draw.choice([1, 2, 32, 256, 2048]),
        "batch": draw.choice([1, 1, 1, 2, 3, 8]), "kv": draw.choice([None, "f16", "q8_0", "q4_0"]),
        "ubatch": draw.choice([None, 128, 256, 1024, 2048, 4096]), "engine": draw.choice([None, *fitted_engines()]),
        "window": draw.choice([None, None, round(2 ** draw.uniform(6, 20))]),
        "ram_gb": draw.choice(RAM_GB), "threads": draw.choice([None, None, 1, 4]),
    }
    try:
        question = Question(**fields | fixed)
        shape, hardware = question.model_shape, load_hardware(question.hardware)
        engine = engine_of(question, hardware)
        check_setting(question, engine, hardware)
        check_engine(engine, shape, hardware)
    except (FitError, HardwareError):
        return None
    return question


def _machine(draw: random.Random) -> dict[str, Any]:
    kinds = {
        kind: [part.name for part in _parts() if isinstance(part, kind)] for kind in (GpuPart, MemoryPart, CpuPart)
    }
    gpu = draw.choice(kinds[GpuPart]) if draw.random() < _WITH_GPU else NO_GPU
    if any(part.name == gpu and isinstance(part, UnifiedPart) for part in _parts()):
        return {"gpu": gpu}
    return {"gpu": gpu, "ram": draw.choice(kinds[MemoryPart]), "cpu": draw.choice([None, *kinds[CpuPart]])}


@cache
def _parts() -> list[Any]:
    return all_parts()


@cache
def _formats(model: str) -> list[str]:
    return quantisations_of(load_model(model))
