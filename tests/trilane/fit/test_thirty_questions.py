"""Thirty questions over the classes of machines (``questions.yaml``): every answer is sane."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.machine.hardware import Hardware, load_hardware
from tests.kit.depth import deep
from traces.models.shape import ModelShape
from trilane.common.yaml_files import read_yaml
from trilane.engines.accuracy.scores import token_bytes
from trilane.engines.question import Question
from trilane.engines.speed import EngineAnswer, engine_answer
from trilane.engines.split_speed import StaticSplit
from trilane.fit.fit import fit
from trilane.output.pages.fit import fit_page

QUESTIONS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("questions.yaml"))


@cache
def answered(name: str) -> tuple[Question, ModelShape, Hardware, EngineAnswer]:
    asked = Question(**QUESTIONS[name]["asked"])
    shape, hardware = asked.model_shape, load_hardware(asked.hardware)
    return asked, shape, hardware, engine_answer(asked, shape, hardware)


def test_there_are_thirty_of_many_machines() -> None:
    assert len(QUESTIONS) == 30
    assert len({Question(**each["asked"]).hardware for each in QUESTIONS.values()}) >= 28


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_engine_decodes_as_fast_as_people_report(name: str) -> None:
    least, most = QUESTIONS[name]["decode"]
    assert least <= 1000 / answered(name)[-1].tpot_ms <= most


@pytest.mark.parametrize("name", QUESTIONS)
def test_experts_are_where_they_have_room(name: str) -> None:
    _, _, hardware, found = answered(name)
    on_cpu = found.cpu_only or found.cpu_layers == found.layers
    assert QUESTIONS[name]["experts"] == ("CPU" if on_cpu and not found.gpu_experts else "both" if found.cpu_layers
                                          else "GPU")
    assert found.memory.missing_bytes <= 0
    assert found.memory.gpu_bytes == hardware.gpu.memory_bytes


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_token_is_read_faster_than_the_data_sheets_say(name: str) -> None:
    asked, shape, hardware, found = answered(name)
    split = StaticSplit(max(found.cpu_layers - shape.dense_layers, 0), found.gpu_experts)
    read = token_bytes(shape, hardware, split, asked.prompt_tokens)
    least_s = (read.gpu_weights + read.cache) / hardware.gpu.bandwidth_bytes_per_s
    assert found.tpot_ms >= 1e3 * (least_s + read.cpu_weights / hardware.cpu.dram_bytes_per_s)


@pytest.mark.parametrize("name", QUESTIONS)
def test_parts_add_up_and_a_prompt_takes_less_than_as_many_tokens(name: str) -> None:
    asked, _, _, found = answered(name)
    assert sum(found.decode_ms.values()) == pytest.approx(found.tpot_ms)
    assert sum(found.prompt_ms.values()) == pytest.approx(found.ttft_ms)
    assert found.tpot_ms < found.ttft_ms < 0.7 * asked.prompt_tokens * found.tpot_ms
    if found.larger_pieces:
        assert found.larger_pieces.ttft_ms < 0.9 * found.ttft_ms
        assert found.larger_pieces.tpot_ms >= found.tpot_ms


@deep
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_whole_answer_is_sane(name: str) -> None:
    """No policy is below its bound, and the best one is hardly slower than the engine, whose fixed times differ."""
    found = fit(answered(name)[0])
    assert fit_page(found)
    if found.policies is None:
        return
    best, bounds = found.policies.best, found.policies.bounds
    assert all(math.isfinite(bound) for bound in bounds.values())
    assert bounds["lower_bound_tpot_ms"] <= best.tpot_ms
    assert found.engine is not None
    assert best.tpot_ms < 1.25 * found.engine.tpot_ms
