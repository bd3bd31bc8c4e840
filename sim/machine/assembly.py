"""Machines named by their parts: ``rtx-4080+ddr5-5600``, ``rtx-3090+ddr4-3200-ecc+epyc-7532+16-cores+256gb``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sim.machine.part_names import HOW_TO_GET_ON, ONE_GPU, PartKind, slot
from sim.machine.parts import CpuPart, GpuPart, MemoryPart, UnifiedPart, kind_of, part, refused
from sim.machine.plausibility import HardwareError
from trilane.common.quoting import quoted
from trilane.common.units import GIB

NO_GPU = "none"  # in place of a GPU's name
_COUNTS = {  # what is not the name of a part: as it is read, and as it is written
    "cores": (re.compile(r"(\d+)-cores?"), "{}-cores"),
    "channels": (re.compile(r"(\d+)-channels?"), "{}-channels"),
    "pcie": (re.compile(r"(?:pcie|pci-e|gen ?\d)[ -]?(.*)"), "pcie-{}"),
    "sockets": (re.compile(r"(2)-sockets"), "{}-sockets"),
    "ram": (re.compile(r"(\d+)gb"), "{}gb"),
}
_FORM = (
    "a machine of parts is GPU+MEMORY, and optionally +CPU, +16-cores, +8-channels, +2-sockets, +pcie-4x8 (the slot's "
    "generation and lanes), +64gb (host memory in GiB): rtx-4080+ddr5-5600+ryzen-9-7950x; without a GPU "
    "none+ddr5-5600; with unified memory gb10"
)


@dataclass(frozen=True)
class Assembly:
    """The parts of one machine. ``pcie``: generation and lanes of the slot. None: not stated, or no GPU.

    ``channels``: of a socket; ``cores``: of all sockets.
    """

    gpu: GpuPart | None
    memory: MemoryPart
    cpu: CpuPart | None = None
    cores: int | None = None
    channels: int | None = None
    pcie: tuple[int, int] | None = None
    ram_bytes: int | None = None
    sockets: int = 1


def assembled_name(
    gpu: str,
    memory: str | None = None,
    cpu: str | None = None,
    *,
    cores: int | None = None,
    channels: int | None = None,
    sockets: int | None = None,
    pcie: str | None = None,
    ram_gib: int | None = None,
) -> str:
    """The name of a machine of parts for ``load_hardware``: ``rtx-4080+ddr5-5600+16-cores``.

    Parts by the names of ``sim.machine.parts``; ``gpu`` may be "none". ``memory``: None with a GPU that brings its
    own. ``cpu``: None is the generic one that such a memory usually has. ``cores`` in use and memory ``channels``: None
    is all that the CPU has. ``sockets``: 2, or None for one. ``pcie``: the slot as generation x lanes, ``"3x16"``; None
    is x16 of the board's generation. ``ram_gib``: host memory.
    Raises HardwareError for a GPU, memory or CPU that is not in the catalogue, and a slot that there is not.
    """
    named: dict[PartKind, str | None] = {"gpu": gpu, "memory": memory, "cpu": cpu}
    given = [(kind, name.lower()) for kind, name in named.items() if name is not None]
    parts = [name if (kind, name) == ("gpu", NO_GPU) else part(kind, name).name for kind, name in given]
    written = None if pcie is None else "x".join(map(str, slot(pcie)))
    counts = {"cores": cores, "channels": channels, "sockets": sockets, "pcie": written, "ram": ram_gib}
    return "+".join([*parts, *(_COUNTS[kind][1].format(n) for kind, n in counts.items() if n is not None)])


def is_assembly(name: str) -> bool:
    """True if a name consists of parts, rather than being a file's."""
    return ("+" in name and not name.endswith((".yaml", ".yml"))) or kind_of(name.lower()) is not None


def parse_assembly(name: str) -> Assembly:
    """The parts in a name. Raises HardwareError for a part that is unknown, missing or there twice."""
    where = f"hardware {quoted(name)}"
    words: dict[str, str] = {}
    if "@" in name:
        raise HardwareError(f"{where}: expected parts joined by +, such as +pcie-3x4, got {quoted('@')}; {_FORM}")
    for word in name.lower().split("+"):
        kind, value = _meaning(word, where)
        if kind == "gpu" and kind in words and NO_GPU not in (value, words[kind]):
            raise HardwareError(f"{where}: {ONE_GPU}")
        if kind in words:
            raise HardwareError(f"{where}: two {kind} parts, {quoted(words[kind])} and {quoted(value)}; {_FORM}")
        words[kind] = value
    gpu = part("gpu", words["gpu"]) if words.get("gpu", NO_GPU) != NO_GPU else None
    if isinstance(gpu, UnifiedPart):
        words = _with_its_own(gpu, words, where)
    for kind in ("gpu", "memory"):
        if kind not in words:
            raise HardwareError(f"{where}: no {kind} among the parts; {_FORM}")
    if gpu is None and "pcie" in words:
        raise HardwareError(f"{where}: expected no PCIe slot where there is no GPU, got {quoted(words['pcie'])}")
    counts = {kind: int(words[kind]) for kind in ("cores", "channels", "ram", "sockets") if kind in words}
    for kind, count in counts.items():
        if count < 1:
            raise HardwareError(f"{where}: {kind} must be at least 1, got {count}")
    return Assembly(
        gpu, part("memory", words["memory"]), part("cpu", words["cpu"]) if "cpu" in words else None,
        cores=counts.get("cores"), channels=counts.get("channels"), pcie=_slot(words.get("pcie"), where),
        ram_bytes=GIB * counts["ram"] if "ram" in counts else None, sockets=counts.get("sockets", 1),
    )


def _with_its_own(gpu: UnifiedPart, words: dict[str, str], where: str) -> dict[str, str]:
    """Add the memory and the CPU that come with a GPU. Raises HardwareError if others are named."""
    for kind in ("memory", "cpu", "channels", "sockets", "pcie"):
        if kind in words:
            raise HardwareError(
                f"{where}: {gpu.title} comes with its memory and CPU, got {quoted(words[kind])}; leave it out"
            )
    return {"ram": str(gpu.memory_bytes.value // GIB), **words, "memory": gpu.memory, "cpu": gpu.cpu}


def _meaning(word: str, where: str) -> tuple[str, str]:
    """Kind and value of one word. Raises HardwareError for an unknown word."""
    if word == NO_GPU:
        return "gpu", word
    for name, (pattern, _) in _COUNTS.items():
        if match := pattern.fullmatch(word):
            return name, match.group(1)
    if kind := kind_of(word):
        return kind, part(kind, word).name
    if near := refused(word):
        if ONE_GPU in near.sentence:
            raise HardwareError(f"{where}: {ONE_GPU}")
        raise HardwareError(f"{where}: {near.sentence}; {_FORM}; {HOW_TO_GET_ON}")
    raise HardwareError(f"{where}: there is no part {quoted(word)}; {_FORM}; {HOW_TO_GET_ON}")


def _slot(text: str | None, where: str) -> tuple[int, int] | None:
    """Generation and lanes. Raises HardwareError for those that no slot has."""
    try:
        return None if text is None else slot(text)
    except HardwareError as error:
        raise HardwareError(f"{where}: {error}") from None
