"""What limits an answer: one part better at a time, and the sentence about it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from sim.machine.hardware import load_hardware
from sim.machine.plausibility import check_plausible
from sim.runs.prepare import Prepared
from trilane.engines.gains import (
    BETTER,
    CPU_READS,
    PARTS,
    ScaledPart,
    better_numbers,
    ranked,
    reads_all_it_can,
)
from trilane.engines.question import Question
from trilane.fit.policy_result import play_policy
from trilane.fit.prepared_question import on_machine, prepared_for
from trilane.fit.sensitivity import gain_of, parts_of, warm_window, with_better

HARDWARE = load_hardware("rtx-4080+ddr5-5600")
[DRAM] = [part.keys for part in PARTS if part.name == "DRAM"]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_better_part_changes_its_own_numbers_and_stays_plausible(part: ScaledPart) -> None:
    before = HARDWARE.flat()
    better = {key: before[key] * BETTER for key in part.keys} | {key: before[key] / BETTER for key in part.shrinking}
    after = HARDWARE.with_numbers(better).flat()
    assert {key for key in before if after[key] != before[key]} == set(better)
    assert all(after[key] == pytest.approx(value) for key, value in better.items())
    check_plausible(after, "a better machine")


def test_whole_numbers_stay_whole() -> None:
    assert HARDWARE.with_numbers({"gpu.memory_bytes": 10.6}).gpu.memory_bytes == 11


@pytest.mark.parametrize(
    ("read", "ceiling", "faster_memory", "at_ceiling"),
    [(40e9, None, 50e9, False), (40e9, 60e9, 50e9, False), (40e9, 44e9, 44e9, False), (40e9, 40e9, 40e9, True)],
    ids=["no ceiling known", "far below it", "near it", "at it"],
)
def test_of_faster_memory_the_cpu_reads_no_more_than_it_can(
    read: float, ceiling: float | None, faster_memory: float, at_ceiling: bool
) -> None:
    cpu = replace(HARDWARE.cpu, read_bytes_per_s=read, read_ceiling_bytes_per_s=ceiling)
    hardware = replace(HARDWARE, cpu=cpu)
    assert better_numbers(hardware, DRAM)["cpu.read_bytes_per_s"] == faster_memory
    assert reads_all_it_can(hardware) == at_ceiling


def test_a_cpu_that_reads_more_has_a_higher_ceiling() -> None:
    hardware = replace(HARDWARE, cpu=replace(HARDWARE.cpu, read_bytes_per_s=40e9, read_ceiling_bytes_per_s=40e9))
    [part] = [part for part in PARTS if part.name == CPU_READS]
    assert better_numbers(hardware, part.keys) == {
        "cpu.read_bytes_per_s": 50e9, "cpu.read_ceiling_bytes_per_s": 50e9,
    }


def test_a_profiles_tables_shrink_where_it_has_no_numbers() -> None:
    prepared = on_a_profile()
    before = prepared.costs.experts[0]
    after = {part.name: with_better(prepared, part).costs.experts[0] for part in PARTS if part.tables}
    assert after["PCIe"] == before._replace(copy_ns=round(before.copy_ns / BETTER))
    assert after["GPU bandwidth"] == before._replace(gpu_ns=tuple(round(ns / BETTER) for ns in before.gpu_ns))
    shorter = tuple(round(ns / BETTER) for ns in before.cpu_ns)
    assert after["DRAM"] == before._replace(cpu_ns=shorter, first_cpu_ns=round(before.first_cpu_ns / BETTER))


def test_gains_on_a_profile_are_those_of_parts_that_its_tables_tell_apart() -> None:
    prepared = on_a_profile().with_policy("ktransformers")
    window = warm_window(prepared, play_policy(prepared))
    gains = ranked(gain_of(prepared, window, part) for part in parts_of(prepared))
    assert {gain.part for gain in gains} == {
        "PCIe", "DRAM", "GPU bandwidth", "GPU memory", "kernel launches", "synchronisation", "decisions",
    }
    assert [gain.tpot for gain in gains] == sorted((gain.tpot for gain in gains), reverse=True)
    assert all(gain.tpot < BETTER - 1 + 1e-3 for gain in gains if gain.part != "GPU memory")


@cache
def on_a_profile() -> Prepared:
    """DeepSeek-V2-Lite's first two layers, of which too little memory holds a part."""
    profile = str(Path(__file__).parents[3] / "docs/validation/host-lanes/profile.yaml")
    question = Question("deepseek-v2-lite:2", machine=profile, trace="mini-deepseek:2", prompt_tokens=32, generated=4)
    prepared = prepared_for(question)
    return on_machine(prepared, prepared.hardware.with_numbers({"gpu.memory_bytes": 2.4e9}))
