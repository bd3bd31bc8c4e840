"""The workers of a Dask cluster as a pool. They have the same Trilane, and the same files under the same names."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from trilane.common.quoting import quoted
from trilane.study.pool import WorkerDiedError
from trilane.study.sweep.axes import SweepError

MOST_POINTS = 8  # of one piece of work: so many are lost with a worker of the cluster
PIECES_AHEAD = 2  # at least, for each thread of the cluster
TIMEOUT = "10s"  # for the scheduler to answer
WORKERS_TIMEOUT = "30s"  # for the first of its workers
_ADDRESS = re.compile(r"((tcp|tls|wss?|ucx)://)?[^\s/]+:\d{1,5}|inproc://\S+")


class DaskPool(NamedTuple):
    """The cluster of a ``distributed.Client``; every task gets a new state, made by ``state``."""

    client: Any
    state: Callable[[], Any]

    def together(self, tasks: int) -> int:
        """Tasks of one setting to submit as one, so that all threads of the cluster end at nearly the same time."""
        threads: int = sum(self.client.nthreads().values())
        return max(1, min(MOST_POINTS, tasks // (PIECES_AHEAD * max(1, threads))))

    def submit(self, function: Callable[..., Any], *args: Any, setting: Hashable = None) -> DaskFuture:
        """Call ``function(state, *args)`` on the cluster."""
        return DaskFuture(self.client.submit(_with_state, self.state, function, args, pure=False))

    def as_completed(self, futures: Sequence[DaskFuture]) -> Iterator[DaskFuture]:
        """Futures of this pool in the order in which they finish."""
        import distributed

        as_completed: Any = distributed.as_completed
        return map(DaskFuture, as_completed([one.future for one in futures], loop=self.client.loop))


class DaskFuture(NamedTuple):
    """A ``distributed.Future`` whose errors are those of Trilane; equal futures are of one task."""

    future: Any

    def result(self) -> Any:
        """The result. Raises WorkerDiedError if workers died of the task, ConnectionError if the scheduler is lost, and
        SweepError if the cluster has no such function."""
        if self.future.cancelled():  # how the futures of a lost scheduler end
            raise ConnectionError("its futures were cancelled")
        error = self.future.exception()
        if type(error).__name__ == "KilledWorker":
            raise WorkerDiedError(str(error))
        if error is not None:
            raise SweepError(f"the cluster cannot play: {type(error).__name__}: {error}")
        return self.future.result()


def _with_state(state: Callable[[], Any], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    return function(state(), *args)


@contextmanager
def dask_pool(address: str, state: Callable[[], Any]) -> Iterator[DaskPool]:
    """The cluster at ``address``, for as long as the ``with`` block lasts.

    Raises SweepError without ``distributed``, without an answer from ``address``, without workers, where workers lack
    Trilane, and if the scheduler is lost meanwhile.
    """
    client = _connected(address)
    log = logging.getLogger("distributed.client")
    level = log.level
    try:
        yield DaskPool(client, state)
    except (OSError, RuntimeError) as error:
        raise SweepError(
            f"the Dask scheduler at {address!r} was lost ({type(error).__name__}: {error}); start the same sweep "
            f"again: the rows that came before are kept next to its output"
        ) from None
    finally:
        log.setLevel(logging.CRITICAL + 1)  # a lost connection closes with tracebacks, although our error reported it
        client.close()
        log.setLevel(level)


def _connected(address: str) -> Any:
    """A client whose scheduler answers and has workers. Raises SweepError."""
    if _ADDRESS.fullmatch(address) is None:
        raise SweepError(f"--dask: expected an address such as tcp://10.0.0.1:8786, got {quoted(address)}")
    try:
        from distributed import Client
    except ImportError:
        raise SweepError("--dask needs the package distributed: pip install 'trilane[dask]'") from None
    try:
        connect: Any = Client
        client = connect(address, timeout=TIMEOUT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SweepError(f"no Dask scheduler answers at {address!r} within {TIMEOUT}: {error}") from None
    try:
        client.wait_for_workers(1, timeout=WORKERS_TIMEOUT)
    except TimeoutError:
        client.close()
        raise SweepError(
            f"the Dask scheduler at {address!r} has had no workers for {WORKERS_TIMEOUT}; start some: "
            f"dask worker {address}"
        ) from None
    return client
