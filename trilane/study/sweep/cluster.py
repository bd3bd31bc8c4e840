"""The workers of a Dask cluster as a pool. They have the same Trilane, and the same files under the same names."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from typing import Any

from trilane.common.quoting import quoted
from trilane.study.sweep.axes import SweepError
from trilane.study.worker import WorkerDiedError

MOST_POINTS = 8  # of one piece of work: so many are lost with a worker of the cluster
PIECES_AHEAD = 2  # at least, for each thread of the cluster
TIMEOUT = "10s"  # for the scheduler to answer
WORKERS_TIMEOUT = "30s"  # for the first of its workers
_ADDRESS = re.compile(r"((tcp|tls|wss?|ucx)://)?[^\s/]+:\d{1,5}|inproc://\S+")


class DaskPool:
    """Runs every task with a new state, made by ``state``."""

    def __init__(self, client: Any, state: Callable[[], Any]) -> None:
        self._client = client
        self._executor = client.get_executor(pure=False)
        self._state = state

    def most_together(self, points: int) -> int:
        """How many of ``points`` to play in one task, so that all threads end at nearly the same time."""
        threads: int = sum(self._client.nthreads().values())
        return max(1, min(MOST_POINTS, points // (PIECES_AHEAD * max(1, threads))))

    def submit(self, function: Callable[..., Any], *args: Any, setting: str) -> Future[Any]:
        """Call ``function(state, *args)`` on the cluster.

        The future raises WorkerDiedError if workers die of it, ConnectionError if the scheduler is lost, and SweepError
        if the cluster has no such function.
        """
        result: Future[Any] = Future()
        called = self._executor.submit(_run, self._state, function, args)
        called.add_done_callback(lambda done: _copy_outcome(done, result))
        return result

    def as_completed(self, futures: Sequence[Future[Any]]) -> Iterator[Future[Any]]:
        return as_completed(futures)


def _run(state: Callable[[], Any], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """On a worker of the cluster."""
    return function(state(), *args)


def _copy_outcome(done: Future[Any], result: Future[Any]) -> None:
    """Pass on the result or the error of a Dask future, the error as one of Trilane's."""
    if done.cancelled():  # how the futures of a lost scheduler end
        result.set_exception(ConnectionError("its futures were cancelled"))
    elif (error := done.exception()) is None:
        result.set_result(done.result())
    elif type(error).__name__ == "KilledWorker":
        result.set_exception(WorkerDiedError(str(error)))
    else:
        result.set_exception(SweepError(f"the cluster cannot play: {type(error).__name__}: {error}"))


@contextmanager
def dask_pool(address: str, state: Callable[[], Any]) -> Iterator[DaskPool]:
    """The cluster at ``address``, for as long as the ``with`` block lasts.

    Raises SweepError without ``distributed``, without an answer from ``address``, without workers, where workers lack
    Trilane, and if the scheduler is lost meanwhile.
    """
    client = _connected(address)
    try:
        _wait_for_workers(client, address)
        yield DaskPool(client, state)
    except (OSError, RuntimeError) as error:
        raise SweepError(
            f"the Dask scheduler at {address!r} was lost ({type(error).__name__}: {error}); start the same sweep "
            f"again: the rows that came before are kept next to its output"
        ) from None
    finally:
        with _quiet():
            client.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """A lost connection closes with tracebacks of its own, although our error has reported it."""
    log = logging.getLogger("distributed.client")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _connected(address: str) -> Any:
    if _ADDRESS.fullmatch(address) is None:
        raise SweepError(f"--dask: expected an address such as tcp://10.0.0.1:8786, got {quoted(address)}")
    try:
        from distributed import Client
    except ImportError:
        raise SweepError("--dask needs the package distributed: pip install 'trilane[dask]'") from None
    try:
        connect: Any = Client
        return connect(address, timeout=TIMEOUT, set_as_default=False)
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
