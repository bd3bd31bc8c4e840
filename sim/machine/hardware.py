"""A machine as data, read strictly from YAML in which every number states its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.machine.assembly import is_assembly, parse_assembly
from sim.machine.devices import Contention, Cpu, Gpu, Host, HostLink, Power
from sim.machine.part_rules import document_of
from sim.machine.plan_costs import PlanCosts, load_plan_costs
from sim.machine.plausibility import HardwareError, check_plausible
from sim.machine.profile import Profile
from sim.machine.sourced import Origin, Sourced, read_document
from trilane.common.hints import hints_of
from trilane.common.names import unknown
from trilane.common.schema import from_dict, to_dict

_PRESETS = Path(str(files("sim.machine"))) / "presets"


@dataclass(frozen=True)
class Hardware:
    """One machine. ``origins`` maps every dotted key to its source.

    With a ``profile``, times come from its tables; of the numbers, only memory, ``result_path``, ``plan_factor`` and
    power apply, and the rates serve the null model alone.
    """

    name: str
    about: str
    gpu: Gpu
    cpu: Cpu
    link: HostLink
    host: Host
    contention: Contention
    power: Power | None = None
    plan_costs: PlanCosts = field(default_factory=load_plan_costs)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    profile: Profile | None = None
    notes: tuple[str, ...] = ()  # caveats for readers of results

    @property
    def measured(self) -> bool:
        """Whether its times come from the tables of a profile rather than from data sheets."""
        return self.profile is not None

    def measured_profile(self) -> Profile:
        """The profile. Raises HardwareError for a machine that was not measured."""
        if self.profile is None:
            raise HardwareError(f"hardware {self.name!r}: expected a measured profile; make one: trilane profile")
        return self.profile

    @property
    def decisions(self) -> PlanCosts:
        """What decisions cost on this host: those measured on it as they are, others from the scaled table."""
        table = self.plan_costs.scaled(self.host.plan_factor)
        return table if self.profile is None else table.with_(self.profile.plan, self.profile.foresee)

    def flat(self) -> dict[str, Any]:
        """Every known number by its dotted key, as ``overrides`` of ``load_hardware`` name them."""
        parts = {section: vars(part) for section in _SECTIONS if (part := getattr(self, section)) is not None}
        return {f"{s}.{key}": value for s, part in parts.items() for key, value in part.items() if value is not None}

    def with_numbers(self, changed: Mapping[str, float]) -> Hardware:
        """The machine with other values for some dotted keys; whole numbers stay whole."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in changed.items():
            section, name = key.split(".")
            whole = isinstance(getattr(getattr(self, section), name), int)
            sections.setdefault(section, {})[name] = round(value) if whole else value
        return replace(self, **{name: replace(getattr(self, name), **new) for name, new in sections.items()})

    def document(self) -> dict[str, Any]:
        """The machine in the form of its YAML file: ``yaml.safe_dump`` it and ``load_hardware`` reads it back."""
        text: dict[str, Any] = {"name": self.name, "about": self.about}
        for key, value in self.flat().items():
            section, name = key.split(".")
            origin = self.origins.get(key, Origin("not stated", "low"))
            text.setdefault(section, {})[name] = {"value": value, **origin._asdict()}
        if self.notes:
            text["notes"] = list(self.notes)
        return text if self.profile is None else {**text, "measured": to_dict(self.profile, nulls=False)}


# --- reading ----------------------------------------------------------------------------------------------------------

_Section = Mapping[str, Sourced[Any]]


@dataclass(frozen=True)
class _Document:
    """A hardware file: numbers with their sources, whose types the sections state."""

    name: str
    gpu: _Section
    cpu: _Section
    link: _Section
    host: _Section
    contention: _Section
    about: str = ""
    power: _Section = field(default_factory=dict)
    measured: Profile | None = None
    notes: tuple[str, ...] = ()

    def numbers(self) -> dict[str, Sourced[Any]]:
        """Every number by its dotted key."""
        return {f"{s}.{name}": number for s in _SECTIONS for name, number in getattr(self, s).items()}


@dataclass(frozen=True)
class _Sections:
    gpu: Gpu
    cpu: Cpu
    link: HostLink
    host: Host
    contention: Contention
    power: Power | None = None


_SECTIONS: Mapping[str, type] = {
    "gpu": Gpu, "cpu": Cpu, "link": HostLink, "host": Host, "contention": Contention, "power": Power,
}  # fmt: skip
_KEYS = tuple(f"{section}.{name}" for section, kind in _SECTIONS.items() for name in hints_of(kind))
_DESCRIPTIVE = ("gpu.name", "cpu.name", "cpu.sockets", "cpu.cores")
_NOT_IN_TABLES = (  # what the tables of a profile do not decide
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
    given = _document(name_or_path)
    where = f"hardware {str(given['name'])!r}"
    document = from_dict(_Document, given, where, HardwareError)
    numbers = document.numbers()
    _check_overrides(overrides or {}, document.measured is not None, f"{where}, overrides")
    numbers |= {key: Sourced(value, "override", "high") for key, value in (overrides or {}).items()}
    values: dict[str, dict[str, Any]] = {}
    for key, number in numbers.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = number.value
    sections = from_dict(_Sections, values, where, HardwareError)
    found = Hardware(
        document.name, document.about, **vars(sections), notes=document.notes, profile=document.measured,
        origins={key: number.origin for key, number in numbers.items()},
    )  # fmt: skip
    check_plausible(found.flat(), where, document.measured.kind if document.measured else None)
    return found


def _check_overrides(keys: Iterable[str], measured: bool, where: str) -> None:
    """Refuse overrides that would be accepted and change nothing. Raises HardwareError."""
    for key in keys:
        if key not in _KEYS:
            raise HardwareError(f"{where}: {unknown('key', key, _KEYS)}")
        if key in _DESCRIPTIVE:
            raise HardwareError(f"{where}: {key} only describes the machine; override its rates instead")
        if measured and key not in _NOT_IN_TABLES:
            raise HardwareError(
                f"{where}: this machine is a measured profile, whose tables replace {key}; measure again, "
                f"or use a preset; of a profile these can be overridden: {', '.join(_NOT_IN_TABLES)}"
            )


def _document(name_or_path: str | Path) -> dict[str, Any]:
    """The document of a preset, a file or a name made of parts, with its name. Raises HardwareError."""
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
    document = read_document(path)
    if not isinstance(document, dict):
        raise HardwareError(f"{path}: expected a mapping of sections, got {document!r:.40}")
    return {**document, "name": document.get("name", path.stem)}
