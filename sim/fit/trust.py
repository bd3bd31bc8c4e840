"""How far to trust an answer: the weakest numbers that it depends on most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.fit.limits import PARTS, WORTH_NAMING, Gain
from sim.machine.hardware import Hardware

SHOWN = 5
_DOUBT = {"high": 0.1, "medium": 0.5, "low": 1.0}  # by confidence, for the order alone
_TOLD_BY = {  # the numbers that a part's effect rests on
    "PCIe": ("link.h2d_bytes_per_s",),
    "DRAM": ("cpu.read_bytes_per_s",),
    "CPU compute": ("cpu.flops_per_s",),
    "GPU bandwidth": ("gpu.bandwidth_bytes_per_s", "gpu.bandwidth_fraction"),
    "GPU compute": ("gpu.flops_per_s", "gpu.flops_fraction"),
    "GPU memory": ("gpu.reserve_bytes",),
    "host program": ("host.launch_ns", "host.sync_ns"),
}
assert set(_TOLD_BY) == {part.name for part in PARTS}


@dataclass(frozen=True)
class Support:
    """A number that an answer rests on. ``gain``: of TPOT, if its part is a quarter better."""

    key: str
    value: float
    source: str
    confidence: str
    gain: float


def supports_of(hardware: Hardware, gains: Sequence[Gain]) -> tuple[Support, ...]:
    """The numbers whose weakness times weight is largest."""
    numbers = hardware.flat()
    found = [
        Support(key, numbers[key], *hardware.origins[key], gain.tpot)
        for gain in gains
        if gain.tpot >= WORTH_NAMING
        for key in _TOLD_BY[gain.part]
    ]
    return tuple(sorted(found, key=lambda one: -one.gain * _DOUBT[one.confidence])[:SHOWN])
