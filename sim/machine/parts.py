"""The catalogue of parts, by name: the files of ``sim/machine/presets/parts``, in which every number states its
source, as in a preset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from sim.machine.part_kinds import (
    CardPart,
    CpuPart,
    GpuPart,
    MachinePart,
    MemoryPart,
    PartKind,
    Rules,
    UnifiedPart,
)
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import read_file
from trilane.common.names import unknown
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

LISTED_BY = "trilane hardware --parts"
HOW_TO_ADD = "add a part in sim/machine/presets/parts, or describe the machine in a YAML file of a preset's form"
_FOLDER = Path(str(files("sim.machine"))) / "presets" / "parts"
_FILES: Mapping[PartKind, Mapping[str, type[MachinePart]]] = {
    "gpu": {"gpus.yaml": CardPart, "unified.yaml": UnifiedPart},
    "memory": {"memories.yaml": MemoryPart},
    "cpu": {"cpus.yaml": CpuPart},
}
_EXAMPLES: Mapping[PartKind, str] = {"gpu": "rtx-4080", "memory": "ddr5-5600", "cpu": "ryzen-9-7950x"}


@cache
def rules() -> Rules:
    """The rules of ``rules.yaml``. Raises HardwareError for a faulty file."""
    found: Rules = read_file(Rules, _FOLDER / "rules.yaml")
    return found


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


def kind_of(name: str) -> PartKind | None:
    """The kind of the part with this name, if there is one."""
    return next((kind for kind in _FILES if letters_and_digits(name) in _written(kind)), None)


@overload
def part(kind: Literal["gpu"], name: str) -> GpuPart: ...
@overload
def part(kind: Literal["memory"], name: str) -> MemoryPart: ...
@overload
def part(kind: Literal["cpu"], name: str) -> CpuPart: ...
@overload
def part(kind: PartKind, name: str) -> MachinePart: ...
def part(kind: PartKind, name: str) -> MachinePart:
    """One part of the catalogue; "RTX 3060" and rtx3060 are rtx-3060. Raises HardwareError with the closest name, and
    the command that lists all."""
    name = _written(kind).get(letters_and_digits(name), name)
    if name not in _entries(kind):
        other = kind_of(name)
        if other is not None:
            raise HardwareError(f"expected a {kind}, such as {_EXAMPLES[kind]}, got {name!r}, which is a {other}")
        raise HardwareError(f"{unknown(kind, name, _entries(kind), LISTED_BY)}; {HOW_TO_ADD}")
    found: MachinePart = _part(kind, name)
    return found


def letters_and_digits(name: str) -> str:
    """What tells the names of parts apart: without capitals, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", name.lower())


@cache
def _written(kind: PartKind) -> dict[str, str]:
    """The names of one kind by their letters and digits, which belong to one part each."""
    return {letters_and_digits(name): name for name in _entries(kind)}


class _Entry(NamedTuple):
    """What a file says of a part, and the class that the part is of."""

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
