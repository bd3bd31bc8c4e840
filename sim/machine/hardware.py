"""A machine, as data: GPU, CPU, link, host and what they cost each other, loaded strictly from YAML with sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_type_hints

from sim.machine.part_names import is_assembly, parse_assembly
from sim.machine.part_rules import document_of
from sim.machine.plan_costs import PlanCosts, load_plan_costs
from sim.machine.plausibility import HardwareError, check_plausible
from sim.machine.profile import Profile
from sim.machine.profile_yaml import profile_document, read_profile
from sim.machine.sourced_yaml import Origin, entries, only, read_mapping, typed

__all__ = [
    "Contention", "Cpu", "Gpu", "Hardware", "HardwareError", "Host", "Link", "Origin", "Power", "ResultPath",
    "hardware_keys", "hardware_names", "load_hardware",
]  # fmt: skip

ResultPath = Literal["direct", "h2d"]
_PRESETS = Path(str(files("sim.machine"))) / "presets"


@dataclass(frozen=True)
class Gpu:
    """One GPU. Times follow max(bytes / bandwidth, flops / rate) + kernels x ``kernel_ns``."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float  # data sheet
    bandwidth_fraction: float  # of it, reached by memory-bound kernels
    flops_per_s: float  # data sheet, dense 16-bit with 32-bit accumulation
    flops_fraction: float  # of it, reached by expert-sized matrix products
    kernel_ns: int  # device time that every kernel costs beside its bytes and flops
    reserve_bytes: int  # kept free: context, workspace, fragmentation

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
    cores: int  # used, not owned
    dram_bytes_per_s: float  # theory: channels x transfers/s x 8
    read_bytes_per_s: float  # effective, by an expert's matrix-vector product
    flops_per_s: float  # effective, by an expert's matrix-matrix product
    first_expert_ns: int  # extra time of the first CPU expert of a layer
    ram_bytes: int | None = None  # host memory; None: not known


@dataclass(frozen=True)
class Link:
    """Host to device and back. A copy takes latency + bytes / rate; copies of one direction queue."""

    theory_bytes_per_s: float  # one direction, after line coding
    h2d_bytes_per_s: float  # large copies from pinned memory
    h2d_latency_ns: int
    d2h_bytes_per_s: float
    d2h_latency_ns: int
    copies: Literal["pinned", "pageable"]  # memory that experts are copied from
    pageable_fraction: float  # of ``h2d_bytes_per_s``, reached from pageable memory
    result_path: ResultPath  # CPU results: read in place by the GPU, or queued on h2d behind expert copies

    @property
    def expert_bytes_per_s(self) -> float:
        """Rate at which experts are copied to the GPU; activations always travel through pinned buffers."""
        return self.h2d_bytes_per_s * (self.pageable_fraction if self.copies == "pageable" else 1.0)


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
    """Watts of each device, idle and busy."""

    gpu_idle_w: float
    gpu_busy_w: float
    cpu_idle_w: float
    cpu_busy_w: float


@dataclass(frozen=True)
class Hardware:
    """One machine. ``origins`` maps every dotted key to its source.

    With a ``profile``, times come from its tables; of the numbers, memory, ``result_path``, ``plan_factor`` and power
    count, and the rates stand for the null model alone.
    """

    name: str
    about: str
    gpu: Gpu
    cpu: Cpu
    link: Link
    host: Host
    contention: Contention
    power: Power | None = None
    plan_costs: PlanCosts = field(default_factory=load_plan_costs)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    profile: Profile | None = None
    notes: tuple[str, ...] = ()  # traps that a reader of results should know

    @property
    def decisions(self) -> PlanCosts:
        """What decisions cost on this host: those that were measured on it as they are, others by the scaled table."""
        table = self.plan_costs.scaled(self.host.plan_factor)
        return table if self.profile is None else table.with_(self.profile.plan, self.profile.foresee)

    def flat(self) -> dict[str, Any]:
        """Every number that is known, by dotted key, as ``overrides`` of ``load_hardware`` names them."""
        parts = {section: asdict(getattr(self, section)) for section in _SECTIONS if getattr(self, section)}
        return {f"{s}.{key}": value for s, part in parts.items() for key, value in part.items() if value is not None}

    def document(self) -> dict[str, Any]:
        """The machine in the form of its YAML file: ``yaml.safe_dump`` it and ``load_hardware`` reads it back."""
        text: dict[str, Any] = {"name": self.name, "about": self.about}
        for key, value in self.flat().items():
            section, name = key.split(".")
            origin = self.origins.get(key, Origin("not stated", "low"))
            text.setdefault(section, {})[name] = {"value": value, **origin._asdict()}
        if self.notes:
            text["notes"] = list(self.notes)
        return text if self.profile is None else {**text, "measured": profile_document(self.profile)}


_SECTIONS: Mapping[str, type] = {
    "gpu": Gpu, "cpu": Cpu, "link": Link, "host": Host, "contention": Contention, "power": Power,
}  # fmt: skip
_OPTIONAL = {"cpu.ram_bytes": int}
_KEYS: Mapping[str, Any] = {
    f"{section}.{name}": hint for section, kind in _SECTIONS.items() for name, hint in get_type_hints(kind).items()
} | _OPTIONAL
_DESCRIPTIVE = ("gpu.name", "cpu.name", "cpu.sockets", "cpu.cores")
_BESIDE_TABLES = (  # what a profile's tables do not decide
    "gpu.memory_bytes", "gpu.reserve_bytes", "link.result_path", "host.plan_factor", "cpu.ram_bytes",
    *(key for key in _KEYS if key.startswith("power.")),
)  # fmt: skip


def hardware_keys() -> tuple[str, ...]:
    """Every dotted key that ``overrides`` of ``load_hardware`` may replace (of a measured profile, some of them)."""
    return tuple(key for key in _KEYS if key not in _DESCRIPTIVE)


def hardware_names() -> list[str]:
    """Names of the presets that come with the simulator, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml") if path.stem != "plan_costs")


def load_hardware(name_or_path: str | Path, overrides: Mapping[str, float | str] | None = None) -> Hardware:
    """Load a preset by name, a file of the same form, or a machine of parts such as ``rtx-4080+ddr5-5600``.

    ``overrides`` replaces values by dotted key, such as ``{"link.h2d_bytes_per_s": 12e9, "link.copies": "pageable"}``.
    Raises HardwareError for an unknown name, part or key, a missing or wrongly typed number, an override of what a
    profile has measured, and anything that no machine has (see ``sim.machine.plausibility``).
    """
    document = _document(name_or_path)
    name = str(document["name"])
    where = f"hardware {name!r}"
    only(document, ("name", "about", *_SECTIONS, "measured", "notes"), where)
    profile = read_profile(document["measured"], where) if "measured" in document else None
    values, origins = entries(document, {section: _names(section) for section in _SECTIONS}, where)
    _check_overrides(overrides or {}, profile, f"{where}, overrides")
    values |= overrides or {}
    origins |= {key: Origin("override", "high") for key in overrides or {}}
    checked = {key: typed(key, value, _KEYS[key], where) for key, value in values.items()}
    check_plausible(checked, where, None if profile is None else profile.kind)
    parts = {section: _section(section, checked, where) for section in _SECTIONS}
    notes = _notes(document.get("notes", []), where)
    return Hardware(name, str(document.get("about", "")), **parts, origins=origins, profile=profile, notes=notes)


def _notes(given: object, where: str) -> tuple[str, ...]:
    """The notes of a document. Raises HardwareError if they are no list."""
    if not isinstance(given, list):
        raise HardwareError(f"{where}: notes must be a list of texts, got {given!r:.40}")
    return tuple(map(str, given))


def _check_overrides(keys: Iterable[str], profile: Profile | None, where: str) -> None:
    """Refuse overrides that would be accepted and change nothing. Raises HardwareError."""
    only(keys, _KEYS, where)
    for key in keys:
        if key in _DESCRIPTIVE:
            raise HardwareError(f"{where}: {key} only describes the machine; override its rates instead")
        if profile is not None and key not in _BESIDE_TABLES:
            raise HardwareError(
                f"{where}: this machine is a measured profile, whose tables decide what {key} would; measure again, "
                f"or ask a preset; of a profile these can be overridden: {', '.join(_BESIDE_TABLES)}"
            )


def _document(name_or_path: str | Path) -> dict[str, Any]:
    """What a preset, a file or a name made of parts says, with its name. Raises HardwareError for any other name."""
    name, path = str(name_or_path), Path(name_or_path)
    if name in hardware_names():
        path = _PRESETS / f"{name}.yaml"
    elif not path.is_file():
        if is_assembly(name):
            return document_of(parse_assembly(name), name.lower())
        raise HardwareError(
            f"no hardware preset or file {name!r}; presets: {', '.join(hardware_names())}; or give the path of a YAML "
            f"file of the same form, or parts: rtx-4080+ddr5-5600 (`trilane hardware --parts` lists them)"
        )
    document = read_mapping(path)
    return {**document, "name": document.get("name", path.stem)}


def _names(section: str) -> tuple[str, ...]:
    return tuple(f.name for f in fields(_SECTIONS[section]))


def _section(section: str, checked: Mapping[str, Any], where: str) -> Any:
    """One section's dataclass; None for power, which may be left out, if it is."""
    values = {name: checked[f"{section}.{name}"] for name in _names(section) if f"{section}.{name}" in checked}
    if section == "power" and not values:
        return None
    needed = (name for name in _names(section) if f"{section}.{name}" not in _OPTIONAL)
    only((name for name in values if f"{section}.{name}" not in _OPTIONAL), needed, f"{where}, section {section}", True)
    return _SECTIONS[section](**values)
