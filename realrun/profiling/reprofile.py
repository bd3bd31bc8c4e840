"""A profile's microbenchmarks, repeated in between other work, and the profile that all of them make together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from realrun.errors import RefusedError
from realrun.machine.machines import RealMachine
from realrun.profiling.lab import Lab, Points
from realrun.profiling.profile import measure, measured_model
from realrun.profiling.timing import QUICK, Samples
from sim.machine.hardware import Hardware
from sim.machine.profile import Profile
from sim.runs.prepare import Prepared


class Reprofile:
    """Of the one model of ``settings``, at the sizes that they play."""

    def __init__(self, machine: RealMachine, settings: Sequence[Prepared]) -> None:
        """Raises RefusedError where memory does not hold what is measured with."""
        self._lab = Lab(machine, settings[0].shape, points_of(settings))

    def measure(self) -> Samples:
        """One repetition."""
        with self._lab.open():
            return measure(self._lab, QUICK)


def profile_of(setting: Prepared) -> Profile:
    """That of the setting's machine. Raises RefusedError where it has none."""
    if not setting.hardware.measured:
        raise RefusedError(f"{setting.hardware.name}: expected a profile, measured on this machine: trilane profile")
    return setting.hardware.measured_profile()


def profiled_again(setting: Prepared, repetitions: Sequence[Samples]) -> Hardware:
    """The setting's machine, with medians of all repetitions in place of what its profile said of the model."""
    profile, shape = profile_of(setting), setting.shape
    samples: Samples = {}
    for key, ns in (found for repetition in repetitions for found in repetition.items()):
        samples.setdefault(key, []).extend(ns)
    models = {**profile.models, shape.base_name: measured_model(shape, samples)}
    return replace(setting.hardware, profile=replace(profile, models=models))


def points_of(settings: Sequence[Prepared]) -> Points:
    """The batches, prompts and contexts that the settings' steps have; one token where they have none of these."""
    steps = [step for setting in settings for step in setting.steps]
    prompts = {max(step.tokens) for step in steps if step.phase == "prefill"}
    ends = [
        before + new for step in steps if step.phase == "decode"
        for before, new in zip(step.context, step.tokens, strict=True)
    ]  # fmt: skip
    return Points(
        batches=tuple(sorted({setting.scenario.batch for setting in settings})),
        contexts=tuple(sorted({min(ends, default=1), max(ends, default=1)})),
        prompts=tuple(sorted(prompts)) or (1,),
    )
