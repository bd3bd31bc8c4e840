"""The smoke test of a machine: a minute that says whether longer runs on it are worth beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from realrun.machine.machines import RealMachine
from realrun.smoke.check import Check
from realrun.smoke.machine_checks import machine_checks


def smoke(made: Callable[[bool], RealMachine]) -> Iterator[Check]:
    """Every check, as it is done; ``made(inline)`` makes the machine, see ``machine_for``.

    Raises RefusedError where there is no such machine. Needs transformers for the second half.
    """
    machine = made(False)
    try:
        yield from machine_checks(machine)
    finally:
        machine.close()
    from realrun.smoke.generation_checks import generation_checks  # transformers takes seconds: the lanes come first

    machine = made(True)
    try:
        yield from generation_checks(machine)
    finally:
        machine.close()
