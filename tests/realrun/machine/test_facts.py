"""Facts of machines: CPU, GPU, driver and kernel."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from realrun.machine.facts import cpu_facts
from realrun.machine.host_lanes import HostLanes
from tests.kit.fake_torch import fake_machine


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
