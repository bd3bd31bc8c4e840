"""A sweep: play every point of a grid, here or on a Dask cluster, keep each row as it finishes, and give the table."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from policies.user_files import loaded_policies
from sim.machine.cards import load_machine
from sim.runs.calibration import calibration_name
from sim.runs.prepare import Prepared
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.library import load_trace
from traces.models.catalogue import load_model
from trilane.common.errors import TrilaneError
from trilane.common.files import plain_target
from trilane.common.parquet_files import write_parquet
from trilane.study.journal import Journal, Study, journal_next_to, journal_of
from trilane.study.player import LastPrepared, Progress, Watch, check_shared, play_in
from trilane.study.pool import WorkerPool
from trilane.study.sweep.axes import PARAMETER, SCENARIO_KEYS, SweepError, policy_in, scenario_keys
from trilane.study.sweep.cluster import dask_pool
from trilane.study.sweep.code_fingerprint import check_kept, code_fingerprint, own_source
from trilane.study.sweep.grid import Grid, Point, canonical, points
from trilane.study.sweep.table import COLUMNS, cell, check_rows, frame_of, read_table, table_of

SWEEP = Study("sweep", SweepError)
DIED = "WorkerDiedError: the process that played this point died, and died again when it played it alone"


def sweep(
    grid: Grid | Mapping[str, Any] | str | Path,
    output: str | Path | None = None,
    *,
    jobs: int = 1,
    dask: str | None = None,
    watch: Watch | None = None,
    retry_errors: bool = False,
) -> pd.DataFrame:
    """Play a grid: a ``Grid``, a mapping with the keys of a sweep file, or the path of one. One row a point.

    ``output``: a Parquet file for the table. Rows are kept as they finish in ``OUTPUT.journal``; a sweep that was
    interrupted, however, goes on where it was when the same call is made again, and gives the same bytes. Points that
    OUTPUT holds already are not played again, those with an ``error`` only if ``retry_errors``.

    A policy that the caller has registered is played in this process alone, unless it was loaded from a file
    (``trilane.load_policies``); OUTPUT holds its results for as long as the file that defines it stays as it is.

    ``jobs`` processes share the work (more than one needs a caller that can be imported: ``if __name__ ==
    "__main__"``), or the workers of the Dask cluster at the address ``dask``; the table is the same. ``watch`` is
    called with the progress after every row. A point that cannot be played is a row with its ``error``. Raises
    SweepError for a grid that cannot be understood, and an output that is something else or holds results which this
    grid lacks; ChoiceError for a policy that other processes lack; WorkerError if processes cannot be started.
    """
    if jobs < 1:
        raise SweepError(f"jobs: expected a whole number >= 1, got {jobs!r}")
    grid = grid_of(grid)
    target = None if output is None else _target(output)
    _check_policies(grid, target, jobs, dask)
    with nullcontext() if target is None else journal_of(journal_next_to(target), SWEEP) as journal:
        tasks = _tasks(grid)
        rows = {} if journal is None or target is None else _kept(target, journal, tasks, retry_errors)
        waiting = [task for task in tasks if task.key not in rows]
        kept, failures = len(rows), sum(bool(row["error"]) for row in rows.values())
        with closing(played_rows(waiting, jobs, dask)) as played:
            for row in played:
                if journal is not None:
                    journal.add(row["point"], row)
                rows[row["point"]] = row
                failures += bool(row["error"])
                if watch is not None:
                    watch(Progress(len(tasks), len(rows), kept, failures))
        table = table_of(grid, [task.point.axes for task in tasks], [rows[task.key] for task in tasks])
        if journal is not None and target is not None:
            write_parquet(table, target)
            journal.discard()
    return frame_of(table)


def _check_policies(grid: Grid, target: Path | None, jobs: int, dask: str | None) -> None:
    """Raises ChoiceError for a registered policy that cannot be played in this way, SweepError if it cannot be kept."""
    values = (value for axes in grid.axes for value in axes.get("policy", (grid.scenario.policy,)))
    names = list(dict.fromkeys(policy_in(value)[0] for value in values))
    if dask is not None:
        check_shared(names, "a Dask cluster")
    elif jobs > 1:
        check_shared(names, f"jobs={jobs}", known=loaded_policies())
    if target is not None:
        check_kept(names)


def grid_of(grid: Grid | Mapping[str, Any] | str | Path) -> Grid:
    """A grid from itself, from a mapping or from a file. Raises SweepError."""
    if isinstance(grid, Grid):
        return grid
    return Grid.from_dict(grid) if isinstance(grid, Mapping) else Grid.from_yaml(grid)


def _target(output: str | Path) -> Path:
    """The file to write, if it can be: found out before the work. Raises SweepError."""
    path = plain_target(Path(output))
    if path.suffix != ".parquet":
        raise SweepError(f"{path}: expected the name of a Parquet file, ending in .parquet")
    if not path.parent.is_dir():
        raise SweepError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.exists() and not path.is_file():
        raise SweepError(f"{path}: expected the name of a file, this is something else")
    return path


def _tasks(grid: Grid) -> list[PointTask]:
    contents = Contents()
    return [PointTask(key_of(point, contents), point) for point in points(grid)]


def _kept(target: Path, journal: Journal, tasks: Sequence[PointTask], retry_errors: bool) -> dict[str, Row]:
    """Rows that are done already, of this grid's points. Raises SweepError rather than lose those of another grid."""
    try:
        check_rows(list(journal.entries.values()))
    except TrilaneError as error:
        raise SweepError(f"{journal.path}: no sweep has written this: {error}; move it away") from None
    held = {**_rows_of(target), **{row["point"]: row for row in journal.entries.values()}}
    wanted = {task.key for task in tasks}
    others = sum(not row["error"] for key, row in held.items() if key not in wanted)
    if others:
        raise SweepError(
            f"{target}: {others:,} of the results there belong to none of this grid's {len(tasks):,} points (they are "
            f"another grid's, or a file or Trilane has changed since); name another file, or move this one and its "
            f"journal"
        )
    return {key: row for key, row in held.items() if key in wanted and not (retry_errors and row["error"])}


def _rows_of(target: Path) -> dict[str, Row]:
    """The rows of a finished table, by point."""
    if not target.exists():
        return {}
    return {row["point"]: row for row in read_table(target).select(["point", *COLUMNS]).to_pylist()}


# --- playing points ---------------------------------------------------------------------------------------------------


def played_rows(tasks: Sequence[PointTask], jobs: int = 1, dask: str | None = None) -> Generator[Row, None, None]:
    """Rows in the order in which they finish. Processes end with this generator, and with this process.

    Where a worker dies, its points are played once more at the end, each alone; if the worker dies again, that is an
    error of the point. Raises WorkerError if processes cannot be started, and what ``dask_pool`` raises.
    """
    if not tasks:
        return
    def died(task: PointTask) -> Row:
        return failed(task.point, task.key, DIED)

    processes = min(jobs, max(2, len(tasks)))
    with WorkerPool(processes, Player, caller_works=False) if dask is None else dask_pool(dask, Player) as pool:
        for _, row in play_in(pool, Player.row_of, tasks, lambda task: task.point.setting, died):
            yield row


# --- one point --------------------------------------------------------------------------------------------------------


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
        machine = load_machine(name)
        return _digest([[card.document() for card in machine.cards], asdict(machine.decisions)])
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
