"""Evidence for an answer: the weakest of the numbers that it depends on most, with their sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.costs.engine import load_engine
from sim.runs.prepare import Prepared
from trilane.engines.gains import PARTS, WORTH_NAMING, Gain

SHOWN = 5
_DOUBT = {"high": 0.1, "medium": 0.5, "low": 1.0}  # by confidence; affects the order alone
_NUMBERS = {  # on which the effect of a part rests
    "PCIe": ("link.h2d_bytes_per_s",),
    "DRAM": ("cpu.read_bytes_per_s",),
    "CPU reads": ("cpu.read_bytes_per_s",),
    "CPU compute": ("cpu.flops_per_s",),
    "GPU bandwidth": ("gpu.bandwidth_bytes_per_s", "gpu.bandwidth_fraction"),
    "GPU compute": ("gpu.flops_per_s", "gpu.flops_fraction"),
    "GPU memory": ("gpu.memory_bytes",),
    "GPU kernels": ("gpu.kernel_ns",),
    "kernel launches": ("host.launch_ns",),
    "synchronisation": ("host.sync_ns",),
    "decisions": ("host.plan_factor",),
}
_IN_GRAPHS = {"host.launch_ns": "replay_ns", "host.sync_ns": "spin_ns"}  # the numbers that replace them
assert set(_NUMBERS) == {part.name for part in PARTS}


@dataclass(frozen=True)
class Evidence:
    """A number that an answer rests on. ``gain``: of TPOT, if its part is 25 % better."""

    key: str
    value: float
    source: str
    confidence: str
    gain: float


def evidence_of(prepared: Prepared, gains: Sequence[Gain]) -> tuple[Evidence, ...]:
    """The numbers with the largest product of doubt and gain, largest first."""
    found = [
        Evidence(*_number(prepared, key), gain.tpot)
        for gain in gains
        if gain.tpot >= WORTH_NAMING
        for key in _NUMBERS[gain.part]
    ]
    return tuple(sorted(found, key=lambda one: -one.gain * _DOUBT[one.confidence])[:SHOWN])


def _number(prepared: Prepared, key: str) -> tuple[str, float, str, str]:
    """Name, value, source and confidence of a machine's number, or of the one that replaces it in an engine."""
    hardware = prepared.hardware
    engine = load_engine(prepared.scenario.engine)
    if (name := _IN_GRAPHS.get(key)) and name in engine.flat():
        return f"{engine.name}: {name}", *engine.flat()[name]
    return key, *hardware.numbers()[key]
