"""Parts of a machine made better, one at a time: the numbers of each part, and what an answer gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sim.costs.cost_table import LAUNCHES
from sim.machine.dials import DIALS, scaled_numbers
from sim.machine.hardware import Hardware

BETTER = 1.25
WORTH_NAMING = 0.02  # the least gain that matters
LIMITING = 0.05  # the least gain of a limit: of a part that takes a quarter of the time
_NEARLY = 0.999


@dataclass(frozen=True)
class ScaledPart:
    """A part of a machine, and the numbers that grow with its quality (``keys``) or shrink (``shrinking``).

    ``tables``: times of experts that shrink, where a measured profile has tables in place of such numbers. ``program``:
    times of the host program that shrink. ``steers``: whether the policy's copies depend on it. ``short``: its owner in
    few letters, where engines are limited by it.
    """

    name: str
    owner: str  # in words
    keys: tuple[str, ...] = ()
    shrinking: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    steers: bool = False
    short: str = ""


_READ, _CEILING = "cpu.read_bytes_per_s", "cpu.read_ceiling_bytes_per_s"
CPU_READS = "CPU reads"  # a part where they are the limit, and faster memory would not be read faster
PARTS = (
    ScaledPart("PCIe", "the link", DIALS["pcie_gbps"].keys, tables=("copy_ns",), steers=True, short="PCIe"),
    ScaledPart("DRAM", "the CPU's memory bandwidth", DIALS["dram_gbps"].keys, tables=("cpu_ns", "first_cpu_ns"),
               steers=True, short="RAM GB/s"),
    ScaledPart(CPU_READS, "what the CPU reads of any memory", (_READ, _CEILING), steers=True, short="CPU GB/s"),
    ScaledPart("CPU compute", "the CPU's arithmetic", DIALS["cpu_gflops"].keys, steers=True),
    ScaledPart("GPU bandwidth", "the GPU's memory bandwidth", DIALS["gpu_gbps"].keys, tables=("gpu_ns",),
               short="GPU GB/s"),
    ScaledPart("GPU compute", "the GPU's arithmetic", DIALS["gpu_tflops"].keys, short="GPU flops"),
    ScaledPart("GPU memory", "the size of the GPU's memory", ("gpu.memory_bytes",), steers=True, short="GPU GB"),
    ScaledPart("GPU kernels", "the fixed time of every kernel on the GPU", shrinking=("gpu.kernel_ns",)),
    ScaledPart("kernel launches", "the host program, which launches kernels", program=(*LAUNCHES, "lead_ns")),
    ScaledPart("synchronisation", "the host program, which waits for the GPU", program=("sync_ns",)),
    ScaledPart("decisions", "the host program, which decides", program=("plan_factor",)),
)
CPU_CORES = ScaledPart("CPU cores", "the CPU's cores", ("cpu.cores",), short="CPU cores")  # of engines alone
HOST_MEMORY = ScaledPart("host memory", "the size of the host's memory", short="RAM GB")  # where a disk is read
DISK = ScaledPart("disk", "the disk's rate", ("disk.alone_bytes_per_s", "disk.ceiling_bytes_per_s"), steers=True,
                  short="disk")


@dataclass(frozen=True)
class Gain:
    """Gain of a part 25 % better: old TPOT over new TPOT, minus 1."""

    part: str
    owner: str
    tpot: float


G = TypeVar("G", bound=Gain)


def reads_all_it_can(hardware: Hardware) -> bool:
    """True if the CPU itself, rather than its memory, limits what it reads."""
    ceiling = hardware.cpu.read_ceiling_bytes_per_s
    return ceiling is not None and hardware.cpu.read_bytes_per_s >= _NEARLY * ceiling


def better_numbers(hardware: Hardware, keys: Iterable[str]) -> dict[str, float]:
    """Numbers of a machine 25 % better, by dotted key. Of faster memory the CPU reads no more than it can."""
    numbers = scaled_numbers(hardware, keys, BETTER)
    most = numbers.get(_CEILING, hardware.cpu.read_ceiling_bytes_per_s)
    if _READ in numbers and most is not None:
        numbers[_READ] = min(numbers[_READ], max(most, hardware.cpu.read_bytes_per_s))
    return numbers


def ranked(gains: Iterable[G]) -> tuple[G, ...]:
    """Gains, largest first."""
    return tuple(sorted(gains, key=lambda one: -one.tpot))


_LIMITING_PARTS = (*PARTS, CPU_CORES, HOST_MEMORY, DISK)


def in_short(part: str | None) -> str:
    """The owner of a part in few letters; nothing for no part."""
    return next((one.short for one in _LIMITING_PARTS if one.name == part), part or "")


def owner_of(part: str | None) -> str:
    """The owner of a part in words; nothing for no part."""
    return next((one.owner for one in _LIMITING_PARTS if one.name == part), "")


def limiting_part(gains: Sequence[Gain]) -> str | None:
    """Name of the part that limits an answer, of ranked gains; None if no part does by itself, or none is known."""
    return gains[0].part if gains and gains[0].tpot >= LIMITING else None
