"""Dials: how far each can be turned, and the names of links."""

from __future__ import annotations

import pytest

from sim.machine.dials import DIALS, LANE_BYTES_PER_S, plausible_range, slot_named, turned
from sim.machine.hardware import load_hardware
from sim.machine.plausibility import HardwareError

LINKS = [f"{generation}x{lanes}" for generation in (3, 4, 5) for lanes in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize("dial", ["pcie_gbps", "dram_gbps"])
@pytest.mark.parametrize("machine", [
    "rtx-5090+ddr5-5600", "rtx-4060-laptop+ddr5-5600+pcie-3x1", "l40s+ddr5-4800-ecc+epyc-9354+2-sockets", "gb10",
])
def test_a_dial_turns_to_the_ends_of_its_range_and_no_further(machine: str, dial: str) -> None:
    hardware = load_hardware(machine)
    low, high = plausible_range(hardware, dial)
    own = hardware.flat()[DIALS[dial].keys[0]] / DIALS[dial].unit
    assert low <= own <= high
    for value in (low * 1.001, high * 0.999):
        load_hardware(machine, turned(hardware, dial, value))
    for value in (low * 0.99, high * 1.01):
        with pytest.raises(HardwareError, match=r"is outside|a socket, above"):
            load_hardware(machine, turned(hardware, dial, value))


def test_a_lane_carries_its_transfers_less_the_bits_of_its_coding() -> None:
    """GT/s of the generations: 2.5 and 5 with 10 bits a byte; 8, 16 and 32 with 130 for 128 bits."""
    coded = {generation: rate * 1e9 * 128 / 130 / 8 for generation, rate in ((3, 8), (4, 16), (5, 32))}
    assert {1: 2.5e9 / 10, 2: 5e9 / 10, **coded} == LANE_BYTES_PER_S


@pytest.mark.parametrize("link", LINKS)
def test_every_link_has_its_name_in_its_own_generation(link: str) -> None:
    generation, lanes = map(int, link.split("x"))
    assert slot_named(LANE_BYTES_PER_S[generation] * lanes, generation) == f"{generation}.0 x{lanes}"
    assert load_hardware(f"rtx-5090+ddr5-5600+pcie-{link}").link.h2d_bytes_per_s > 0


@pytest.mark.parametrize(("gb_per_s", "generation", "name"), [
    (15.75, 4, "4.0 x8"), (15.75, 3, "3.0 x16"), (16.0, 5, "5.0 x4"), (63.0, 4, "5.0 x16"), (0.5, 4, "2.0 x1"),
    (126.0, 4, ""), (12.5, 4, ""), (0.1, 4, ""),
])
def test_a_rate_is_named_by_the_nearest_link_if_one_is_near(gb_per_s: float, generation: int, name: str) -> None:
    assert slot_named(gb_per_s * 1e9, generation) == name
