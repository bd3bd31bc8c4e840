"""How far to trust an answer: the weakest numbers that it depends on most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.costs.runtimes import graph_numbers
from trilane.study.fit.asked import Asked
from trilane.study.fit.sensitivity import PARTS, WORTH_NAMING, Gain

SHOWN = 5
_DOUBT = {"high": 0.1, "medium": 0.5, "low": 1.0}  # by confidence, for the order alone
_TOLD_BY = {  # the numbers that a part's effect rests on
    "PCIe": ("link.h2d_bytes_per_s",),
    "DRAM": ("cpu.read_bytes_per_s",),
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
assert set(_TOLD_BY) == {part.name for part in PARTS}


@dataclass(frozen=True)
class Support:
    """A number that an answer rests on. ``gain``: of TPOT, if its part is a quarter better."""

    key: str
    value: float
    source: str
    confidence: str
    gain: float


def supports_of(asked: Asked, gains: Sequence[Gain]) -> tuple[Support, ...]:
    """The numbers whose weakness times weight is largest."""
    found = [
        Support(*_number(asked, key), gain.tpot)
        for gain in gains
        if gain.tpot >= WORTH_NAMING
        for key in _TOLD_BY[gain.part]
    ]
    return tuple(sorted(found, key=lambda one: -one.gain * _DOUBT[one.confidence])[:SHOWN])


def _number(asked: Asked, key: str) -> tuple[str, float, str, str]:
    """The number under a key, or that which a runtime has in its place: name, value, source, confidence."""
    hardware = asked.setting.hardware
    if asked.question.runtime == "graphs" and not hardware.measured and key in _IN_GRAPHS:
        name = _IN_GRAPHS[key]
        return f"graphs: {name}", *getattr(graph_numbers(), name)
    return key, hardware.flat()[key], *hardware.origins[key]
