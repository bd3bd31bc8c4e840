"""The parts of the machine at hand, as far as the system names them: GPU, CPU, cores, PCIe slot, size of the memory.

The kind of memory modules is known to the administrator alone (``dmidecode``): a usual one of the CPU's family is
assumed, which is said.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from realrun.machine.cores import physical_cores
from sim.machine.assembly import NO_GPU
from sim.machine.parts import cpu_names, gpu_names, part
from trilane.common.computer import cpu_name, memory_bytes
from trilane.common.units import GIB, MIB
from trilane.engines.question import FitError

USUAL_RAM = {"ddr4": "ddr4-3200", "ddr5": "ddr5-5600"}  # of each family
_UNKNOWN_CPUS_RAM = "ddr4-3200"
_FIELDS = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
_QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
_NEAR = 0.15  # relative difference of a card's memory from its part's: the driver keeps some for itself


class UnknownCardError(FitError):
    """A GPU that is not in the catalogue, ``card``."""

    def __init__(self, card: str) -> None:
        super().__init__(
            f"tune: {card} is not in the catalogue; name one like it with --gpu, or describe the machine in a file "
            f"(--machine)"
        )
        self.card = card


class Assumption(NamedTuple):
    """A part that is not known; ``value``: its name, None for a generic one or none; ``number``: of cards, or cores."""

    part: Literal["gpu", "ram", "cpu"]
    value: str | None = None
    number: int = 0


@dataclass(frozen=True)
class MachineFound:
    """Names of parts, as ``Question`` has them, and what was assumed of them."""

    gpu: str
    ram: str
    cpu: str | None
    cores: int | None
    pcie: str | None
    ram_gb: int | None
    assumed: tuple[Assumption, ...]

    def parts(self, **named: Any) -> dict[str, Any]:
        """All parts by name; those that were ``named`` replace what was found."""
        return {**{name: value for name, value in asdict(self).items() if name != "assumed"}, **named}

    def without(self, *named: str) -> MachineFound:
        """Without the assumptions about parts that were named."""
        return replace(self, assumed=tuple(one for one in self.assumed if one.part not in named))


class _Card(NamedTuple):
    """A line of ``nvidia-smi``."""

    name: str
    memory_bytes: int
    pcie: str | None


def found_machine(named_cpu: str | None = None) -> MachineFound:
    """The machine at hand, with another CPU where one is named: its cores, and the memory modules that it takes.

    Raises UnknownCardError for a GPU that is not in the catalogue.
    """
    cards, cores = _cards(_answer(_QUERY)), len(physical_cores())
    known = named_cpu or _cpu(cpu_name())
    cpu = known or _generic_cpu(cores)
    ram = _usual_ram(known)
    assumed = [] if len(cards) == 1 else [Assumption("gpu", number=len(cards))]
    assumed.append(Assumption("ram", ram))
    if known is None:
        assumed.append(Assumption("cpu", cpu, cores))
    return MachineFound(
        gpu=_gpu(cards[0]) if cards else NO_GPU,
        ram=ram,
        cpu=cpu,
        cores=None if named_cpu else cores,
        pcie=cards[0].pcie if cards else None,
        ram_gb=-(-memory_bytes() // GIB),  # whole, as modules have it: a little less is reported
        assumed=tuple(assumed),
    )


def _cards(text: str) -> list[_Card]:
    """The GPUs; none where the text has another form."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        _Card(name, int(memory) * MIB, f"{generation}x{width}" if f"{generation}{width}".isdigit() else None)
        for name, memory, generation, width in (row for row in rows if len(row) == len(_FIELDS.split(",")))
        if memory.isdigit()
    ]


def _gpu(card: _Card) -> str:
    """The name of the card's part: that of most words in common with it whose memory is of its size."""
    words = _words(card.name)
    known = [part("gpu", name) for name in gpu_names()]
    near = [one.name for one in known if abs(card.memory_bytes / one.memory_bytes.value - 1) < _NEAR]
    named = [name for name in near if _title_words(name) <= words]
    if not named:
        raise UnknownCardError(f"the GPU {card.name!r} with {card.memory_bytes / GIB:.0f} GiB")
    return max(named, key=lambda name: (len(_title_words(name)), name))


def _title_words(name: str) -> set[str]:
    """The words of a part's name without its memory, and without what drivers leave out."""
    return {word for word in _words(name) if not re.fullmatch(r"\d+gb|pcie|sxm", word)}


def _words(text: str) -> set[str]:
    """Lower-case words; ``Ti`` and the like stand alone."""
    return set(re.findall(r"[a-z]+\d+\w*|\d+\w*|[a-z]+", text.lower()))


def _cpu(title: str) -> str | None:
    """Name of the CPU's part; None for one that is not in the catalogue."""
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", title.lower()))
    named = [name for name in cpu_names() if re.search(rf"(^|-){re.escape(name)}(-|$)", slug)]
    return max(named, key=len, default=None)


def _generic_cpu(cores: int) -> str | None:
    """None, for the one that the memory usually has; or a server's, for more cores than a desktop has."""
    most = part("cpu", "desktop").most_cores
    return "server" if most is not None and cores > most.value else None


def _usual_ram(cpu: str | None) -> str:
    """The usual memory of the family that the CPU takes."""
    if cpu is None:
        return _UNKNOWN_CPUS_RAM
    families = part("cpu", cpu).memory
    return next((USUAL_RAM[family] for family in reversed(families) if family in USUAL_RAM), _UNKNOWN_CPUS_RAM)


def _answer(command: Sequence[str]) -> str:
    """Output of a program; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
