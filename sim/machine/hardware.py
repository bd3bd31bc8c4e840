"""A machine as data, read strictly from YAML in which every number states its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from sim.machine.assembly import is_assembly, parse_assembly
from sim.machine.devices import Devices, Gpu
from sim.machine.disks import disk_numbers
from sim.machine.part_rules import assembled
from sim.machine.parts import rules
from sim.machine.peers import PeerLink
from sim.machine.plan_costs import PlanCosts, load_plan_costs
from sim.machine.plausibility import HardwareError, check_plausible
from sim.machine.profile import Profile
from sim.machine.sourced import Origin, Sourced
from trilane.common.files import atomic_path
from trilane.common.hints import Name, hints_of
from trilane.common.names import unknown
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict, to_dict
from trilane.common.yaml_files import Lines, read_yaml, yaml_text


@dataclass(frozen=True, kw_only=True)
class Hardware(Devices):
    """One machine. ``origins`` maps every dotted key to its source.

    With a ``profile``, times come from its tables; of the numbers, only memory, ``result_path``, ``plan_factor`` and
    power apply, and the rates serve the null model alone.
    """

    name: str
    about: str = ""
    plan_costs: PlanCosts = field(default_factory=load_plan_costs)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    profile: Profile | None = None
    notes: tuple[str, ...] = ()  # caveats for readers of results
    further: tuple[Hardware, ...] = ()  # the same machine with each of its further GPUs
    peer: PeerLink | None = None  # to its GPU from the one before; None: by way of the host's memory

    @property
    def cards(self) -> tuple[Hardware, ...]:
        """The machine with each of its GPUs alone."""
        return (replace(self, further=()), *self.further) if self.further else (self,)

    def link_from(self, first: Hardware) -> PeerLink | None:
        """The link to its GPU from that of ``first``, where GPUs are linked: at the lower rate of both slots."""
        if self.peer is None or self.peer.own_lane:
            return self.peer
        return self.peer._replace(bytes_per_s=min(first.link.d2h_bytes_per_s, self.link.h2d_bytes_per_s))

    def on_cards(self, change: Callable[[Hardware], Hardware]) -> Hardware:
        """The machine with a change of it with each of its GPUs."""
        return replace(change(self), further=tuple(map(change, self.further)))

    @property
    def cpu_only(self) -> bool:
        """True if there is no GPU: the section ``gpu`` has the CPU's rates and the host's memory."""
        return self.gpu.kind == "cpu"

    @property
    def one_memory(self) -> bool:
        """True if all is read where it lies, so that nothing is copied: unified memory, or no GPU."""
        return self.gpu.kind is not None

    @property
    def measured(self) -> bool:
        """True if times come from the tables of a profile rather than from data sheets."""
        return self.profile is not None

    @property
    def both_ways_permille(self) -> int:
        """Rate of two copies that run in both directions, in permille of the rate alone: what the link leaves, or the
        host's memory, which one of them reads and the other writes."""
        link = self.link
        in_memory = self.cpu.read_bytes_per_s / (link.expert_bytes_per_s + link.d2h_bytes_per_s)
        return max(1, int(1000 * min(link.both_ways_share, in_memory)))

    def measured_profile(self) -> Profile:
        """The profile. Raises HardwareError for a machine that was not measured."""
        if self.profile is None:
            raise HardwareError(f"hardware {self.name!r}: expected a measured profile; make one: trilane profile")
        return self.profile

    @property
    def decisions(self) -> PlanCosts:
        """Costs of decisions on this host: those measured on it as they are, others from the scaled table."""
        table = self.plan_costs.scaled(self.host.plan_factor)
        return table if self.profile is None else table.with_(self.profile.plan, self.profile.foresee)

    def flat(self) -> dict[str, Any]:
        """Every known number by its dotted key, as ``overrides`` of ``load_hardware`` name them."""
        parts = {section: vars(part) for section in _SECTIONS if (part := getattr(self, section)) is not None}
        return {f"{s}.{key}": value for s, part in parts.items() for key, value in part.items() if value is not None}

    def with_numbers(self, changed: Mapping[str, float]) -> Hardware:
        """The machine with other values for some dotted keys; whole numbers stay whole."""
        numbers = self.flat()
        new = {key: round(value) if isinstance(numbers[key], int) else value for key, value in changed.items()}
        return replace(self, **{name: replace(getattr(self, name), **part) for name, part in _nested(new).items()})

    def without_gpu(self, ram_bytes: int | None) -> Hardware:
        """The machine whose CPU computes everything, next to a GPU that is not used; ``ram_bytes``: None is enough."""
        cpu, one_memory = self.cpu, rules().one_memory["gpu"]
        gpu = Gpu(
            name="no GPU", kind="cpu", kernel_ns=int(rules().no_gpu["kernel_ns"].value),
            memory_bytes=ram_bytes or int(rules().no_gpu["memory_bytes"].value),
            reserve_bytes=int(one_memory["reserve_bytes"].value), flops_per_s=cpu.flops_per_s, flops_fraction=1.0,
            bandwidth_bytes_per_s=cpu.dram_bytes_per_s, bandwidth_fraction=cpu.read_bytes_per_s / cpu.dram_bytes_per_s,
        )
        return replace(self, gpu=gpu, further=())

    def numbers(self) -> dict[str, Sourced[Any]]:
        """Every number by its dotted key, with its source; one that no file states is a default of low confidence."""
        missing = Origin("not stated", "low")
        return {key: Sourced(value, *self.origins.get(key, missing)) for key, value in self.flat().items()}

    def document(self) -> dict[str, Any]:
        """The machine in the form of its YAML file: ``yaml.safe_dump`` it and ``load_hardware`` reads it back."""
        sections = _nested({key: number._asdict() for key, number in self.numbers().items()})
        text = {"name": self.name, "about": self.about, **sections}
        text |= {"notes": list(self.notes)} if self.notes else {}
        return text if self.profile is None else {**text, "measured": to_dict(self.profile, nulls=False)}


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Values by dotted key, by section."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


# --- reading ----------------------------------------------------------------------------------------------------------

_SECTIONS: Mapping[str, Any] = {  # by name: the class of a section, which may be optional
    name: next(part for part in (*get_args(hint), hint) if part is not NoneType)
    for name, hint in hints_of(Devices).items()
}
_KEYS = tuple(f"{section}.{name}" for section, kind in _SECTIONS.items() for name in hints_of(kind))
_PRESETS = Path(str(files("sim.machine"))) / "presets"
_FILE_KEYS = ("name", "about", *_SECTIONS, "measured", "notes")
_DESCRIPTIVE = ("gpu.name", "gpu.kind", "cpu.name", "cpu.sockets", "cpu.cores", "disk.name")
_NOT_IN_TABLES = (  # what the tables of a profile do not decide
    "gpu.memory_bytes", "gpu.reserve_bytes", "link.result_path", "host.plan_factor", "cpu.ram_bytes",
    *(key for key in _KEYS if key.startswith(("power.", "disk."))),
)


def hardware_names() -> list[str]:
    """Names of the presets that come with the simulator, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def hardware_keys() -> tuple[str, ...]:
    """Every dotted key that ``overrides`` of ``load_hardware`` may replace (of a measured profile, some of them)."""
    return tuple(key for key in _KEYS if key not in _DESCRIPTIVE)


def load_hardware(
    name_or_path: str | Path, overrides: Mapping[str, float | str] | None = None, disk: str | float | None = None,
) -> Hardware:
    """Load a preset by name, a file of the same form, or a machine of parts such as ``rtx-4080+ddr5-5600``.

    A file states every number of a machine, or names its ``parts`` and states what is known better.
    ``overrides`` replaces values by dotted key, such as ``{"link.h2d_bytes_per_s": 12e9, "link.copies": "pageable"}``.
    ``disk``: a kind of disk in place of the machine's, or the GB/s of its reads.
    Raises HardwareError for an unknown name, part or key, a missing or wrongly typed number, an override of what a
    profile has measured, and anything that no machine has (see ``sim.machine.plausibility``).
    """
    name = str(name_or_path)
    as_it_is = not overrides and disk is None
    if as_it_is and is_assembly(name) and not Path(name).is_file() and name not in hardware_names():
        return _made_of_parts(name)
    return _loaded(name_or_path, overrides or {}, disk)


@cache
def _made_of_parts(name: str) -> Hardware:
    return _loaded(name, {}, None)


def _loaded(name_or_path: str | Path, overrides: Mapping[str, float | str], disk: str | float | None) -> Hardware:
    document = _document_of(name_or_path)
    where = f"hardware {quoted(str(document['name']))}"
    for key in document:
        if key not in _FILE_KEYS:
            raise HardwareError(f"{where}: {unknown('key', str(key), _FILE_KEYS)}")
    rest = {key: value for key, value in document.items() if key not in _SECTIONS}
    text = from_dict(_Text, rest, where, HardwareError)
    _check_overrides(overrides, text.measured is not None, f"{where}, overrides")
    numbers = _numbers(document, where) | ({} if disk is None else disk_numbers(str(disk)))
    numbers |= {key: Sourced(value, "override", "high") for key, value in overrides.items()}
    devices = from_dict(Devices, _nested({key: n.value for key, n in numbers.items()}), where, HardwareError)
    hardware = Hardware(
        name=text.name, about=text.about, notes=text.notes, profile=text.measured, **vars(devices),
        origins={key: number.origin for key, number in numbers.items()},
    )
    check_plausible(hardware.flat(), where, hardware.gpu.kind if text.measured is None else text.measured.kind)
    return hardware


def _document_of(name_or_path: str | Path) -> dict[str, Any]:
    """The document of a preset, a file or a name made of parts, with its name. Raises HardwareError."""
    name, path = str(name_or_path), Path(name_or_path)
    if name in hardware_names():
        path = _PRESETS / f"{name}.yaml"
    elif not path.is_file():
        if is_assembly(name):
            return assembled(parse_assembly(name), name.lower())
        raise HardwareError(
            f"no hardware preset or file {quoted(name)}; presets: {', '.join(hardware_names())}; or give the path of a "
            f"YAML file of the same form, or parts: rtx-4080+ddr5-5600 (`trilane hardware --parts` lists them)"
        )
    document = read_yaml(path, HardwareError)
    if not isinstance(document, dict):
        raise HardwareError(f"{path}: expected a mapping of sections, got {quoted(document)}")
    document = {**document, "name": document.get("name", path.stem)}
    return document if "parts" not in document else _completed(document, f"hardware {quoted(str(document['name']))}")


def _completed(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fill a file's document up with the numbers of the ``parts`` that it names. Raises HardwareError."""
    parts = from_dict(str, document["parts"], f"{where}: parts", HardwareError)
    made = assembled(parse_assembly(parts), str(document["name"]))
    stated = {key: value for key, value in document.items() if key != "parts"}
    sections = {
        key: {**made[key], **value}
        for key, value in stated.items()
        if isinstance(value, Mapping) and isinstance(made.get(key), Mapping)
    }
    return {**made, **stated, **sections}


class _Text(NamedTuple):
    """Content of a hardware file in addition to numbers with their sources."""

    name: Name
    about: str = ""
    notes: tuple[str, ...] = ()
    measured: Profile | None = None


def _numbers(document: Mapping[str, Any], where: str) -> dict[str, Sourced[Any]]:
    """The numbers of a hardware file, by dotted key. Raises HardwareError for one without a source."""
    given = {section: document[section] for section in _SECTIONS if section in document}
    sections = from_dict(Mapping[str, Mapping[str, Sourced[Any]]], given, where, HardwareError)
    return {f"{section}.{name}": number for section, numbers in sections.items() for name, number in numbers.items()}


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


# --- writing ----------------------------------------------------------------------------------------------------------


def write_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a machine as YAML, whole or not at all; ``load_hardware`` reads it back.

    Raises OSError if the file cannot be written.
    """
    document = hardware.document()
    if measured := document.get("measured"):
        document["measured"] = {**measured, **{name: Lines(measured[name]) for name in ("machine", "rates")}}
    with atomic_path(path) as temporary:
        temporary.write_text(yaml_text(document), encoding="utf-8")
