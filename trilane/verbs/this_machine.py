"""The machine at hand, for ``--engine llama.cpp``: its cores, what reports call it, and its parts where a plan says
``here``.
"""

from __future__ import annotations

from trilane.output.pages.output import note
from trilane.verbs.options import OptionError

HERE = "here"  # in place of a machine's name in a plan
NAME_THE_PARTS = "name the parts: --set hardware=GPU+MEMORY+CPU (HARDWARE= of examples/gpu.sh)"


def machine_found() -> str:
    """The parts of this machine as a machine's name; what is assumed is said. Raises OptionError for a machine that
    cannot be made of parts of the catalogue.
    """
    from sim.machine.assembly import assembled_name
    from sim.machine.hardware import load_hardware
    from sim.machine.plausibility import HardwareError
    from trilane.engines.tune.machine_found import UnknownCardError, found_machine

    try:
        found = found_machine()
        name = assembled_name(found.gpu, found.ram, found.cpu, cores=found.cores, pcie=found.pcie, ram_gib=found.ram_gb)
        load_hardware(name)
    except UnknownCardError as error:
        raise OptionError(f"hardware={HERE}: {error.card} is not in the catalogue; {NAME_THE_PARTS}") from None
    except HardwareError as error:
        raise OptionError(f"hardware={HERE}: {error}; {NAME_THE_PARTS}") from None
    for text in found.assumed:
        note(f"assumed: {text.partition(';')[0]}")  # what follows are options of tune
    if found.assumed:
        note(NAME_THE_PARTS)
    return name


def gpu_machine() -> str:
    """The GPU that llama.cpp finds, next to the CPU. Raises RefusedError without one."""
    from realrun.llama_cpp.abi import gpu_name

    return f"{gpu_name()}, {cpu_machine()}"


def cpu_machine() -> str:
    """The CPU and its cores."""
    from realrun.machine.facts import cpu_facts

    facts = cpu_facts()
    return f"{facts['cpu']}, {facts['cores']} cores"


def core_count() -> int:
    """Physical cores."""
    from realrun.machine.cores import physical_cores

    return len(physical_cores())
