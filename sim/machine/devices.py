"""The devices of a machine, as numbers: GPU, CPU, link and host, what they cost each other, and their power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.machine.disks import rate_of_reads
from sim.machine.parts import Instructions, Launches, Vendor

ResultPath = Literal["direct", "h2d"]
GpuKind = Literal["unified", "cpu"]


@dataclass(frozen=True)
class Gpu:
    """One GPU. Times follow max(bytes / bandwidth, flops / rate) + kernels x ``kernel_ns``.

    ``kind``: "unified" reads the host's memory, "cpu" is the CPU in place of a GPU; None has its own memory.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float  # data sheet
    bandwidth_fraction: float  # of it, reached by memory-bound kernels
    flops_per_s: float  # data sheet, dense 16-bit with 32-bit accumulation
    flops_fraction: float  # of it, reached by expert-sized matrix products
    kernel_ns: int  # device time that every kernel costs in addition to its bytes and flops
    reserve_bytes: int  # kept free: context, workspace, fragmentation
    integer_ops_per_s: float | None = None  # data sheet, dense 8-bit; None: twice ``flops_per_s``
    vendor: Vendor | None = None
    kind: GpuKind | None = None
    launches: Launches | None = None  # "single": engines start its kernels one by one, and record no graphs

    @property
    def read_bytes_per_s(self) -> float:
        """Effective memory bandwidth."""
        return self.bandwidth_bytes_per_s * self.bandwidth_fraction

    @property
    def effective_flops_per_s(self) -> float:
        """Effective 16-bit matrix rate."""
        return self.flops_per_s * self.flops_fraction


@dataclass(frozen=True)
class Cpu:
    """The processor cores that compute experts, all sockets together."""

    name: str
    sockets: int
    cores: int  # in use, not all that there are
    dram_bytes_per_s: float  # theory: channels x transfers/s x 8
    read_bytes_per_s: float  # effective, by an expert's matrix-vector product
    flops_per_s: float  # effective, by an expert's matrix-matrix product
    first_expert_ns: int  # extra time of the first CPU expert of a layer
    ram_bytes: int | None = None  # host memory; None: unknown
    read_ceiling_bytes_per_s: float | None = None  # of ``read_bytes_per_s``, whatever the memory; None: unknown
    clock_hz: float | None = None  # with all cores at work; None: unknown
    instructions: Instructions | None = None  # that multiply vectors; None: AVX2
    vector_bits: int | None = None  # that a core computes in a cycle; None: as most do
    efficiency_cores: int | None = None  # slow ones among ``cores``; None: none

    @property
    def fast_cores(self) -> int:
        """Cores that are not slow ones."""
        return self.cores - (self.efficiency_cores or 0)


@dataclass(frozen=True)
class HostLink:
    """Host to device and back. A copy takes latency + bytes / rate; copies of one direction queue.

    While both directions are busy, each runs at ``both_ways_share`` of its rate; 1.0 where that is not stated.
    """

    theory_bytes_per_s: float  # one direction, after line coding
    h2d_bytes_per_s: float  # large copies from pinned memory
    h2d_latency_ns: int
    d2h_bytes_per_s: float
    d2h_latency_ns: int
    copies: Literal["pinned", "pageable"]  # host memory from which experts are copied
    pageable_fraction: float  # of ``h2d_bytes_per_s``, reached from pageable memory
    result_path: ResultPath  # CPU results: read in place by the GPU, or queued on h2d behind expert copies
    both_ways_share: float = 1.0

    @property
    def expert_bytes_per_s(self) -> float:
        """Rate at which experts are copied to the GPU; activations always travel through pinned buffers."""
        return self.h2d_bytes_per_s * (self.pageable_fraction if self.copies == "pageable" else 1.0)

    def h2d_ns(self, size: int) -> int:
        """Time of a copy of ``size`` bytes from pinned memory to the GPU: whole ns, at least 1."""
        return max(int(self.h2d_latency_ns + size / self.h2d_bytes_per_s * 1e9 + 0.5), 1)

    def expert_ns(self, size: float) -> int:
        """Time of a copy of an expert's weights, which may come from pageable memory: whole ns, at least 1."""
        return max(int(self.h2d_latency_ns + size / self.expert_bytes_per_s * 1e9 + 0.5), 1)

    def d2h_ns(self, size: float) -> int:
        """Time of a copy back to the host: whole ns, at least 1."""
        return max(int(self.d2h_latency_ns + size / self.d2h_bytes_per_s * 1e9 + 0.5), 1)


@dataclass(frozen=True)
class Drive:
    """A disk that holds the experts, where the host's memory has no room for all of them.

    A read of s bytes that is alone takes ``latency_ns`` + s / ``alone_bytes_per_s``. ``request_bytes`` of one request,
    ``depth`` at once; None: as the kind of the host's memory asks for them (``sim.costs.disk_costs``).
    ``drives``: over which the bytes are striped.
    """

    name: str
    latency_ns: float
    alone_bytes_per_s: float
    ceiling_bytes_per_s: float  # of however many at once
    request_bytes: int | None = None
    depth: int | None = None
    drives: int = 1

    def bytes_per_s(self, size: float, depth: float) -> float:
        """Rate of reads of ``size`` bytes, ``depth`` at a time."""
        alone = self.latency_ns, self.alone_bytes_per_s
        return rate_of_reads(*alone, self.ceiling_bytes_per_s, size, depth, self.drives)


@dataclass(frozen=True)
class Host:
    """The thread that launches, waits and plans."""

    launch_ns: int  # per kernel
    sync_ns: int  # per layer: from "the gate is done" on the GPU to "the routing is readable" in the program
    plan_factor: float  # planning time here over that of the plan cost table


@dataclass(frozen=True)
class Contention:
    """Rates while CPU experts and a copy run at the same time, in permille of the rate alone."""

    cpu_permille: int
    copy_permille: int


@dataclass(frozen=True)
class Power:
    """Watts of each device, idle and busy, and of all the rest."""

    gpu_idle_w: float
    gpu_busy_w: float
    cpu_idle_w: float
    cpu_busy_w: float
    platform_w: float | None = None  # memory, board, fans, and what the supply loses; None: left out


@dataclass(frozen=True, kw_only=True)
class Devices:
    """All numbers of a machine, one section for each device; hardware files have the same sections."""

    gpu: Gpu
    cpu: Cpu
    link: HostLink
    host: Host
    contention: Contention
    power: Power | None = None
    disk: Drive | None = None
