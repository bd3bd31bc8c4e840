"""A machine from its profile's facts: the same again, or refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from realrun.errors import RefusedError
from realrun.machine import LaneKind, ResultPathName
from realrun.machine.cores import usable_cores
from realrun.machine.cuda_lanes import CudaLanes, CudaSettings
from realrun.machine.facts import cpu_facts
from realrun.machine.host_lanes import HostLanes
from realrun.machine.machines import (
    Facts,
    LaneOptions,
    check_asked,
    check_same,
    facts_of,
    machine_for,
    machine_of,
)
from realrun.machine.thread_lane import InlineLane
from realrun.replay.replay import machine_on
from sim.machine.devices import ResultPath
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.profile import Kind, Profile
from tests.kit.fake_torch import fake_machine
from tests.kit.tiny_bench import tiny_lanes


def profile_of(facts: Facts) -> Profile:
    return Profile({**facts, "date": "2026-11-20", "load_average": 3.5}, {}, {}, {}, {})


def facts(**changes: object) -> Facts:
    """Facts of tiny host lanes."""
    machine = HostLanes(tiny_lanes(**changes))
    machine.close()
    return facts_of(machine)


def test_the_same_machine_is_built_again() -> None:
    made = machine_of(profile_of(facts(link_bytes_per_s=3.5e9, chunk_bytes=4096)))
    made.close()
    assert asdict(made.settings) == asdict(tiny_lanes(link_bytes_per_s=3.5e9, chunk_bytes=4096))


def test_facts_are_plain_text_and_numbers() -> None:
    assert all(type(value) in (str, int, float) for value in facts().values())
    assert facts()["kind"] == "host-lanes"


@pytest.mark.parametrize("fact", ["cpu", "cores", "kernel", "torch"])
def test_another_machine_is_refused_by_what_differs(fact: str) -> None:
    other = profile_of({**facts(), fact: "another"})
    with pytest.raises(RefusedError, match=f"{fact} 'another' and not"):
        machine_of(other)


def test_date_and_load_are_no_part_of_a_machine() -> None:
    passing = {"date": "2020-01-01", "load_average": 0.0}
    check_same({**facts(), **passing}, facts(), "this computer")
    with pytest.raises(RefusedError, match=r"the profile has cpu 'another' and not '[^;]*'\. Write") as refused:
        check_same({**facts(), **passing, "cpu": "another"}, facts(), "this computer")
    assert not [fact for fact in passing if fact in str(refused.value)]


def without(facts: Facts, *keys: str) -> Facts:
    return {key: value for key, value in facts.items() if key not in keys}


def test_a_profile_from_before_some_facts_were_told_is_of_a_machine_as_it_was_then() -> None:
    now = {**facts(), "cpu_kernel": "torch", "cpu_results_awaited_by": "the host", "lanes_runtime": "eager"}
    before = without(now, "cpu_kernel", "cpu_results_awaited_by", "lanes_runtime", "lanes_copy_core", "lanes_host_core")
    assert now["lanes_copy_core"] == now["lanes_host_core"] == "any"
    check_same(before, now, "this computer")
    with pytest.raises(RefusedError, match="the profile has cpu_kernel 'torch' and not 'native-avx2'"):
        check_same(before, {**now, "cpu_kernel": "native-avx2"}, "this computer")
    with pytest.raises(RefusedError, match="cpu_results_awaited_by 'the host' and not \"the GPU"):
        check_same(before, {**now, "cpu_results_awaited_by": "the GPU's streams"}, "this computer")


def test_what_was_asked_for_is_compared_with_what_an_earlier_profile_had() -> None:
    before = profile_of({"kind": "cuda"})
    check_asked(before, "cuda", LaneOptions(runtime="eager"))
    with pytest.raises(RefusedError, match="the profile has lanes_runtime 'eager' and not 'graphs'"):
        check_asked(before, "cuda", LaneOptions(runtime="graphs"))


def test_the_kinds_to_choose_from_are_those_of_profiles() -> None:
    assert {"auto", *get_args(Kind)} == set(get_args(LaneKind))
    assert get_args(ResultPathName) == get_args(ResultPath)


def test_options_of_host_lanes() -> None:
    core = min(usable_cores())
    machine = machine_for("host-lanes", LaneOptions(core, (core,), 2.5e9))
    machine.close()
    assert isinstance(machine, HostLanes)
    assert machine.settings == replace(machine.settings, gpu_core=core, cpu_cores=(core,), link_bytes_per_s=2.5e9)


def test_by_default_the_gpu_has_a_core_of_its_own_where_there_are_two() -> None:
    machine = machine_for("host-lanes")
    machine.close()
    assert isinstance(machine, HostLanes)
    alone = machine.settings.gpu_core not in machine.settings.cpu_cores
    assert alone == (len(usable_cores()) > 1)


def test_one_core_is_enough_to_generate_on(monkeypatch: pytest.MonkeyPatch) -> None:
    core = max(usable_cores())
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {core}, raising=False)
    machine = machine_on(load_hardware("rtx3090-ddr4"), "host-lanes", inline=True)
    machine.close()
    assert isinstance(machine, HostLanes)
    assert (machine.settings.gpu_core, machine.settings.cpu_cores) == (core, (core,))
    assert isinstance(machine.gpu, InlineLane)


def test_cores_that_are_not_there_are_refused() -> None:
    with pytest.raises(RefusedError, match="expected cores among"):
        machine_for("host-lanes", LaneOptions(cpu_cores=(10_000,)))


def test_a_gpu_takes_no_options_of_host_lanes() -> None:
    for options in (LaneOptions(link_bytes_per_s=4e9), LaneOptions(gpu_core=0)):
        with pytest.raises(RefusedError, match=r"cuda: a .*: an option for host lanes only"):
            machine_for("cuda", options)


def test_only_a_gpu_has_a_runtime_to_choose() -> None:
    with pytest.raises(RefusedError, match="host-lanes: a runtime: an option for a CUDA GPU only"):
        machine_for("host-lanes", LaneOptions(runtime="graphs"))


# --- the machine of a profile -----------------------------------------------------------------------------------------


def on(profile: Profile) -> Hardware:
    return replace(load_hardware("rtx3090-ddr4"), profile=profile)


def test_a_profile_s_lanes_are_built_for_generating_too() -> None:
    machine = machine_on(on(profile_of(facts(link_bytes_per_s=3.5e9))), inline=True)
    machine.close()
    assert isinstance(machine.gpu, InlineLane)
    assert asdict(machine.settings) == asdict(tiny_lanes(link_bytes_per_s=3.5e9))


@pytest.mark.parametrize("lanes", ["auto", "host-lanes"])
def test_lanes_may_be_named_as_the_profile_has_them(lanes: LaneKind) -> None:
    profile = profile_of(facts())
    same = LaneOptions(tiny_lanes().gpu_core, tiny_lanes().cpu_cores, 1e12, memory_bytes=10**9)
    machine = machine_on(on(profile), lanes, same)
    machine.close()
    assert asdict(machine.settings) == asdict(tiny_lanes())


@pytest.mark.parametrize(("lanes", "options", "says"), [
    ("cuda", LaneOptions(), "kind 'host-lanes' and not 'cuda'"),
    ("auto", LaneOptions(gpu_core=9), "lanes_gpu_core 0 and not 9"),
    ("auto", LaneOptions(cpu_cores=(3, 4)), "lanes_cpu_cores '.*' and not '3,4'"),
    ("host-lanes", LaneOptions(link_bytes_per_s=1e9), "lanes_link_bytes_per_s .* and not 1000000000.0"),
])
def test_other_lanes_than_the_profile_has_are_refused(lanes: LaneKind, options: LaneOptions, says: str) -> None:
    profile = profile_of({**facts(), "lanes_gpu_core": 0})
    with pytest.raises(RefusedError, match=f"the choice of lanes is not the profile's machine: the profile has {says}"):
        machine_on(on(profile), lanes, options)


def test_a_gpu_s_memory_limit_and_runtime_are_part_of_its_settings_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaSettings, "check", lambda _: None)
    monkeypatch.setattr(CudaLanes, "__init__", lambda lanes, settings: setattr(lanes, "settings", settings))
    monkeypatch.setattr(CudaLanes, "facts", lambda _: {"gpu": "a card"})
    monkeypatch.setattr(CudaLanes, "close", lambda _: None)
    monkeypatch.setattr(CudaLanes, "crowding", "", raising=False)
    limited = machine_for("cuda", LaneOptions(memory_bytes=24 * 10**9, runtime="graphs"))
    assert isinstance(limited.settings, CudaSettings)
    assert (limited.settings.memory_bytes, limited.settings.runtime) == (24 * 10**9, "graphs")
    assert facts_of(limited)["lanes_memory_bytes"] == 24 * 10**9
    assert facts_of(limited)["lanes_runtime"] == "graphs"
    with pytest.raises(RefusedError, match="the profile has lanes_runtime 'graphs' and not 'eager'"):
        machine_on(on(profile_of(facts_of(limited))), "cuda", LaneOptions(runtime="eager"))
    again = machine_of(profile_of(facts_of(limited)))
    assert asdict(again.settings) == asdict(limited.settings)


# --- Facts of machines ------------------------------------------------------------------------------------------------


class TestFacts:
    def test_of_a_gpu(self, cuda, monkeypatch):
        monkeypatch.setattr(subprocess, "run", self.smi("595.58.03, 4, [N/A]\n"))
        with fake_machine(cuda) as machine:
            facts = machine.facts()
        assert facts == cpu_facts() | {
            "gpu": "Fake", "gpu_memory_bytes": "100000000000", "cuda": torch.version.cuda or "unknown",
            "torch": torch.__version__, "driver": "595.58.03", "pcie_generation": "4", "pcie_width": "unknown",
            "cpu_results_awaited_by": "the GPU's streams",
        }

    @pytest.mark.parametrize("answer", ["", "a, b, c, d", FileNotFoundError(), subprocess.TimeoutExpired("smi", 30)])
    def test_are_unknown_where_the_drivers_tool_is_silent(self, cuda, monkeypatch, answer):
        monkeypatch.setattr(subprocess, "run", self.smi(answer))
        with fake_machine(cuda) as machine:
            assert {machine.facts()[name] for name in ("driver", "pcie_generation", "pcie_width")} == {"unknown"}

    def test_of_a_cpu(self, tmp_path, monkeypatch):
        machine, listed = HostLanes.__new__(HostLanes), tmp_path / "cpuinfo"
        listed.write_text("processor\t: 0\nmodel name\t: A Fast One\nprocessor\t: 1\nmodel name\t: Another\n")
        monkeypatch.setattr("trilane.common.computer.CPU_LIST", listed)
        assert machine.facts()["cpu"] == "A Fast One"
        listed.unlink()
        assert machine.facts()["cpu"] not in ("", "A Fast One")
        assert int(machine.facts()["cores"]) >= 1

    @staticmethod
    def smi(answer: object) -> Callable[..., object]:
        real = subprocess.run

        def run(command: list[str], **kwargs: object) -> object:
            if command[0] != "nvidia-smi":
                return real(command, **kwargs)
            assert command[1] == "--id=GPU-ffc79498"
            if isinstance(answer, BaseException):
                raise answer
            return SimpleNamespace(stdout=answer)

        return run
