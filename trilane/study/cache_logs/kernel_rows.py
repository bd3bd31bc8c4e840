"""Timed copies, products on a GPU and experts on a CPU, by bytes: how near a machine's parts come to them.

=====  ================================================================
copy   calls x the link's latency + bytes / its rate
gpu    calls x a kernel's fixed time + bytes / the rate of weights of so many bits
cpu    bytes / the rate of weights of so many bits
=====  ================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import read_fraction
from trilane.common.csv_files import read_csv
from trilane.common.hints import Count, Name, above, at_most, between
from trilane.study.cache_logs.rows import LogError

KERNELS = Path(__file__).with_name("kernels.csv")
Part = Literal["copy", "gpu", "cpu"]
_NS_PER_S, _US = 1e9, 1e-3  # us of a ns
_Positive = Annotated[float, above(0), at_most(1e15)]


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """``calls`` one after the other that move or read ``bytes`` in all, of weights of ``bits``; their measured time."""

    id: Name
    machine: Name
    part: Part
    bytes: _Positive
    us: _Positive
    calls: Count = 1
    bits: Annotated[float, between(1, 64)] = 16.0
    source: str = ""


def read_kernels(path: str | Path = KERNELS) -> list[KernelRow]:
    """The rows of a CSV file. Raises LogError."""
    return read_csv(KernelRow, path, "a CSV file of timed copies and kernels", LogError)


def predicted_us(row: KernelRow) -> float:
    """The row's time by the parts of its machine. Raises HardwareError."""
    return _TIMES[row.part](row, load_hardware(row.machine)) * _US


def errors_by_part(rows: Sequence[KernelRow]) -> dict[Part, list[float]]:
    """Predicted over measured, minus 1, of each part that has rows. Raises HardwareError."""
    errors: dict[Part, list[float]] = {}
    for row in rows:
        errors.setdefault(row.part, []).append(predicted_us(row) / row.us - 1)
    return errors


def _copy_ns(row: KernelRow, machine: Hardware) -> float:
    return row.calls * machine.link.h2d_latency_ns + row.bytes / machine.link.h2d_bytes_per_s * _NS_PER_S


def _gpu_ns(row: KernelRow, machine: Hardware) -> float:
    rate = machine.gpu.read_bytes_per_s * read_fraction("gpu", row.bits)
    return row.calls * machine.gpu.kernel_ns + row.bytes / rate * _NS_PER_S


def _cpu_ns(row: KernelRow, machine: Hardware) -> float:
    return row.bytes / (machine.cpu.read_bytes_per_s * read_fraction("cpu", row.bits)) * _NS_PER_S


_TIMES: Mapping[Part, Callable[[KernelRow, Hardware], float]] = {"copy": _copy_ns, "gpu": _gpu_ns, "cpu": _cpu_ns}
