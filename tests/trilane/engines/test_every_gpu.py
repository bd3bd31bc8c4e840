"""Every GPU of the catalogue answers, and one that is better in everything is not slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import gpu_names, unified_names
from trilane.engines.question import Question, engine_of
from trilane.engines.speed import EngineSpeed


def speeds(model: str, names: list[str], ram: str | None) -> dict[str, EngineSpeed]:
    """Speeds of ``model`` on machines that differ in their GPU; those without room are left out."""
    made = {}
    for name in names:
        question = Question(model, gpu=name, ram=ram, prompt_tokens=512, generated=128)
        machine = load_hardware(question.hardware)
        made[name] = EngineSpeed(question, question.model_shape, machine, engine_of(question, machine))
    return {name: speed for name, speed in made.items() if speed.has_room}


def dominates(one: Hardware, other: Hardware) -> bool:
    """True if all numbers of the first GPU and of its link are at least the other's, next to the same CPU: that of a
    laptop is a laptop's."""
    alike = (one.gpu.vendor, one.gpu.launches, one.cpu) == (other.gpu.vendor, other.gpu.launches, other.cpu)
    return alike and all(more >= less for more, less in zip(_numbers(one), _numbers(other), strict=True))


def _numbers(machine: Hardware) -> tuple[float, ...]:
    gpu = machine.gpu
    integers = (gpu.integer_ops_per_s or 2 * gpu.flops_per_s) * gpu.flops_fraction
    room = gpu.memory_bytes - gpu.reserve_bytes
    return room, gpu.bandwidth_bytes_per_s, gpu.flops_per_s * gpu.flops_fraction, integers, machine.link.h2d_bytes_per_s


def slower(found: dict[str, EngineSpeed]) -> list[str]:
    """Pairs whose first is better in everything and slower, in decoding or in the prompt."""
    return [
        f"{one} {other}"
        for (one, mine), (other, its) in permutations(found.items(), 2)
        if dominates(mine.hardware, its.hardware)
        and (mine.decode.total_ns > 1.001 * its.decode.total_ns or mine.prompt.total_ns > 1.001 * its.prompt.total_ns)
    ]


@pytest.mark.parametrize(("model", "without_room"), [("gpt-oss-20b", {"gtx-1060-3gb"}), ("qwen3-30b-a3b", set())])
def test_every_card_answers_and_a_better_one_is_not_slower(model: str, without_room: set[str]) -> None:
    found = speeds(model, gpu_names(), "ddr5-5600")
    assert set(gpu_names()) - set(found) == without_room
    assert slower(found) == []


@pytest.mark.parametrize(("model", "without_room"), [
    ("gpt-oss-20b", set()), ("qwen3-30b-a3b", {"apple-m1", "apple-m1-7-core"}),
])
def test_every_mac_answers_and_a_better_one_is_not_slower(model: str, without_room: set[str]) -> None:
    found = speeds(model, unified_names(), None)
    assert set(unified_names()) - set(found) == without_room
    assert slower(found) == []


def test_a_better_card_with_a_worse_split_would_be_found() -> None:
    found = speeds("gpt-oss-20b", ["rtx-3060-8gb", "rtx-3060"], "ddr5-5600")
    best = found["rtx-3060"]
    assert slower({**found, "rtx-3060": replace(best, question=replace(best.question, n_cpu_moe=24))}) == [
        "rtx-3060 rtx-3060-8gb"
    ]
