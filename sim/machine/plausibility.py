"""Physical limits of a machine's numbers, which reveal mistyped units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from trilane.common.errors import TrilaneError

TOLERANCE = 1.001  # rates derived from printed times carry rounding


class HardwareError(TrilaneError):
    """A hardware description that cannot be loaded or cannot exist. The message names key, value and what to do."""


class Limit(NamedTuple):
    """The range of a number: ``low`` <= value <= ``high``, in ``unit``; or 0 if ``zero``, meaning "no such cost"."""

    low: float
    high: float
    unit: str
    why: str
    zero: bool = False


_SLIPS: Mapping[str, tuple[tuple[float, str], ...]] = {  # unit -> (factor to the right unit, what was probably typed)
    "bytes/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e12, "TB/s")),
    "bytes": ((1e9, "GB"), (1e6, "MB")),
    "flop/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")),
    "op/s": ((1e12, "TOP/s"), (1e9, "GOP/s")),
    "ns": ((1e3, "us"), (1e6, "ms"), (1e9, "s")),
    "fraction": ((1e-2, "percent"), (1e-3, "permille")),
    "permille": ((1e3, "a fraction"), (10.0, "percent")),
}

LIMITS: Mapping[str, Limit] = {
    "gpu.memory_bytes": Limit(1e6, 1e12, "bytes", "no GPU has 1 TB; small budgets are for small models"),
    "gpu.bandwidth_bytes_per_s": Limit(5e10, 1e13, "bytes/s", "no GPU memory reads faster than 10 TB/s"),
    "gpu.bandwidth_fraction": Limit(0.05, 1.0, "fraction", "of the data sheet; 0.25 to 0.96 is seen"),
    "gpu.flops_per_s": Limit(1e12, 1e16, "flop/s", "dense 16-bit matrix rate, without sparsity"),
    "gpu.integer_ops_per_s": Limit(1e12, 1e17, "op/s", "dense 8-bit rate; 1 to 4 times that of 16 bits"),
    "gpu.flops_fraction": Limit(0.05, 1.2, "fraction", "of the data sheet; boost clocks reach 1.15"),
    "gpu.kernel_ns": Limit(100, 1e6, "ns", "the smallest kernel takes about 2 us"),
    "gpu.reserve_bytes": Limit(1e6, 1e11, "bytes", "a CUDA context alone takes about 0.5 GB", zero=True),
    "cpu.cores": Limit(1, 1024, "cores", "physical cores that compute experts"),
    "cpu.sockets": Limit(1, 8, "sockets", "processor packages whose memory is read"),
    "cpu.dram_bytes_per_s": Limit(5e9, 8e12, "bytes/s", "channels x MT/s x 8 bytes, all sockets"),
    "cpu.read_bytes_per_s": Limit(1e8, 8e12, "bytes/s", "what an expert GEMV reads, all sockets"),
    "cpu.read_ceiling_bytes_per_s": Limit(1e8, 1e14, "bytes/s", "what its cores read of any memory, all sockets"),
    "cpu.flops_per_s": Limit(1e10, 2e14, "flop/s", "AVX2 desktops give about 1, AMX servers about 30 TFLOP/s"),
    "cpu.clock_hz": Limit(1e8, 1e10, "hertz", "1 to 6 GHz with all cores at work"),
    "cpu.vector_bits": Limit(32, 4096, "bits", "256 to 1024, all vector units of a core"),
    "cpu.efficiency_cores": Limit(0, 1024, "cores", "slow ones among the cores", zero=True),
    "cpu.ram_bytes": Limit(1e9, 1e14, "bytes", "the memory of the whole machine"),
    "cpu.first_expert_ns": Limit(100, 1e7, "ns", "wake-up of the threads", zero=True),
    "link.theory_bytes_per_s": Limit(2e8, 4.6e11, "bytes/s", "one way; PCIe 1.0 x1 0.25 GB/s, NVLink-C2C 450 GB/s"),
    "link.h2d_bytes_per_s": Limit(1e8, 4.6e11, "bytes/s", "PCIe 4.0 x16 gives 25 GB/s, PCIe 5.0 x16 55 GB/s"),
    "link.d2h_bytes_per_s": Limit(1e8, 4.6e11, "bytes/s", "PCIe 4.0 x16 gives 25 GB/s, PCIe 5.0 x16 55 GB/s"),
    "link.pageable_fraction": Limit(0.02, 1.0, "fraction", "of the pinned rate; 0.35 to 0.75 is seen"),
    "link.both_ways_share": Limit(0.02, 1.0, "fraction", "of each rate while both ways are busy; 0.5 to 1 is seen"),
    "link.h2d_latency_ns": Limit(100, 1e7, "ns", "3 to 20 us is seen, nothing above 10 ms"),
    "link.d2h_latency_ns": Limit(100, 1e7, "ns", "3 to 40 us is seen, nothing above 10 ms"),
    "host.launch_ns": Limit(100, 1e7, "ns", "2.5 us from CUDA, 5 to 25 us from eager PyTorch", zero=True),
    "host.sync_ns": Limit(100, 1e7, "ns", "6 to 100 us is seen, nothing above 10 ms", zero=True),
    "host.plan_factor": Limit(0.01, 1000, "factor", "this host's planning time over the table's", zero=True),
    "contention.cpu_permille": Limit(1, 1000, "permille", "1000: copies do not slow the CPU; 660 to 1000 is seen"),
    "contention.copy_permille": Limit(1, 1000, "permille", "1000: the CPU does not slow copies; 590 to 960 is seen"),
    "disk.latency_ns": Limit(1e3, 1e9, "ns", "77 us to 15 ms is seen"),
    "disk.alone_bytes_per_s": Limit(1e6, 1e11, "bytes/s", "one read at a time; 0.1 to 18 GB/s is seen"),
    "disk.ceiling_bytes_per_s": Limit(1e6, 1e11, "bytes/s", "many reads at a time; 0.1 to 18 GB/s is seen"),
    "disk.request_bytes": Limit(512, 1e9, "bytes", "of one read; 4 KiB to 19 MB is seen"),
    "disk.drives": Limit(1, 64, "drives", "of a stripe; 1 to 4 is usual"),
    "disk.depth": Limit(1, 4096, "requests", "reads at a time; 1 to 128 is seen"),
    "power.gpu_idle_w": Limit(1, 500, "watts", "8 to 110 W is seen", zero=True),
    "power.gpu_busy_w": Limit(5, 2000, "watts", "the board's power limit at most"),
    "power.cpu_idle_w": Limit(1, 1000, "watts", "package power, all sockets", zero=True),
    "power.cpu_busy_w": Limit(5, 4000, "watts", "package power, all sockets"),
    "power.platform_w": Limit(1, 2000, "watts", "memory, board, fans and the supply's losses", zero=True),
}

HOST_LANES: Mapping[str, Limit] = {  # a processor core stands in for the GPU, and a paced memory copy for the link
    "gpu.bandwidth_bytes_per_s": Limit(1e8, 1e12, "bytes/s", "one core reads 2 to 50 GB/s, more from its cache"),
    "gpu.flops_per_s": Limit(1e8, 1e13, "flop/s", "one core gives 0.005 to 1 TFLOP/s"),
    "cpu.flops_per_s": Limit(1e8, 2e14, "flop/s", "16-bit products are slow where the processor lacks them"),
    "link.theory_bytes_per_s": Limit(1e7, 4.6e11, "bytes/s", "what the copy is paced to"),
    "link.h2d_bytes_per_s": Limit(1e7, 4.6e11, "bytes/s", "what the copy is paced to, or less"),
    "link.d2h_bytes_per_s": Limit(1e7, 4.6e11, "bytes/s", "a plain memory copy"),
}  # replace those of LIMITS

_WITH_THE_GPU = Limit(1, 4000, "watts", "0 where it is counted with the GPU", zero=True)
ONE_MEMORY: Mapping[str, Limit] = {  # the GPU reads the host's memory, or is the CPU
    "gpu.memory_bytes": LIMITS["cpu.ram_bytes"],
    "gpu.bandwidth_bytes_per_s": LIMITS["cpu.dram_bytes_per_s"],
    "gpu.flops_per_s": LIMITS["cpu.flops_per_s"],
    **{f"link.{rate}_bytes_per_s": LIMITS["cpu.dram_bytes_per_s"] for rate in ("theory", "h2d", "d2h")},
    **{f"power.cpu_{load}_w": _WITH_THE_GPU for load in ("idle", "busy")},
}  # replace those of LIMITS
_OF_KIND = {"host-lanes": HOST_LANES, "unified": ONE_MEMORY, "cpu": ONE_MEMORY}

_NOT_ABOVE = (  # (smaller key, larger key, what the larger one is)
    ("cpu.read_bytes_per_s", "cpu.dram_bytes_per_s", "what the memory channels can carry"),
    ("link.h2d_bytes_per_s", "link.theory_bytes_per_s", "what the link can carry in one direction"),
    ("link.d2h_bytes_per_s", "link.theory_bytes_per_s", "what the link can carry in one direction"),
    ("gpu.reserve_bytes", "gpu.memory_bytes", "the whole GPU memory"),
    ("power.gpu_idle_w", "power.gpu_busy_w", "the busy power"),
    ("power.cpu_idle_w", "power.cpu_busy_w", "the busy power"),
)
_UNBOUND_ON_HOST_LANES = "link.d2h_bytes_per_s"  # only copies to the GPU are paced there; back it is a plain copy
DRAM_BYTES_PER_SOCKET = 1e12


def check_plausible(values: Mapping[str, object], where: str, kind: str | None = None) -> None:
    """Refuse numbers that no machine has.

    ``values`` maps dotted keys (``link.h2d_bytes_per_s``) to numbers; keys without a limit, and text, are ignored, so
    a measured profile can pass some of them. ``where`` names the preset or profile in the message. ``kind``: of a
    measured machine or of a GPU; those of ``_OF_KIND`` have ranges of their own.
    Raises HardwareError naming key, value, permitted range and, where the value fits another unit, that unit.
    """
    limits = limits_of(kind)
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and key in limits}
    for key, value in numbers.items():
        _check_range(key, value, limits[key], where)
    for small, large, meaning in _NOT_ABOVE:
        if kind == "host-lanes" and small == _UNBOUND_ON_HOST_LANES:
            continue
        if small in numbers and large in numbers and numbers[small] > numbers[large] * TOLERANCE:
            raise HardwareError(
                f"{where}: {small} = {numbers[small]:g} exceeds {large} = {numbers[large]:g}, {meaning}; "
                f"correct one of the two"
            )
    _check_sockets(numbers, where)


def limits_of(kind: str | None) -> Mapping[str, Limit]:
    """The limit of every number, by dotted key, of a kind of machine or GPU."""
    return {**LIMITS, **_OF_KIND.get(kind or "", {})}


def _check_range(key: str, value: float, limit: Limit, where: str) -> None:
    """Check one number against its limit. Raises HardwareError."""
    if (limit.zero and value == 0) or (math.isfinite(value) and limit.low <= value <= limit.high):
        return
    zero = "0 or " if limit.zero else ""
    raise HardwareError(
        f"{where}: {key} = {value:g} is outside {zero}{limit.low:g}..{limit.high:g} {limit.unit} "
        f"({limit.why}){_slip(value, limit)}"
    )


def _slip(value: float, limit: Limit) -> str:
    """A hint if ``value`` would be in range once read in another unit, else nothing."""
    for factor, typed in _SLIPS.get(limit.unit, ()):
        if limit.low <= value * factor <= limit.high:
            return f"; it looks like {typed} typed as {limit.unit}: write {value * factor:g}"
    return ""


def _check_sockets(numbers: Mapping[str, float], where: str) -> None:
    """Check the DRAM bandwidth of one socket. Raises HardwareError."""
    rate = numbers.get("cpu.dram_bytes_per_s", 0.0) / numbers.get("cpu.sockets", 1)
    if rate > DRAM_BYTES_PER_SOCKET:
        raise HardwareError(
            f"{where}: cpu.dram_bytes_per_s is {rate:g} a socket, above {DRAM_BYTES_PER_SOCKET:g} bytes/s "
            f"(12 channels of DDR5-8800 carry 0.84 TB/s); check the figure and cpu.sockets"
        )
