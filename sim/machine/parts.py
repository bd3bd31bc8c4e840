"""Parts that machines are assembled from, by name: GPUs, memories, CPUs; and the rules that fill the gaps.

The catalogue is the files of ``sim/machine/presets/parts``, in which every number states its source, as in a preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, overload

import numpy as np

from sim.machine.part_names import KnownPart, PartKind, UnknownPartError, letters_and_digits, resolved
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Confidence, Sourced, read_file
from trilane.common.hints import above, at_most
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

Number = Sourced[Any]
Numbers = Mapping[str, Number]
Vendor = Literal["nvidia", "amd", "intel", "apple"]
Launches = Literal["single"]
Form = Literal["card", "laptop", "module", "server"]
Instructions = Literal["neon", "avx2", "avx512", "amx"]  # avx512: with dot products of 8 bits, as amx has, too
Processor = Literal["cpu", "gpu"]
_CARD: Sourced[Form] = Sourced("card", "its data sheet", "high")


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
    released: Sourced[int] | None = None  # year


@dataclass(frozen=True, kw_only=True)
class CardPart(GpuPart):
    """A GPU with its own memory. ``form``: a card, a laptop's chip, a module of a server's board (SXM), or a card
    without a fan, which only a server cools."""

    pcie_generation: Sourced[int]
    pcie_lanes: Sourced[int]
    form: Sourced[Form] = _CARD


@dataclass(frozen=True, kw_only=True)
class UnifiedPart(GpuPart):
    """A GPU that reads the memory of the host, and comes with it: ``memory`` and ``cpu`` are parts of their kinds.
    ``windows_share``: of the memory, that Windows gives the GPU at most."""

    memory: str
    cpu: str
    windows_share: Sourced[float] | None = None


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

    @property
    def modules(self) -> Modules | None:
        """The modules that it is sold in; None if it is soldered."""
        return rules().modules.get(f"{self.family}{'-ecc' * self.name.endswith('-ecc')}")


class Modules(NamedTuple):
    """Modules of a kind of memory: GiB of one, rising, and the slots of a channel."""

    gib: Sourced[tuple[int, ...]]
    slots: Sourced[int]


@dataclass(frozen=True, kw_only=True)
class CpuPart(MachinePart):
    """A processor. ``most_cores``, ``most_channels``: limits of a generic one, or of a family. ``socket``: None of a
    generic one, "soldered" of a laptop's."""

    kind = "cpu"

    memory: tuple[str, ...]  # families that it takes
    server: bool
    cores: Sourced[int]
    clock_hz: Sourced[float]  # with all cores at work
    instructions: Sourced[Instructions]
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
    efficiency_cores: Sourced[int] | None = None  # slow ones among ``cores``
    vector_bits: Sourced[int] | None = None  # that a core computes in a cycle; None: 512, two registers of AVX2
    most_cores: Sourced[int] | None = None
    most_channels: Sourced[int] | None = None
    socket: Sourced[str] | None = None
    released: Sourced[int] | None = None  # year

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
    """Numbers where no part states otherwise. ``gpu``, ``link``, ``host``: of these sections of a machine.

    ``pcie``: rates of the link by generation, with sixteen lanes, in one direction. ``one_memory``: by section, of
    machines whose GPU reads the host's memory, or that have none. ``no_gpu``: of the latter's section ``gpu``.
    ``macos_shares``: of a unified memory, that macOS gives the GPU at most, by GiB of memory from which on.
    """

    gpu: Numbers
    cpu: CpuRules
    link: Numbers
    host: Numbers
    pcie: Mapping[int, Numbers]
    contention: Mapping[str, BoxRates]
    one_memory: Mapping[str, Numbers]
    no_gpu: Numbers
    modules: Mapping[str, Modules]
    macos_shares: Mapping[int, Sourced[float]]


# --- the catalogue ----------------------------------------------------------------------------------------------------

_FOLDER = Path(str(files("sim.machine"))) / "presets" / "parts"
_FILES: Mapping[PartKind, Mapping[str, type[MachinePart]]] = {
    "gpu": {"gpus.yaml": CardPart, "unified.yaml": UnifiedPart},
    "memory": {"memories.yaml": MemoryPart},
    "cpu": {"cpus.yaml": CpuPart},
}
GENERIC_CPUS = ("desktop", "laptop", "server")
_EXAMPLES: Mapping[PartKind, str] = {"gpu": "rtx-4080", "memory": "ddr5-5600", "cpu": "ryzen-9-7950x"}


@cache
def rules() -> Rules:
    """The rules of ``rules.yaml``. Raises HardwareError for a faulty file."""
    read: Rules = read_file(Rules, _FOLDER / "rules.yaml")
    return read


def gpu_names() -> list[str]:
    """Names of the graphics cards, in the order of the file: by generation."""
    return [name for name, entry in _entries("gpu").items() if entry.form is CardPart]


def unified_names() -> list[str]:
    """Names of the GPUs that read the host's memory."""
    return [name for name, entry in _entries("gpu").items() if entry.form is UnifiedPart]


def cpu_names() -> list[str]:
    """Names of the CPUs; ``desktop``, ``laptop`` and ``server`` are generic ones."""
    return list(_entries("cpu"))


def all_parts() -> list[MachinePart]:
    """Every part of the catalogue: GPUs, memories, CPUs."""
    return [_part(kind, name) for kind in _FILES for name in _entries(kind)]


class TakenName(NamedTuple):
    """The part that a name was taken for. ``described``: its name, and what tells it from parts of the same words."""

    kind: PartKind
    given: str
    name: str
    described: str

    @property
    def exact(self) -> bool:
        """True if the name is the catalogue's, but for capitals, spaces, hyphens and underscores."""
        return letters_and_digits(self.given) == letters_and_digits(self.name)


def kind_of(name: str) -> PartKind | None:
    """The kind of the part with this name, if there is one."""
    kinds = (kind for kind in _FILES if letters_and_digits(name) in _written(kind))
    return next(kinds, None) or next((kind for kind in _FILES if _is_name(kind, name)), None)


def is_unified(gpu: str | None) -> bool:
    """True for the name of a GPU that reads the host's memory."""
    return gpu is not None and _is_name("gpu", gpu) and taken("gpu", gpu).name in unified_names()


def _is_name(kind: PartKind, name: str) -> bool:
    try:
        return bool(taken(kind, name))
    except HardwareError:
        return False


@cache
def taken(kind: PartKind, name: str, memory_bytes: int | None = None, gpu_cores: int | None = None) -> TakenName:
    """The part that a name means: "RTX 3060", rtx3060 and "NVIDIA GeForce RTX 3060" are rtx-3060.

    ``memory_bytes`` and ``gpu_cores``: as a driver reports them. Raises HardwareError (see ``part``).
    """
    if memory_bytes is None and gpu_cores is None and (written := _written(kind).get(letters_and_digits(name))):
        return TakenName(kind, name, written, written)
    try:
        one = resolved(kind, name, _known(kind), memory_bytes, gpu_cores)
        return TakenName(kind, name, one.name, str(one))
    except UnknownPartError:
        other = next((one for one in _FILES if one != kind and letters_and_digits(name) in _written(one)), None)
        if other is None:
            raise
    raise HardwareError(f"expected a {kind}, such as {_EXAMPLES[kind]}, got {quoted(name)}, which is a {other}")


@overload
def part(kind: Literal["gpu"], name: str) -> GpuPart: ...
@overload
def part(kind: Literal["memory"], name: str) -> MemoryPart: ...
@overload
def part(kind: Literal["cpu"], name: str) -> CpuPart: ...
@overload
def part(kind: PartKind, name: str) -> MachinePart: ...
def part(kind: PartKind, name: str) -> MachinePart:
    """One part of the catalogue, by a name that people or programs write. Raises HardwareError with what the name
    differs in, or those that may be meant, and the command that lists all."""
    named: MachinePart = _part(kind, taken(kind, name).name)
    return named


def refused(name: str) -> UnknownPartError | None:
    """Why a name of any kind is no part, if there are parts like it."""
    for kind in _FILES:
        try:
            taken(kind, name)
        except UnknownPartError as error:
            if error.near:
                return error
        except HardwareError:
            continue
    return None


@cache
def _written(kind: PartKind) -> dict[str, str]:
    """The names of one kind by their letters and digits, which belong to one part each."""
    return {letters_and_digits(name): name for name in _entries(kind)}


@cache
def _known(kind: PartKind) -> tuple[KnownPart, ...]:
    """The parts of one kind, as names are compared with them."""
    return tuple(_known_part(kind, name, entry) for name, entry in _entries(kind).items())


def _known_part(kind: PartKind, name: str, entry: _Entry) -> KnownPart:
    cpu = entry.numbers.get("cpu") if kind == "gpu" else None
    cpu_names = () if cpu is None else (cpu, _entries("cpu")[cpu].numbers["title"])
    memory = entry.numbers.get("memory_bytes", {}).get("value") if cpu is None else None
    family = kind == "cpu" and "most_cores" in entry.numbers and name not in GENERIC_CPUS
    return KnownPart(kind, name, entry.numbers["title"], memory, cpu_names, family)


class _Entry(NamedTuple):
    """A part as a file states it, and the class that it is of."""

    file: str
    form: type[MachinePart]
    numbers: Mapping[str, Any]


@cache
def _entries(kind: PartKind) -> dict[str, _Entry]:
    """All parts of one kind, by name. Raises HardwareError for a file that is not YAML."""
    return {
        name: _Entry(file, form, numbers)
        for file, form in _FILES[kind].items()
        for name, numbers in read_yaml(_FOLDER / file, HardwareError).items()
    }


@cache
def _part(kind: PartKind, name: str) -> Any:
    """One part: a question names a few of hundreds. Raises HardwareError for a faulty entry."""
    file, form, numbers = _entries(kind)[name]
    return from_dict(form, {**numbers, "name": name}, f"{file}: {name}", HardwareError)


# --- weights of fewer bits --------------------------------------------------------------------------------------------


class FormatRate(NamedTuple):
    """Weights of ``bits`` are read at ``fraction`` of the rate of 16-bit weights."""

    bits: Annotated[float, above(0)]
    fraction: Annotated[float, above(0), at_most(1)]
    source: str
    confidence: Confidence


_Rates = Mapping[Processor, tuple[FormatRate, ...]]


@cache
def read_fraction(processor: Processor, bits: float) -> float:
    """The rate of ``processor`` with ``bits`` per weight, as a fraction of that with 16 bits; 1 from 16 bits on."""
    rows = format_rates()[processor]
    return float(np.interp(bits, [row.bits for row in rows], [row.fraction for row in rows]))


@cache
def format_rates() -> dict[Processor, list[FormatRate]]:
    """The rows of each processor, by rising bits. Raises HardwareError for a faulty file."""
    return {processor: sorted(rows) for processor, rows in read_file(_Rates, _FOLDER / "weight_formats.yaml").items()}
