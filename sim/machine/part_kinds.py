"""The parts that machines are assembled from: GPUs, memories, CPUs, and the rules that fill the gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced

Number = Sourced[Any]
Numbers = Mapping[str, Number]
Vendor = Literal["nvidia", "amd", "intel", "apple"]
Launches = Literal["single"]
PartKind = Literal["gpu", "memory", "cpu"]


@dataclass(frozen=True, kw_only=True)
class MachinePart:
    """One part. ``notes``: caveats for readers of results."""

    kind: ClassVar[PartKind]

    name: str
    title: str
    notes: tuple[str, ...] = ()

    @property
    def numbers(self) -> Numbers:
        """Every number that the part states."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Sourced)}


@dataclass(frozen=True, kw_only=True)
class GpuPart(MachinePart):
    """A GPU: a ``CardPart`` or a ``UnifiedPart``."""

    kind = "gpu"

    memory_bytes: Sourced[int]
    bandwidth_bytes_per_s: Sourced[float]
    flops_per_s: Sourced[float]
    board_power_w: Sourced[float]
    idle_power_w: Sourced[float]
    bandwidth_fraction: Sourced[float] | None = None
    flops_fraction: Sourced[float] | None = None
    kernel_ns: Sourced[int] | None = None
    reserve_bytes: Sourced[int] | None = None
    busy_power_w: Sourced[float] | None = None
    integer_ops_per_s: Sourced[float] | None = None
    vendor: Sourced[Vendor] | None = None
    launches: Sourced[Launches] | None = None


@dataclass(frozen=True, kw_only=True)
class CardPart(GpuPart):
    """A graphics card, with its own memory."""

    pcie_generation: Sourced[int]
    pcie_lanes: Sourced[int]


@dataclass(frozen=True, kw_only=True)
class UnifiedPart(GpuPart):
    """A GPU that reads the memory of the host, and comes with it: ``memory`` and ``cpu`` are parts of their kinds."""

    memory: str
    cpu: str


@dataclass(frozen=True, kw_only=True)
class MemoryPart(MachinePart):
    """A kind of memory modules, and the board that usually has it."""

    kind = "memory"

    cpu: str  # the generic CPU that such a memory usually has
    transfers_per_s: Sourced[float]
    channels: Sourced[int]
    pcie_generation: Sourced[int]

    @property
    def family(self) -> str:
        """Its kind without the speed: ``ddr5``."""
        return self.name.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class CpuPart(MachinePart):
    """A processor. What a generic one, or a family, may be given: ``most_cores``, ``most_channels``."""

    kind = "cpu"

    memory: tuple[str, ...]  # families that it takes
    server: bool
    cores: Sourced[int]
    read_fraction: Sourced[float]
    busy_power_w: Sourced[float]
    idle_power_w: Sourced[float]
    channels: Sourced[int] | None = None
    pcie_generation: Sourced[int] | None = None
    read_ceiling_bytes_per_s: Sourced[float] | None = None
    core_read_bytes_per_s: Sourced[float] | None = None  # of one core alone
    expert_fraction: Sourced[float] | None = None
    expert_bits: Sourced[float] | None = None  # of the weights that ``expert_fraction`` was measured with
    flops_per_s: Sourced[float] | None = None
    most_cores: Sourced[int] | None = None
    most_channels: Sourced[int] | None = None

    def __post_init__(self) -> None:
        if (self.expert_fraction is None) != (self.expert_bits is None):
            raise HardwareError("expert_fraction and expert_bits: expected both or neither")


class CpuRules(NamedTuple):
    """Numbers of a CPU whose part does not state them."""

    expert_fraction: Sourced[float]
    expert_bits: Sourced[float]
    core_read_bytes_per_s: Sourced[float]
    server_core_read_bytes_per_s: Sourced[float]
    odd_channels_fraction: Sourced[float]
    flops_per_core: Sourced[float]
    first_expert_ns: Sourced[int]
    two_sockets_read: Sourced[float]


class BoxRates(NamedTuple):
    """A computer on which CPU experts and copies were measured at the same time."""

    read_bytes_per_s: Sourced[float]
    cpu_permille: Sourced[float]
    copy_permille: Sourced[float]


class Rules(NamedTuple):
    """What holds where no part states otherwise. ``gpu``, ``link``, ``host``: numbers of these sections of a machine.

    ``pcie``: rates of the link by generation, with sixteen lanes, in one direction. ``one_memory``: by section, of
    machines whose GPU reads the host's memory, or that have none. ``no_gpu``: of the latter's section ``gpu``.
    """

    gpu: Numbers
    cpu: CpuRules
    link: Numbers
    host: Numbers
    pcie: Mapping[int, Numbers]
    contention: Mapping[str, BoxRates]
    one_memory: Mapping[str, Numbers]
    no_gpu: Numbers
    notes: tuple[str, ...]
