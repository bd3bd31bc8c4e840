"""Playing the points of a sweep in this process, in worker processes or on a Dask cluster."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TypeAlias

from trilane.study.pool import WorkerPool
from trilane.study.sweep.cluster import DaskPool, dask_pool
from trilane.study.sweep.point import Player, PointTask, Row, failed
from trilane.study.worker import WorkerDiedError

DIED = "WorkerDiedError: the process that played this point died, and died again when it played it alone"


Pool: TypeAlias = WorkerPool[Player] | DaskPool  # of this machine, or of a cluster


def played_rows(tasks: Sequence[PointTask], jobs: int = 1, dask: str | None = None) -> Generator[Row, None, None]:
    """Rows in the order in which they finish. Processes end with this generator, and with this process.

    Where a worker dies, its points are played once more at the end, each alone; if the worker dies again, that is an
    error of the point. Raises WorkerError if processes cannot be started, and what ``dask_pool`` raises.
    """
    if not tasks:
        return
    if dask is not None:
        with dask_pool(dask, Player) as cluster:
            yield from _with_second_tries(cluster, _pieces(tasks, cluster.most_together(len(tasks))))
    else:
        with WorkerPool(min(jobs, max(2, len(tasks))), Player, caller_works=False) as pool:
            yield from _with_second_tries(pool, _pieces(tasks, 1))


def _pieces(tasks: Iterable[PointTask], most: int) -> list[list[PointTask]]:
    """Tasks of one setting, at most ``most`` together."""
    by_setting: dict[str, list[PointTask]] = {}
    for task in tasks:
        by_setting.setdefault(task.point.setting, []).append(task)
    return [group[first : first + most] for group in by_setting.values() for first in range(0, len(group), most)]


def _with_second_tries(pool: Pool, pieces: Sequence[Sequence[PointTask]]) -> Iterator[Row]:
    lost: list[PointTask] = []
    yield from _rows(pool, pieces, lost)
    for task in lost:
        lost_again: list[PointTask] = []
        yield from _rows(pool, [[task]], lost_again)
        if lost_again:
            yield failed(task.point, task.key, DIED)


def _rows(pool: Pool, pieces: Sequence[Sequence[PointTask]], lost: list[PointTask]) -> Iterator[Row]:
    """Rows as they finish; tasks whose worker has died become ``lost``."""
    waiting = {pool.submit(Player.rows, piece, setting=piece[0].point.setting): piece for piece in pieces}
    for future in pool.as_completed(list(waiting)):
        piece = waiting.pop(future)
        try:
            yield from future.result()
        except WorkerDiedError:
            lost.extend(piece)
