"""The computer at hand, with the answers of each system faked."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from realrun.machine.cores import physical_cores
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import spans_of
from trilane.common import computer
from trilane.common import gc_paused as gc_paused_module
from trilane.common.computer import cpu_name, memory_bytes, physical_core_count, threads_a_core
from trilane.common.gc_paused import collect_seldom, gc_paused, leave_garbage

NAME = "AMD Ryzen 7 5800X 8-Core Processor"
LISTED = f"processor\t: 0\nmodel name\t: {NAME}\ncpu MHz\t: 3000\nprocessor\t: 1\nmodel name\t: Another\n"


class Registry(SimpleNamespace):
    """``winreg`` with the key of the first processor, or with none."""

    HKEY_LOCAL_MACHINE = "HKLM"

    def OpenKey(self, root: str, path: str) -> Registry:  # noqa: N802
        assert (root, path) == ("HKLM", r"HARDWARE\DESCRIPTION\System\CentralProcessor\0")
        if self.name is None:
            raise FileNotFoundError(path)
        return self

    def QueryValueEx(self, key: Registry, value: str) -> tuple[str, int]:  # noqa: N802
        assert value == "ProcessorNameString"
        return key.name, 1

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *error: object) -> None: ...


def fake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, name: str | None, logical: int = 16,
    physical: int | None = 8,
) -> None:
    """A computer of 32 GiB with a system of this name; ``name``: of the CPU, None where the system has no answer."""

    def run(command: tuple[str, ...], **options: Any) -> Any:
        assert command == ("sysctl", "-n", "machdep.cpu.brand_string")
        if name is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=f"{name}\n")

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setitem(sys.modules, "winreg", Registry(name=name and f"{name}     "))
    monkeypatch.setattr(computer, "CPU_LIST", tmp_path / "cpuinfo")
    if name is not None:
        (tmp_path / "cpuinfo").write_text(LISTED.replace(NAME, name))
    monkeypatch.setattr(platform, "processor", lambda: "x86_64")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: counts[logical])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=32 * 2**30 - 5))
    counts = {True: logical, False: physical}


of_each_system = pytest.mark.parametrize("system", ["linux", "darwin", "win32"])


@of_each_system
def test_a_cpu_has_the_name_that_its_system_gives_it(
    system: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path, system, NAME)
    assert cpu_name() == NAME


@of_each_system
def test_without_a_name_it_is_the_kind_of_processor(
    system: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path, system, None)
    assert cpu_name() == "x86_64"


@of_each_system
def test_memory_and_cores_are_those_of_the_computer(
    system: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path, system, NAME)
    assert memory_bytes() == 32 * 2**30 - 5
    assert (physical_core_count(), threads_a_core()) == (8, 2)


@pytest.mark.parametrize(("logical", "physical", "cores", "threads"), [
    (16, 8, 8, 2), (10, 10, 10, 1), (32, 24, 24, 1), (4, None, 4, 1),
], ids=["SMT", "none", "some cores with it", "not known"])
def test_cores_of_systems_that_do_not_list_them(
    logical: int, physical: int | None, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path, "win32", NAME, logical, physical)
    monkeypatch.setattr("realrun.machine.cores.usable_cores", lambda: set(range(logical)))
    assert (physical_core_count(), threads_a_core()) == (cores, threads)
    assert physical_cores() == [tuple(range(core * threads, (core + 1) * threads)) for core in range(cores)]


# --- Without the collector --------------------------------------------------------------------------------------------


def _fails() -> None:
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_collector_is_then_as_it_was(collects: bool) -> None:
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError):
            _fails()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_nobody_but_the_caller_keeps_the_spans_of_a_run() -> None:
    prepared = prepare(Scenario(prompt_tokens=2, generated_tokens=1))
    with gc_paused():
        rows = spans_of(prepared)
        assert not [holder for holder in gc.get_referrers(rows) if isinstance(holder, dict | list)]


@pytest.mark.parametrize("ends", [True, False])
def test_garbage_is_left_only_by_a_process_that_ends_with_its_command(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_paused_module, "_ending", [])
    collect_seldom(ends_soon=ends)
    young: list[list[int]] = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    leave_garbage()
    assert (gc.get_freeze_count() >= before + len(young)) == ends
