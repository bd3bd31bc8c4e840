"""Dials scale what belongs together; numbers of a machine may be replaced one by one."""

from __future__ import annotations

import pytest

from sim.machine.dials import DIALS, LINK, PCIE, scaled_numbers, turned
from sim.machine.hardware import load_hardware
from sim.machine.plausibility import HardwareError, check_plausible

MACHINE = load_hardware("rtx3090-ddr4")


@pytest.mark.parametrize("dial", DIALS)
def test_a_dial_sets_its_first_number_and_the_others_keep_their_ratio(dial: str) -> None:
    keys, unit = DIALS[dial].keys, DIALS[dial].unit
    numbers, changed = MACHINE.flat(), turned(MACHINE, dial, 20)
    assert set(changed) == set(keys)
    assert changed[keys[0]] == pytest.approx(20 * unit)
    ratio = 20 * unit / numbers[keys[0]]
    assert [changed[key] / numbers[key] for key in keys] == pytest.approx([ratio] * len(keys))


def test_a_slot_is_named_by_generation_and_lanes() -> None:
    changed = turned(MACHINE, PCIE, "3x8")  # 8 GT/s, 128b/130b
    assert changed[LINK[0]] == pytest.approx(8 * 8e9 * 128 / 130 / 8)
    assert set(changed) == set(LINK)


@pytest.mark.parametrize(("dial", "value", "message"), [
    (PCIE, "6x16", "pcie: expected generation x lanes such as 3x16"),
    (PCIE, "4x3", "got '4x3'"),
    ("pcie_gbps", 0, "pcie_gbps: expected a number above 0, got 0"),
    ("gpu_tflops", True, "got True"),
    ("dram_gbps", "fast", "got 'fast'"),
])
def test_what_a_dial_cannot_be_set_to(dial: str, value: object, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        turned(MACHINE, dial, value)


def test_a_better_part_is_a_plausible_machine_whose_whole_numbers_stay_whole() -> None:
    better = MACHINE.with_numbers(scaled_numbers(MACHINE, ("gpu.memory_bytes", "gpu.kernel_ns", *LINK), 1.25))
    assert (better.gpu.memory_bytes, better.gpu.kernel_ns) == (MACHINE.gpu.memory_bytes * 5 // 4, 3750)
    assert better.link.h2d_bytes_per_s == MACHINE.link.h2d_bytes_per_s * 1.25
    check_plausible(better.flat(), "better")


def test_a_preset_was_not_measured() -> None:
    assert not MACHINE.measured
    with pytest.raises(HardwareError, match="'rtx3090-ddr4': expected a measured profile; make one: trilane profile"):
        MACHINE.measured_profile()
