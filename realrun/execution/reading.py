"""The disk thread: takes the next read from the session when the disk is free (twin of ``sim.timeline.disk_lane``).

It shares the lock of the copy thread, which it wakes when an expert has been read that a copy waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from policies.mechanism.host_tier import HostTier, Read
from policies.mechanism.session import Session
from policies.mechanism.views import ExpertId
from realrun.errors import LaneError
from realrun.execution.copying import CopyFuture, Copying
from realrun.execution.recorder import MachineRecorder, Timed
from realrun.experts.expert_file import HeldExperts
from realrun.machine.cores import usable_cores
from realrun.machine.lanes import Machine
from realrun.machine.thread_lane import settle_thread


class Reading:
    """Serves the session's reads in its own thread, until ``stop``."""

    def __init__(
        self, session: Session, machine: Machine, copying: Copying, held: HeldExperts, recorder: MachineRecorder
    ) -> None:
        assert isinstance(session.host, HostTier)
        self._session, self._host, self._machine = session, session.host, machine
        self._copying, self._held, self._recorder, self._lock = copying, held, recorder, copying.lock
        self._futures: dict[ExpertId, CopyFuture] = {}
        self._closing = False
        self._error: BaseException | None = None
        self._cores = usable_cores()
        self._thread = threading.Thread(target=self._serve, name="disk", daemon=True)

    def start(self) -> None:
        """Start the thread; record what the host holds."""
        for key in sorted(self._host.held):
            self._instant("keep", key)
        self._thread.start()

    def stop(self) -> None:
        """End after the present read. Raises LaneError if a read has failed."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join()
        if self._error is not None:
            raise LaneError.of("the disk lane", self._error) from self._error

    def arrivals(self, keys: Sequence[ExpertId]) -> dict[ExpertId, CopyFuture]:
        """The reads of those experts that are not held, in the order in which they arrive."""
        with self._lock:
            late = {key for key in keys if not self._host.holds(key)}
            return {key: self._future(key) for key in self._host.coming() if key in late}

    def computed(self, keys: Sequence[ExpertId]) -> None:
        """The CPU has computed these experts, and no longer reads them."""
        with self._lock:
            self._session.computed_on_cpu(keys)
            self._lock.notify_all()

    def _future(self, key: ExpertId) -> CopyFuture:
        future = self._futures.setdefault(key, CopyFuture())
        if self._error is not None:
            future.fail(self._error)
        return future

    def _serve(self) -> None:
        try:
            settle_thread(self._cores, 1)
            while (read := self._next()) is not None:
                self._read(read)
        except BaseException as error:
            self._error = error
            self._copying.abort(error)
        why = self._error or LaneError("the run has ended before a read that work waits for")
        with self._lock:
            for future in self._futures.values():
                future.fail(why)

    def _next(self) -> Read | None:
        """Wait for the next read; None when stopped."""
        with self._lock:
            while not self._closing:
                read = self._session.next_read()
                if read is not None:
                    for victim in read.victims:
                        self._instant("drop", victim)
                    return read
                self._lock.wait()
        return None

    def _read(self, read: Read) -> None:
        layer, expert = read.key
        start_ns = self._machine.now_ns()
        self._held.read(read, self._held.begin(read))
        took = Timed(start_ns, start_ns, self._machine.now_ns())
        self._recorder.add("disk", took, read.kind, layer, expert, 0, read.expert_bytes)
        with self._lock:
            self._session.has_read(read)
            future = self._futures.pop(read.key, None)
            self._lock.notify_all()
        if future is not None:
            future.begin(took)
            future.set_known()

    def _instant(self, kind: str, key: ExpertId) -> None:
        now_ns, (layer, expert) = self._machine.now_ns(), key
        at = Timed(now_ns, now_ns, now_ns)
        self._recorder.add("disk", at, kind, layer, expert, 0, self._copying.expert_bytes(layer))
