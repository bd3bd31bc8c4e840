"""Machines named by their parts: ``rtx-4080+ddr5-5600``, ``rtx-3090+ddr4-3200-ecc+epyc-7532+16-cores+256gb``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sim.machine.parts import Part, cpu_names, gpu_names, kind_of, memory_names, near, part
from sim.machine.plausibility import HardwareError
from sim.machine.units import GIB

_COUNTS = {
    "cores": re.compile(r"(\d+)-cores?"),
    "channels": re.compile(r"(\d+)-channels?"),
    "pcie": re.compile(r"pcie-([345]x\d+)"),
    "ram": re.compile(r"(\d+)gb"),
}
_FORM = (
    "a machine of parts is GPU+MEMORY, and if you like +CPU, +16-cores, +8-channels, +pcie-4x8 (the slot's generation "
    "and lanes), +64gb (host memory): rtx-4080+ddr5-5600+ryzen-9-7950x"
)


@dataclass(frozen=True)
class Assembly:
    """The parts of one machine. ``pcie``: generation and lanes of the slot; None where nothing was said."""

    gpu: Part
    memory: Part
    cpu: Part | None = None
    cores: int | None = None
    channels: int | None = None
    pcie: tuple[int, int] | None = None
    ram_bytes: int | None = None


def is_assembly(name: str) -> bool:
    """Does the name speak of parts, rather than of a file?"""
    return kind_of(name.lower()) is not None or ("+" in name and not name.endswith((".yaml", ".yml")))


def parse_assembly(name: str) -> Assembly:
    """The parts that a name names. Raises HardwareError naming the part that is unknown, missing or there twice."""
    where = f"hardware {name!r}"
    found: dict[str, str] = {}
    for word in name.lower().split("+"):
        kind, value = _meaning(word, where)
        if kind in found:
            raise HardwareError(f"{where}: two {kind} parts, {found[kind]!r} and {value!r}; {_FORM}")
        found[kind] = value
    for kind in ("gpu", "memory"):
        if kind not in found:
            raise HardwareError(f"{where}: no {kind} among the parts; {_FORM}")
    return Assembly(
        part("gpu", found["gpu"]),
        part("memory", found["memory"]),
        part("cpu", found["cpu"]) if "cpu" in found else None,
        _count(found, "cores", where),
        _count(found, "channels", where),
        _slot(found.get("pcie"), where),
        GIB * ram if (ram := _count(found, "ram", where)) else None,
    )


def _meaning(word: str, where: str) -> tuple[str, str]:
    """Kind and value of one word. Raises HardwareError for a word that means nothing."""
    if kind := kind_of(word):
        return kind, word
    for name, pattern in _COUNTS.items():
        if match := pattern.fullmatch(word):
            return name, match.group(1)
    names = [*gpu_names(), *memory_names(), *cpu_names()]
    raise HardwareError(f"{where}: there is no part {word!r}{near(word, names)}; {_FORM}")


def _count(found: dict[str, str], kind: str, where: str) -> int | None:
    """A whole number above 0, if the name has one. Raises HardwareError."""
    if kind not in found:
        return None
    if int(found[kind]) < 1:
        raise HardwareError(f"{where}: {kind} must be at least 1, got {found[kind]}")
    return int(found[kind])


def _slot(text: str | None, where: str) -> tuple[int, int] | None:
    """Generation and lanes. Raises HardwareError for lanes that no slot has."""
    if text is None:
        return None
    generation, lanes = map(int, text.split("x"))
    if lanes not in (1, 2, 4, 8, 16):
        raise HardwareError(f"{where}: a PCIe slot has 1, 2, 4, 8 or 16 lanes, got {lanes}")
    return generation, lanes
