"""A sweep: play every point of a grid, here or on a Dask cluster, keep each row as it finishes, and give the table."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from policies.user_files import loaded_policies
from trilane.common.errors import TrilaneError
from trilane.common.files import plain_target
from trilane.common.parquet_files import write_parquet
from trilane.study.journal import Journal, Study, journal_next_to, journal_of
from trilane.study.player import Progress, Watch, check_shared, play_in
from trilane.study.pool import WorkerPool
from trilane.study.sweep.axes import SweepError, policy_in
from trilane.study.sweep.cluster import dask_pool
from trilane.study.sweep.code_fingerprint import check_kept
from trilane.study.sweep.grid import Grid, points
from trilane.study.sweep.point import Contents, Player, PointTask, Row, failed, key_of
from trilane.study.sweep.table import COLUMNS, check_rows, frame_of, read_table, table_of

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
    with dask_pool(dask, Player) if dask is not None else _pool(min(jobs, max(2, len(tasks)))) as pool:
        for _, row in play_in(pool, Player.row_of, tasks, lambda task: task.point.setting, _died):
            yield row


def _pool(jobs: int) -> WorkerPool[Player]:
    return WorkerPool(jobs, Player, caller_works=False)


def _died(task: PointTask) -> Row:
    return failed(task.point, task.key, DIED)
