"""Scenarios whose host has no room for all experts: what is refused, and what is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.machine.hardware import load_hardware, write_hardware
from sim.machine.plausibility import HardwareError
from sim.runs.host_memory import host_tier
from sim.runs.prepare import prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate

SHORT = Scenario(policy="llama.cpp", gpu_memory_gb=12, prompt_tokens=8, generated_tokens=12)


def run(**changes: Any) -> Run:
    return simulate(SHORT.with_(**changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"host_expert_gb": 8}, "expected a disk that holds the other experts; name its kind or its GB/s"),
    ({"disk": "nvme-4x4"}, "disk 'nvme-4x4': expected host_expert_gb with it"),
    ({"host_expert_gb": 0.5, "disk": 3.5}, "host_expert_gb 0.5: expected at least 1.14, which the 64 experts of a"),
])
def test_what_cannot_be_simulated_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        run(**changes)


def test_experts_cannot_be_pinned_without_a_calibration() -> None:
    made = prepare(SHORT.with_(host_expert_gb=8, disk="nvme-4x4", host_keeps="pinned"))
    with pytest.raises(ScenarioError, match="host_keeps pinned: expected a calibration"):
        host_tier(made.scenario, made.shape, made.costs, None)


def test_a_disk_that_there_is_not_is_refused() -> None:
    with pytest.raises(HardwareError, match="nvme-4x4"):
        run(host_expert_gb=8, disk="nvme-4x5")


def test_with_room_for_all_experts_a_run_is_that_without_a_disk() -> None:
    assert run(host_expert_gb=40, disk="nvme-4x4").spans.equals(run().spans)


def test_less_memory_and_a_slower_disk_take_longer() -> None:
    times = [run(host_expert_gb=gb, disk=disk).metrics.tpot_ms for gb, disk in ((20, "7"), (10, "7"), (10, "2"))]
    assert None not in times
    assert times == sorted(times, key=lambda ms: ms or 0.0)
    assert len(set(times)) == 3


def test_below_the_experts_of_a_token_an_lru_memory_hits_nothing() -> None:
    """Of the 26 layers' 6 experts a token, 2.7 GB, 1.7 GB keep none until the next one: the least recent is the next
    that is needed. A set that is pinned has a share of them."""
    small = {"policy": "naive-cpu", "disk": "nvme-4x4", "host_expert_gb": 1.7}
    rates = {keeps: run(**small, host_keeps=keeps).metrics.disk["ram_hit_rate"] for keeps in ("experts", "pinned")}
    assert (rates["experts"] or 0.0) < 0.01 < 0.03 < (rates["pinned"] or 0.0)


def test_the_numbers_of_a_run_say_what_was_read_and_waited_for() -> None:
    made = run(host_expert_gb=10, disk="nvme-4x4").to_dict()
    assert 0 < made["ram_hit_rate"] < 1
    assert made["disk_bytes_per_token"] > made["disk_ahead_bytes_per_token"] == 0
    assert made["stall_disk_share"] > 0.5
    assert made["disk_busy_share"] > 0.5
    assert made["lower_bound_tpot_ms"] <= made["tpot_ms"]
    assert made["null_model_tpot_ms"] > run().to_dict()["null_model_tpot_ms"]
    assert "ram_hit_rate" not in run().to_dict()


def test_copies_ahead_are_read_ahead() -> None:
    made = run(policy="best-exact", host_expert_gb=20, disk="nvme-4x4")
    assert {"read", "read_ahead"} <= set(made.spans["kind"])


def test_a_machine_may_have_its_disk_in_its_file(tmp_path: Path) -> None:
    machine = load_hardware("rtx3090-ddr4", {"disk.depth": 4}, "nvme-4x4")
    assert machine.numbers()["disk.ceiling_bytes_per_s"].source.startswith("the same table")
    write_hardware(machine, tmp_path / "own.yaml")
    again = load_hardware(tmp_path / "own.yaml")
    assert again.disk == machine.disk
    whole = prepare(SHORT.with_(hardware=str(tmp_path / "own.yaml"), host_expert_gb=8))
    assert whole.costs.experts[0].read_ns > 0


def test_faults_take_longer_than_direct_reads() -> None:
    """Of 128 KiB at a time, by as many threads as there are cores, and with what is read around each matrix."""
    times = {
        keeps: prepare(SHORT.with_(host_expert_gb=8, disk="nvme-4x4", host_keeps=keeps))
        for keeps in ("experts", "pages")
    }
    direct, mapped = (times[keeps].costs.experts[0].read_ns for keeps in ("experts", "pages"))
    assert direct < mapped
