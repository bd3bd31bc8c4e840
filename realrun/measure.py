"""Measure one scenario on this machine: the counterpart of ``sim.simulate``."""

from __future__ import annotations

import torch

from realrun.errors import RefusedError
from realrun.host_lanes import HostLanes
from realrun.machines import Lanes, RealMachine, machine_for, machine_of
from realrun.replay_bench import Measurement, ReplayBench, room_for
from sim.hardware import Hardware
from sim.scenario import Scenario
from sim.simulate import compose_policy, prepare, setting_of


def measure(scenario: Scenario, lanes: Lanes = "auto") -> Measurement:
    """Replay one scenario: once to warm up, once to measure.

    Its hardware is what planners believe in: a profile of this machine, or a preset. Raises what ``simulate`` raises,
    RefusedError before the run, and LaneError during it.
    """
    setting = setting_of(scenario)
    prepared = prepare(setting, compose_policy(setting, scenario.policy, scenario.parameters))
    machine = machine_on(setting.hardware, lanes)
    try:
        bench = ReplayBench(machine, setting.shape, room_for([prepared]))
        bench.measure(setting, scenario.policy, scenario.parameters)
        return bench.measure(setting, scenario.policy, scenario.parameters)
    finally:
        machine.close()


def machine_on(hardware: Hardware, lanes: Lanes) -> RealMachine:
    """The lanes that a profile was measured on; beside a preset, those asked for. Raises RefusedError."""
    if hardware.profile is None:
        return machine_for(lanes)
    kind = {"host-lanes": "host", "cuda": "cuda"}[hardware.profile.kind]
    if lanes not in ("auto", kind):
        raise RefusedError(f"{hardware.name} is a profile of {kind} lanes, got --lanes {lanes}; leave it out")
    return machine_of(hardware.profile)


def generating_machine(lanes: Lanes) -> RealMachine:
    """A GPU where there is one, or host lanes on which the calling thread is the GPU, as a library's model needs."""
    if lanes == "cuda" or (lanes == "auto" and torch.cuda.is_available()):
        return machine_for("cuda")
    return HostLanes(inline=True)
