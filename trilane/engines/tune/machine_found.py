"""The parts of the machine at hand, as far as the system names them: GPU, CPU, cores, PCIe slot, size of the memory.

The kind of memory modules is known to the administrator alone (``dmidecode``): a usual one of the CPU's family is
assumed, which is said.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from realrun.machine.cores import physical_cores
from sim.machine.assembly import NO_GPU
from sim.machine.part_names import UnknownPartError
from sim.machine.parts import is_unified, part, taken
from sim.machine.plausibility import HardwareError
from trilane.common.computer import System, cpu_name, memory_bytes, operating_system
from trilane.common.units import GIB
from trilane.engines.question import FitError
from trilane.engines.tune.cards_found import CardFound, cards_found

USUAL_RAM = {"ddr4": "ddr4-3200", "ddr5": "ddr5-5600"}  # of each family
_UNKNOWN_CPUS_RAM = "ddr4-3200"


class UnknownCardError(FitError):
    """A GPU that is not in the catalogue; ``why``: what the catalogue has instead of it."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"tune: {why}; name one like it with --gpu, or describe the machine in a file (--machine)"
        )
        self.why = why


class Assumption(NamedTuple):
    """A part that is not known; ``value``: its name, None for a generic one or none; ``number``: of cards, or cores."""

    part: Literal["gpu", "ram", "cpu"]
    value: str | None = None
    number: int = 0


@dataclass(frozen=True)
class MachineFound:
    """Names of parts, as ``Question`` has them, and what was assumed of them; a GPU may come with memory and CPU."""

    gpu: str
    ram: str | None
    cpu: str | None
    cores: int | None
    pcie: str | None
    ram_gb: int | None
    assumed: tuple[Assumption, ...]
    system: System = "linux"

    def parts(self, **named: Any) -> dict[str, Any]:
        """All parts by name; those that were ``named`` replace what was found."""
        return {**{name: value for name, value in asdict(self).items() if name != "assumed"}, **named}

    def without(self, *named: str) -> MachineFound:
        """Without the assumptions about parts that were named."""
        return replace(self, assumed=tuple(one for one in self.assumed if one.part not in named))


def found_machine(named_cpu: str | None = None) -> MachineFound:
    """The machine at hand, with another CPU where one is named: its cores, and the memory modules that it takes.

    Raises UnknownCardError for a GPU that is not in the catalogue.
    """
    cards, cores, own_cpu = cards_found(), len(physical_cores()), cpu_name()
    gpu = _gpu(cards[0]) if cards else _gpu_of_chip(own_cpu)
    ram_gb = -(-memory_bytes() // GIB)  # whole, as modules have it: a little less is reported
    if is_unified(gpu) and named_cpu is None:
        return MachineFound(gpu, None, None, None, None, ram_gb, (), operating_system())
    known = named_cpu or _cpu(own_cpu)
    cpu = known or _generic_cpu(cores)
    ram = usual_ram(known)
    assumed = [] if len(cards) == 1 else [Assumption("gpu", number=len(cards))]
    assumed.append(Assumption("ram", ram))
    if known is None:
        assumed.append(Assumption("cpu", cpu, cores))
    return MachineFound(
        gpu=gpu if cards else NO_GPU,
        ram=ram,
        cpu=cpu,
        cores=None if named_cpu else cores,
        pcie=cards[0].pcie if cards else None,
        ram_gb=ram_gb,
        assumed=tuple(assumed),
        system=operating_system(),
    )


def _gpu(card: CardFound) -> str:
    """The name of the card's part. Raises UnknownCardError."""
    try:
        return taken("gpu", card.name, card.memory_bytes, card.gpu_cores).name
    except UnknownPartError as error:
        raise UnknownCardError(error.sentence) from None


def _gpu_of_chip(cpu: str) -> str:
    """The name of the GPU that is one chip with the CPU, and reads its memory; or none."""
    try:
        gpu = taken("gpu", cpu).name
    except HardwareError:
        return NO_GPU
    return gpu if is_unified(gpu) else NO_GPU


def _cpu(title: str) -> str | None:
    """Name of the CPU's part; None for one that is not in the catalogue."""
    try:
        return taken("cpu", title).name
    except HardwareError:
        return None


def _generic_cpu(cores: int) -> str | None:
    """None, for the one that the memory usually has; or a server's, for more cores than a desktop has."""
    most = part("cpu", "desktop").most_cores
    return "server" if most is not None and cores > most.value else None


def usual_ram(cpu: str | None) -> str:
    """The usual memory of the family that the CPU takes."""
    if cpu is None:
        return _UNKNOWN_CPUS_RAM
    families = part("cpu", cpu).memory
    return next((USUAL_RAM[family] for family in reversed(families) if family in USUAL_RAM), _UNKNOWN_CPUS_RAM)
