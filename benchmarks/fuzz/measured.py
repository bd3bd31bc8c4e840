"""A validation that has been measured: its journal, with simulated runs for measured ones, and a profile's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from dataclasses import fields
from pathlib import Path
from typing import Any

from realrun.execution.call_log import LoggedSession
from sim.machine.interpolation import Table, TimeGrid
from sim.machine.profile import MeasuredModel
from sim.runs.prepare import prepare
from sim.simulate import play
from trilane.study.validation.journal import Kept, journal_of, question_of
from trilane.study.validation.parity import answers_of
from trilane.study.validation.plan import ValidationPlan


def measured_journal(folder: Path, plan: str, profile: str) -> dict[str, bytes]:
    """The journal of a plan in ``folder``, by its name there; it is made in ``out/journal``."""
    with chdir(folder):
        chosen = ValidationPlan.from_yaml(plan, {"hardware": profile})
        settings = [prepare(scenario) for scenario in chosen.scenarios]
        path = Path("out/journal")
        with journal_of(path, question_of(settings)) as journal:
            for place, setting in enumerate(settings):
                session = setting.session_of(LoggedSession)
                kept = Kept(play(setting, session), answers_of(session), True)
                for turn in range(chosen.repeats):
                    journal.add(place, turn, kept)
            model = settings[0].hardware.measured_profile().model_of(settings[0].shape, profile)
            journal.add_samples(chosen.repeats, dict(_samples(model)))
        return {str(path): path.read_bytes()}


def _samples(model: MeasuredModel) -> Iterator[tuple[Any, list[float]]]:
    """One sample of everything that was measured, by its name and sizes."""
    for part in fields(model):
        found = getattr(model, part.name)
        if isinstance(found, Table):
            yield from (((part.name, at), [float(ns)]) for at, ns in zip(found.at, found.ns, strict=True))
        elif isinstance(found, TimeGrid):
            for batch, row in zip(found.batch, found.ns, strict=True):
                yield from (((part.name, batch, n), [float(ns)]) for n, ns in zip(found.length, row, strict=True))
        elif found is not None and part.name != "sizes":
            yield (part.name,), [float(getattr(found, fields(found)[0].name))]
