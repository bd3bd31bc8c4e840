"""The catalogue of parts that machines are assembled from: GPUs, memories, CPUs, and the rules that fill the gaps.

Files in ``sim/machine/presets/parts``; every number says where it is from, as in a preset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sim.machine.plausibility import HardwareError
from sim.machine.sourced_yaml import Origin, entries, only, read_mapping, typed

PartKind = Literal["gpu", "memory", "cpu"]

_FOLDER = Path(str(files("sim.machine"))) / "presets" / "parts"
_FILES: Mapping[PartKind, str] = {"gpu": "gpus.yaml", "memory": "memories.yaml", "cpu": "cpus.yaml"}
_NUMBERS: Mapping[PartKind, Mapping[str, type]] = {
    "gpu": {
        "memory_bytes": int, "bandwidth_bytes_per_s": float, "flops_per_s": float, "pcie_generation": int,
        "pcie_lanes": int, "board_power_w": float, "idle_power_w": float,
    },
    "memory": {"transfers_per_s": float, "channels": int, "pcie_generation": int},
    "cpu": {"cores": int, "read_fraction": float, "busy_power_w": float, "idle_power_w": float},
}  # fmt: skip
_OPTIONAL: Mapping[PartKind, Mapping[str, type]] = {
    "gpu": {"bandwidth_fraction": float, "flops_fraction": float, "busy_power_w": float},
    "memory": {},
    "cpu": {
        "channels": int, "pcie_generation": int, "read_ceiling_bytes_per_s": float, "expert_fraction": float,
        "expert_bits": float, "flops_per_s": float, "most_cores": int, "most_channels": int,
    },
}  # fmt: skip
_PAIRED = ("expert_fraction", "expert_bits")  # a fraction, and the weights that it was measured with
_SUCH: Mapping[PartKind, str] = {"gpu": "rtx-4080", "memory": "ddr5-5600", "cpu": "ryzen-9-7950x"}
_WORDS: Mapping[PartKind, tuple[str, ...]] = {"gpu": (), "memory": ("cpu",), "cpu": ("memory", "server")}
_RULES: Mapping[str, Mapping[str, type]] = {
    "gpu": {"bandwidth_fraction": float, "flops_fraction": float, "kernel_ns": int, "reserve_bytes": int},
    "cpu": {
        "expert_fraction": float, "expert_bits": float, "core_read_bytes_per_s": float,
        "server_core_read_bytes_per_s": float, "odd_channels_fraction": float, "flops_per_core": float,
        "first_expert_ns": int,
    },
    "link": {
        "h2d_latency_ns": int, "d2h_latency_ns": int, "copies": str, "pageable_fraction": float, "result_path": str,
    },
    "host": {"launch_ns": int, "sync_ns": int, "plan_factor": float},
}  # fmt: skip
_LINK_RATES = dict.fromkeys(("theory_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"), float)
_BOX_RATES = dict.fromkeys(("read_bytes_per_s", "cpu_permille", "copy_permille"), float)


class Number(NamedTuple):
    """A value and where it is from."""

    value: Any
    origin: Origin


@dataclass(frozen=True)
class Part:
    """One part. ``numbers`` as the file gives them; ``notes``: traps that a reader of results should know."""

    kind: PartKind
    name: str
    title: str
    numbers: Mapping[str, Number]
    words: Mapping[str, Any]  # what is no number: a memory's usual ``cpu``; a CPU's ``memory`` kinds, ``server``
    notes: tuple[str, ...]

    @property
    def family(self) -> str:
        """A memory's kind without its speed: ``ddr5``."""
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class Rules:
    """What holds where no part says otherwise. ``numbers`` by dotted key; ``pcie`` by generation, sixteen lanes."""

    numbers: Mapping[str, Number]
    pcie: Mapping[int, Mapping[str, Number]]
    contention: tuple[Mapping[str, Number], ...]  # boxes measured with both at once
    notes: tuple[str, ...]


def gpu_names() -> list[str]:
    """Names of the GPUs, in the order of the file: by generation."""
    return list(_catalogue("gpu"))


def memory_names() -> list[str]:
    """Names of the memory kinds."""
    return list(_catalogue("memory"))


def cpu_names() -> list[str]:
    """Names of the CPUs; ``desktop``, ``laptop`` and ``server`` are generic ones."""
    return list(_catalogue("cpu"))


def kind_of(name: str) -> PartKind | None:
    """Which kind of part has this name, if any."""
    return next((kind for kind in get_args(PartKind) if name in _catalogue(kind)), None)


def part(kind: PartKind, name: str) -> Part:
    """One part of the catalogue. Raises HardwareError with near matches, and where all are listed."""
    if name not in _catalogue(kind):
        other = kind_of(name)
        if other is not None:
            raise HardwareError(f"expected a {kind}, such as {_SUCH[kind]}, got {name!r}, which is a {other}")
        raise HardwareError(f"there is no {kind} {name!r} among the parts{near(name, _catalogue(kind))}")
    return _catalogue(kind)[name]


def near(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name."""
    close = get_close_matches(name.lower(), list(names), n=3)
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
    return f"{meant} `trilane hardware --parts` lists them all"


@cache
def _catalogue(kind: PartKind) -> dict[str, Part]:
    """All parts of one file. Raises HardwareError if it is not what it must be."""
    path = _FOLDER / _FILES[kind]
    return {name: _part(kind, name, entry, f"{path.name}, {name}") for name, entry in read_mapping(path).items()}


def _part(kind: PartKind, name: str, entry: Mapping[str, Any], where: str) -> Part:
    """One entry of a file, checked."""
    words = {key: entry[key] for key in ("title", *_WORDS[kind]) if key in entry}
    only(words, ("title", *_WORDS[kind]), where, complete=True)
    given = {key: value for key, value in entry.items() if key not in (*words, "notes")}
    only((key for key in given if key in _NUMBERS[kind]), _NUMBERS[kind], where, complete=True)
    numbers = _numbers(given, {**_NUMBERS[kind], **_OPTIONAL[kind]}, where)
    only((key for key in _PAIRED if key in numbers), _PAIRED, where, complete=any(key in numbers for key in _PAIRED))
    return Part(kind, name, str(words.pop("title")), numbers, words, tuple(map(str, entry.get("notes", ()))))


@cache
def rules() -> Rules:
    """The rules of ``rules.yaml``, checked. Raises HardwareError."""
    document = read_mapping(_FOLDER / "rules.yaml")
    only(document, (*_RULES, "pcie", "contention", "notes"), "rules.yaml", complete=True)
    numbers: dict[str, Number] = {}
    for section, hints in _RULES.items():
        numbers |= {f"{section}.{key}": number for key, number in _rule_set(document, section, hints).items()}
    return Rules(
        numbers,
        {int(generation): _rule_set(document["pcie"], generation, _LINK_RATES) for generation in document["pcie"]},
        tuple(_rule_set(document["contention"], box, _BOX_RATES) for box in document["contention"]),
        tuple(map(str, document["notes"])),
    )


def _rule_set(sections: Mapping[Any, Any], name: Any, hints: Mapping[str, type]) -> dict[str, Number]:
    """One set of rules, complete. Raises HardwareError."""
    found = _numbers(sections[name], hints, f"rules.yaml, {name}")
    only(found, hints, f"rules.yaml, {name}", complete=True)
    return found


def _numbers(given: Mapping[str, Any], hints: Mapping[str, type], where: str) -> dict[str, Number]:
    """Sourced numbers of the types in ``hints``. Raises HardwareError."""
    values, origins = entries({"numbers": dict(given)}, {"numbers": tuple(hints)}, where)
    found = {}
    for dotted, value in values.items():
        key = dotted.partition(".")[2]
        found[key] = Number(typed(key, value, hints[key], where), origins[dotted])
    return found
