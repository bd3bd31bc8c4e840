"""Playing tasks on a Dask cluster, whose workers have the same Trilane and see the same files under the same names."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.point import Player, Row, failed
from trilane.study.sweep.setting_queue import Task, Turns
from trilane.study.sweep.workers import DIED

MOST_POINTS = 8  # of one piece of work: what a cluster loses with a worker, and the sweep if it is killed
PIECES_AHEAD = 2  # for each thread of the cluster
TIMEOUT = "10s"  # for the scheduler to answer
WORKERS_TIMEOUT = "30s"  # for the first of its workers
_ADDRESS = re.compile(r"((tcp|tls|wss?|ucx)://)?[^\s/]+:\d{1,5}|inproc://\S+")


def play_on_cluster(tasks: Sequence[Task], address: str) -> Generator[Row, None, None]:
    """Rows as they finish. Of a worker that dies, the points are tried once more at the end, each alone.

    Raises SweepError without ``distributed``, without an answer from ``address``, without workers, where workers lack
    Trilane, and if the scheduler is lost meanwhile.
    """
    client, as_completed = _connected(address)
    lost: list[Task] = []
    try:
        _wait_for_workers(client, address)
        yield from _rows(client, as_completed, Turns(tasks), lost)
        for task in lost:
            again: list[Task] = []
            yield from _rows(client, as_completed, Turns([task]), again)
            if again:
                yield failed(task.point, task.key, DIED)
    except (OSError, RuntimeError) as error:
        raise SweepError(
            f"the Dask scheduler at {address!r} was lost ({type(error).__name__}: {error}); start the same sweep "
            f"again: the rows that came before are kept beside its output"
        ) from None
    finally:
        with _quiet():
            client.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """A connection that was lost closes with tracebacks of its own; our errors have said what happened."""
    log = logging.getLogger("distributed.client")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _connected(address: str) -> tuple[Any, Any]:
    """A client, and what waits for its futures."""
    if _ADDRESS.fullmatch(address) is None:
        raise SweepError(f"--dask: expected an address such as tcp://10.0.0.1:8786, got {address!r}")
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise SweepError("--dask needs the package distributed: pip install 'trilane[dask]'") from None
    try:
        connect: Any = Client
        return connect(address, timeout=TIMEOUT, set_as_default=False), as_completed
    except (OSError, ValueError) as error:
        raise SweepError(f"no Dask scheduler answers at {address!r} within {TIMEOUT}: {error}") from None


def _wait_for_workers(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=WORKERS_TIMEOUT)
    except TimeoutError:
        raise SweepError(
            f"the Dask scheduler at {address!r} has had no workers for {WORKERS_TIMEOUT}; start some: "
            f"dask worker {address}"
        ) from None


def _rows(client: Any, as_completed: Any, turns: Turns, lost: list[Task]) -> Generator[Row, None, None]:
    """Rows as they finish; points of pieces whose workers have died are ``lost``."""
    pieces: dict[Any, list[Task]] = {}
    futures = as_completed(loop=client.loop)

    def hand_out() -> None:
        threads = max(sum(client.nthreads().values()), 1)
        while turns.left and len(pieces) < PIECES_AHEAD * threads:
            piece = turns.some(None, max(1, min(MOST_POINTS, turns.left // (PIECES_AHEAD * threads))))
            future = client.submit(play_piece, piece, pure=False)
            pieces[future] = piece
            futures.add(future)

    hand_out()
    for future in futures:
        piece = pieces.pop(future)
        hand_out()
        rows = _result(future)
        if rows is None:
            lost.extend(piece)
        yield from rows or ()


def _result(future: Any) -> list[Row] | None:
    """The rows of a piece; None if its workers have died. Raises SweepError for what is the cluster's own fault, and
    ConnectionError if it is gone."""
    try:
        rows: list[Row] = future.result()
    except CancelledError as error:  # how futures of a lost scheduler end
        raise ConnectionError(str(error)) from None
    except Exception as error:
        if type(error).__name__ == "KilledWorker":
            return None
        raise SweepError(f"the cluster cannot play: {type(error).__name__}: {error}") from error
    return rows


def play_piece(tasks: Sequence[Task]) -> list[Row]:
    """What a worker of the cluster runs."""
    player = Player()
    return [player.row(task.point, task.key) for task in tasks]
