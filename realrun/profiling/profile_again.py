"""A profile's microbenchmarks, repeated in between other work, and the profile that all of them make together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from realrun.errors import RefusedError
from realrun.machine.machines import RealMachine
from realrun.profiling.profile_lab import Lab, Points
from realrun.profiling.profile_timing import QUICK, Samples
from realrun.profiling.profiling import measure, measured_model
from sim.machine.hardware import Hardware
from sim.simulate import Setting


class Reprofile:
    """Of the one model of ``settings``, at the sizes that they play."""

    def __init__(self, machine: RealMachine, settings: Sequence[Setting]) -> None:
        """Raises RefusedError where the settings' machine has no profile."""
        self._shape, self._hardware = settings[0].shape, settings[0].hardware
        if self._hardware.profile is None:
            raise RefusedError(f"{self._hardware.name}: expected a profile, measured on this machine: trilane profile")
        self._lab = Lab(machine, self._shape, points_of(settings))
        self._samples: Samples = {}

    def measure(self) -> None:
        """One more round."""
        with self._lab.open():
            for key, ns in measure(self._lab, QUICK).items():
                self._samples.setdefault(key, []).extend(ns)

    def hardware(self) -> Hardware:
        """The machine, with medians of all rounds in place of what its profile said of the model."""
        profile, name = self._hardware.profile, self._shape.base_name
        assert profile is not None
        models = {**profile.models, name: measured_model(self._shape, self._samples)}
        return replace(self._hardware, profile=replace(profile, models=models))


def points_of(settings: Sequence[Setting]) -> Points:
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
