"""Machines with one memory: without a GPU, and with one that reads the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.machine.hardware import Hardware, HardwareError, load_hardware, write_hardware
from sim.machine.parts import part, unified_names
from tests.kit.assembled import assemble
from trilane.common.units import GB, GIB

ONE_MEMORY = ["none+ddr5-5600+ryzen-9-7950x", "none+ddr4-2133+core-i3-8100+16gb", *unified_names()]


@pytest.fixture
def desktop() -> Hardware:
    return load_hardware("none+ddr5-5600+ryzen-9-7950x+64gb")


def test_without_a_gpu_the_cpus_numbers_stand_in_its_place(desktop: Hardware) -> None:
    gpu, cpu = desktop.gpu, desktop.cpu
    assert (desktop.cpu_only, desktop.one_memory, gpu.name, cpu.name) == (True, True, "no GPU", "Ryzen 9 7950X")
    assert gpu.read_bytes_per_s == pytest.approx(cpu.read_bytes_per_s)
    assert gpu.bandwidth_bytes_per_s == cpu.dram_bytes_per_s == 89.6 * GB
    assert gpu.effective_flops_per_s == cpu.flops_per_s
    assert gpu.memory_bytes == cpu.ram_bytes == 64 * GIB


def test_without_a_gpu_the_cpu_is_that_of_the_same_machine_with_one(desktop: Hardware) -> None:
    assert desktop.cpu == load_hardware("rtx-4090+ddr5-5600+ryzen-9-7950x+64gb").cpu
    assert load_hardware("none+ddr4-3200+4-channels").cpu.name == "generic server CPU"


def test_memory_that_is_not_stated_is_enough() -> None:
    machine = assemble("none", "ddr5-5600")
    assert machine.gpu.memory_bytes == 1e13
    assert machine.origins["gpu.memory_bytes"].confidence == "low"
    assert machine.cpu.ram_bytes is None


@pytest.mark.parametrize("name", unified_names())
def test_a_unified_machine_is_named_by_its_gpu_alone(name: str) -> None:
    machine, memory = load_hardware(name), part("gpu", name).memory_bytes.value
    assert (machine.cpu_only, machine.one_memory, machine.gpu.kind) == (False, True, "unified")
    assert machine.gpu.memory_bytes == machine.cpu.ram_bytes == memory
    assert machine.gpu.bandwidth_bytes_per_s == pytest.approx(machine.cpu.dram_bytes_per_s, rel=0.03)
    assert machine.cpu.read_bytes_per_s < machine.gpu.read_bytes_per_s  # its cores cannot read all
    assert assemble(name) == machine


def test_a_unified_machine_is_sold_with_less_memory() -> None:
    machine = load_hardware("apple-m3-ultra+256gb")
    assert machine.gpu.memory_bytes == machine.cpu.ram_bytes == 256 * GIB


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_in_one_memory_nothing_is_copied_and_nothing_contends(name: str) -> None:
    machine = load_hardware(name)
    assert machine.link.expert_bytes_per_s == machine.cpu.dram_bytes_per_s
    assert (machine.link.h2d_latency_ns, machine.contention.copy_permille, machine.contention.cpu_permille) == (
        100, 1000, 1000,
    )


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_the_power_of_the_chip_is_counted_once(name: str) -> None:
    power = load_hardware(name).power
    assert power is not None
    assert power.gpu_busy_w > power.gpu_idle_w > 0
    assert power.cpu_busy_w == power.cpu_idle_w == 0


def test_a_card_is_of_no_such_kind() -> None:
    machine = load_hardware("rtx-4090+ddr5-5600")
    assert (machine.cpu_only, machine.one_memory, machine.gpu.kind) == (False, False, None)
    assert "gpu.kind" not in machine.flat()


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_it_is_read_back_from_its_file(name: str, tmp_path: Path) -> None:
    machine = load_hardware(name)
    write_hardware(machine, tmp_path / "mine.yaml")
    assert load_hardware(tmp_path / "mine.yaml") == machine
    assert set(machine.origins) == set(machine.flat())


def test_the_kind_of_a_machine_is_not_overridden() -> None:
    with pytest.raises(HardwareError, match="kind only describes the machine"):
        load_hardware("rtx-4090+ddr5-5600", {"gpu.kind": "unified"})


# --- two sockets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", ["xeon-gold-6138", "xeon-gold-6230", "epyc-7452", "server"])
def test_two_sockets_read_half_as_much_again_as_one(cpu: str) -> None:
    one, two = (assemble("rtx-4090", "ddr4-2666-ecc", cpu, sockets=sockets) for sockets in (None, 2))
    assert two.cpu.read_bytes_per_s == pytest.approx(1.5 * one.cpu.read_bytes_per_s, rel=1e-3)
    assert (two.cpu.sockets, two.cpu.cores) == (2, 2 * one.cpu.cores)
    assert two.cpu.dram_bytes_per_s == 2 * one.cpu.dram_bytes_per_s
    assert two.cpu.flops_per_s == pytest.approx(2 * one.cpu.flops_per_s)
    assert two.power is not None
    assert one.power is not None
    assert two.power.cpu_busy_w == 2 * one.power.cpu_busy_w


def test_few_cores_of_two_sockets_read_no_more_than_they_can() -> None:
    machine = load_hardware("none+ddr4-2666-ecc+xeon-gold-6138+2-sockets+8-cores")
    assert machine.cpu.cores == 8
    assert machine.cpu.read_bytes_per_s < 8 * 12 * GB
    assert "DDR4-2666 ECC on 2 sockets x 6 channels" in machine.about
