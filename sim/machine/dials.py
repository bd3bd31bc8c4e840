"""Dials: single numbers with a unit that scale what belongs together, so that a machine stays a plausible one.

A link of twice the bandwidth is twice as fast in both directions and on paper.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from sim.machine.hardware import Hardware
from sim.machine.plausibility import DRAM_BYTES_PER_SOCKET, HardwareError, limits_of
from trilane.common.hints import above
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict
from trilane.common.units import GB

LANE_BYTES_PER_S = {  # one PCIe lane, one way, after line coding: 8b/10b, then 128b/130b (PCI-SIG base specifications)
    1: 0.25e9, 2: 0.5e9, 3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8,
}
_NEAR = 0.125  # of a rate; two links differ by half at least, or, of coding, by less than that
PCIE = "pcie"  # a dial whose values are generation x lanes, such as 4x16
LINK = ("link.theory_bytes_per_s", "link.h2d_bytes_per_s", "link.d2h_bytes_per_s")  # what it sets


@dataclass(frozen=True)
class Dial:
    """Sets the first of ``keys`` to a value x ``unit``; the others keep their ratio to it."""

    label: str
    keys: tuple[str, ...]
    unit: float


DIALS: Mapping[str, Dial] = {
    "pcie_gbps": Dial("PCIe bandwidth (GB/s)", (LINK[1], LINK[0], LINK[2]), GB),
    "dram_gbps": Dial("DRAM bandwidth of CPU experts (GB/s)", ("cpu.read_bytes_per_s", "cpu.dram_bytes_per_s"), GB),
    "gpu_gbps": Dial("GPU memory bandwidth (GB/s)", ("gpu.bandwidth_bytes_per_s",), GB),
    "gpu_tflops": Dial("GPU matrix rate (TFLOP/s)", ("gpu.flops_per_s",), 1e12),
    "cpu_gflops": Dial("CPU matrix rate (GFLOP/s)", ("cpu.flops_per_s",), 1e9),
}


def turned(hardware: Hardware, dial: str, value: object) -> dict[str, float]:
    """Numbers of a machine that a dial at ``value`` changes, by dotted key. Raises HardwareError for an invalid one."""
    if dial == PCIE:
        return scaled_numbers(hardware, LINK, link_bytes_per_s(value) / hardware.link.theory_bytes_per_s)
    keys, unit = DIALS[dial].keys, DIALS[dial].unit
    number: float = from_dict(Annotated[float, above(0)], value, dial, HardwareError)
    return scaled_numbers(hardware, keys, number * unit / hardware.flat()[keys[0]])


def plausible_range(hardware: Hardware, dial: str) -> tuple[float, float]:
    """The lowest and the highest value of a dial with which no number of a machine leaves its limits; measured
    machines have no dials."""
    numbers, limits, keys = hardware.flat(), limits_of(hardware.gpu.kind), DIALS[dial].keys
    most = {"cpu.dram_bytes_per_s": DRAM_BYTES_PER_SOCKET * hardware.cpu.sockets}
    own = numbers[keys[0]] / DIALS[dial].unit
    lowest = max(limits[key].low / numbers[key] for key in keys)
    return own * lowest, own * min(min(limits[key].high, most.get(key, math.inf)) / numbers[key] for key in keys)


def slot_named(bytes_per_s: float, generation: int) -> str:
    """The PCIe link with this rate on paper, in bytes/s one way, such as "4.0 x8": of this generation if it has one,
    otherwise of another; nothing if none is within an eighth of it."""
    links = [(each, lanes, rate * lanes) for each, rate in LANE_BYTES_PER_S.items() for lanes in (1, 2, 4, 8, 16)]
    near = [link for link in links if abs(link[2] / bytes_per_s - 1) < _NEAR]
    found = min(near, key=lambda link: (abs(link[0] - generation), -link[1]), default=None)
    return f"{found[0]}.0 x{found[1]}" if found else ""


def scaled_numbers(hardware: Hardware, keys: Iterable[str], factor: float) -> dict[str, float]:
    """Some numbers of a machine times ``factor``, by dotted key."""
    numbers = hardware.flat()
    return {key: numbers[key] * factor for key in keys}


def link_bytes_per_s(value: object) -> float:
    """Bandwidth on paper of one direction of a link such as ``4x16``, in bytes/s. Raises HardwareError."""
    slot = re.fullmatch(r"([1-5])x(1|2|4|8|16)", str(value))
    if slot is None:
        raise HardwareError(f"{PCIE}: expected generation x lanes such as 3x16, 4x8 or 5x16, got {quoted(value)}")
    return LANE_BYTES_PER_S[int(slot[1])] * int(slot[2])
