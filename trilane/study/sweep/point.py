"""Playing one point: its key, and its row, whatever happens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from sim.machine.hardware import load_hardware
from sim.runs.calibration import calibration_name
from sim.runs.prepare import Prepared
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.library import load_trace
from traces.models.catalogue import load_model
from trilane.study.player import LastPrepared
from trilane.study.sweep.axes import PARAMETER, SCENARIO_KEYS, SweepError, scenario_keys
from trilane.study.sweep.code_fingerprint import code_fingerprint, own_source
from trilane.study.sweep.grid import Point, canonical
from trilane.study.sweep.table import COLUMNS, cell, check_rows

Row = dict[str, Any]
_FILES = {"trace": "trace info", "calibration": "trace info", "hardware": "hardware"}  # keys, and verbs that read them


@cache
def trilane_version() -> str:
    """Version of the package that plays."""
    return version("trilane")


class Contents:
    """The contents of what scenarios name, each read once: a changed file makes another point."""

    def __init__(self) -> None:
        self._look_up = cache(_content)

    def of(self, scenario: Scenario) -> dict[str, Any]:
        """Checksums of trace, calibration, model, machine and the user's own policy; null for what cannot be loaded."""
        return {
            "trace": self._look_up("trace", scenario.trace),
            "calibration": self._look_up("trace", _calibration(scenario)),
            "model": self._look_up("model", scenario.model),
            "hardware": self._look_up("hardware", scenario.hardware),
            "policy": self._look_up("policy", scenario.policy),
        }

    def unusable_files(self, keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Files that these keys of a scenario name and that cannot be loaded, each after the verb that says why."""
        for key, verb in _FILES.items():
            name = keys.get(key) or ""
            is_file = os.path.isfile(name) or os.path.isfile(name.rpartition(":")[0])  # the first layers of a trace
            if is_file and self._look_up(verb.split()[0], name) is None:
                yield verb, name


def _calibration(scenario: Scenario) -> str | None:
    try:
        return calibration_name(scenario)
    except (ValueError, OSError):
        return None


def _content(kind: str, name: str | None) -> str | None:
    """Checksum of what a name refers to; None if that cannot be loaded."""
    if name is None:
        return None
    try:
        if kind == "trace":
            return load_trace(name).checksum
        if kind == "policy":
            return own_source(name)
        if kind == "model":
            return _digest(load_model(name).to_dict())
        machine = load_hardware(name)
        return _digest([machine.document(), asdict(machine.decisions)])
    except (ValueError, OSError):
        return None


def _digest(value: object) -> str:
    return f"sha256:{hashlib.sha256(canonical(value).encode()).hexdigest()}"


def key_of(point: Point, contents: Contents | None = None) -> str:
    """The key of a point: a checksum of its scenario, its draw, the contents of what it names, and Trilane's code.

    That of a point without a scenario is made from its values and its problem.
    """
    if point.scenario is None:
        return _digest([_written(point), dict(point.axes), point.problem, code_fingerprint()])
    behind = (contents or Contents()).of(point.scenario)
    return _digest([point.scenario.to_dict(), point.draw, behind, code_fingerprint()])


class PointTask(NamedTuple):
    """A point to play, and its key."""

    key: str
    point: Point


class Player:
    """Plays points one after the other. What points of one setting share is made once, for the last setting."""

    def __init__(self) -> None:
        self._prepared = LastPrepared()
        self._contents = Contents()

    def row_of(self, task: PointTask) -> Row:
        """The row of a task's point."""
        return self.row(task.point, task.key)

    def row(self, point: Point, key: str | None = None) -> Row:
        """The point's row. Whatever goes wrong is in its ``error``: "NameOfError: message".

        ``key`` is the point's key in the process that handed it out: another one here means other files.
        """
        try:
            if point.scenario is None:
                return failed(point, key, self._reason(point, point.problem))
            if key is not None and not self._prepared.shares(point.scenario) and key != key_of(point):
                raise SweepError(
                    "the files behind this point, or those of Trilane, are not those that the sweep started "
                    "with: a file was changed meanwhile, or another machine has another; start the sweep again"
                )
            prepared = self._prepared.of(point.scenario)
            return _row(point, key or key_of(point), play(prepared), prepared)
        except Exception as error:  # whatever it is, it belongs to this point, and is no reason to stop the others
            return failed(point, key, self._reason(point, f"{type(error).__name__}: {error}"))

    def _reason(self, point: Point, error: str) -> str:
        """The error of a point. Of a file that cannot be loaded, it says no more than the name.

        What the error quotes may be of any file that this user can read, and tables are given to others.
        """
        file = next(self._contents.unusable_files(_written(point)), None)
        if file is None:
            return error
        verb, name = file
        return f"{error.partition(':')[0]}: {name}: the file cannot be used; `trilane {verb} {name}` says why"


def _row(point: Point, key: str, run: Run, prepared: Prepared) -> Row:
    """Everything about a run: the resolved scenario and all numbers."""
    values = {**run.scenario.to_dict(), **run.to_dict()}
    share = values["cache_bytes"] / prepared.shape.routed_bytes
    row = _complete(point, key, values, cache_share=share, trace_checksum=run.trace_checksum)
    check_rows([row])
    return row


def failed(point: Point, key: str | None, error: str) -> Row:
    """The row of a point that gave no run: the scenario as written, no numbers, and the reason."""
    return _complete(point, key or key_of(point), {"labels": [], **_written(point)}, error=" ".join(error.split()))


def _written(point: Point) -> dict[str, Any]:
    """The keys of the point's scenario, also where its values do not make one."""
    if point.scenario is not None:
        return point.scenario.to_dict()
    base = point.base or Scenario()
    changed = scenario_keys(base, {name: value for name, value in point.axes.items() if name in SCENARIO_KEYS})
    keys = {**base.to_dict(), **changed} if point.base else changed
    given = {name.removeprefix(PARAMETER): v for name, v in point.axes.items() if name.startswith(PARAMETER)}
    return {**keys, "parameters": {**keys.get("parameters", {}), **given}}


def _complete(point: Point, key: str, values: Mapping[str, Any], **more: Any) -> Row:
    """Every column of the table; text is empty where there is nothing to say."""
    own = {"draw": point.draw, "trilane_version": trilane_version(), "trace_checksum": "", "error": "", **more}
    found = {**values, **own}
    return {"point": key, **{name: cell(kind, found.get(name)) for name, kind in COLUMNS.items()}}
