"""Measure one scenario on this machine: the counterpart of ``sim.simulate``."""

from __future__ import annotations

from collections.abc import Callable

from realrun.machine import LaneKind
from realrun.machine.machines import LaneOptions, RealMachine, check_asked, machine_for, machine_of
from realrun.replay.bench import Measurement, ReplayBench, room_for
from sim.machine.hardware import Hardware
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario


def measure(
    scenario: Scenario, lanes: LaneKind = "auto", options: LaneOptions | None = None,
    tell: Callable[[RealMachine], object] = lambda _: None,
) -> Measurement:  # fmt: skip
    """Replay one scenario: once to warm up, once to measure.

    Its hardware is what planners believe in: a profile of this machine, or a preset. ``tell`` is given the machine
    before the run, and can pass on its ``remarks``. Raises what ``simulate`` raises, RefusedError before the run, and
    LaneError during it.
    """
    prepared = prepare(scenario).checked()
    machine = machine_on(prepared.hardware, lanes, options)
    try:
        bench = ReplayBench(machine, prepared.shape, room_for([prepared]))
        tell(machine)
        bench.measure(prepared)
        return bench.measure(prepared)
    finally:
        machine.close()


def machine_on(
    hardware: Hardware, lanes: LaneKind = "auto", options: LaneOptions | None = None, *, inline: bool = False
) -> RealMachine:
    """The lanes that a profile was measured on; beside a preset, those asked for.

    Raises RefusedError where this is another computer than the profile's, and where other lanes were asked for.
    """
    options = options or LaneOptions()
    if not hardware.measured:
        return machine_for(lanes, options, inline=inline)
    check_asked(hardware.measured_profile(), lanes, options)
    return machine_of(hardware.measured_profile(), inline=inline)


def generating_machine(
    hardware: Hardware, lanes: LaneKind = "auto", options: LaneOptions | None = None
) -> RealMachine:  # fmt: skip
    """As ``machine_on``; on host lanes the calling thread is the GPU, as a library's model needs."""
    return machine_on(hardware, lanes, options, inline=True)
