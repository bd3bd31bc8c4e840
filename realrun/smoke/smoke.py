"""All checks of a machine, which show in a minute whether it is fit for longer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from realrun.machine.machines import RealMachine
from realrun.smoke.check import Check
from realrun.smoke.machine_checks import machine_checks


def smoke(made: Callable[[bool], RealMachine]) -> Iterator[Check]:
    """Yield every check when it is done; ``made(inline)`` creates the machine, see ``machine_for``.

    Raises RefusedError if there is no such machine. The second half needs transformers.
    """
    machine = made(False)
    try:
        yield from machine_checks(machine)
    finally:
        machine.close()
    from realrun.smoke.generation_checks import generation_checks  # the import takes seconds

    machine = made(True)
    try:
        yield from generation_checks(machine)
    finally:
        machine.close()
