"""The copy thread: takes the next copy from the session when the link is free (twin of ``sim.timeline.copy_lane``).

Others wait for futures of copies, also before these have begun. The session is used by the host thread, by this thread,
and by the threads that call back at the end of GPU work. Each holds ``lock`` for that, so that others see its decisions
as a whole.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertId, Updates
from realrun.errors import LaneError
from realrun.execution.recorder import MachineRecorder
from realrun.experts.store import GpuSlots, HostExperts
from realrun.machine.lanes import Completion, Machine, MachineLane, Work


class CopyFuture:
    """A requested copy, which goes through three states: requested, issued by the copy thread, known to the session."""

    def __init__(self) -> None:
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._issued, self._known = threading.Lock(), threading.Lock()  # held until then; faster than events
        self._issued.acquire()
        self._known.acquire()

    def issued(self) -> Completion:
        """Block until the copy has begun, and return its completion. Raises LaneError if it never will."""
        with self._issued:
            pass
        if self._completion is None:
            assert self._error is not None
            raise LaneError.of("the copy lane", self._error) from self._error
        return self._completion

    def wait(self) -> None:
        """Block until the copy has ended."""
        self.issued().wait()

    def wait_known(self) -> None:
        """Block until the copy has ended and the session has been notified."""
        self.wait()
        with self._known:
            pass
        if self._error is not None:
            raise LaneError.of("the copy lane", self._error) from self._error

    ready_ns = property(lambda self: self.issued().ready_ns)
    start_ns = property(lambda self: self.issued().start_ns)
    end_ns = property(lambda self: self.issued().end_ns)

    def has_ended(self) -> bool:
        """True if the copy has ended, or will never begin."""
        return self._error is not None or (self._completion is not None and self._completion.has_ended())

    def begin(self, completion: Completion) -> None:
        """Set the completion of the copy, which is under way."""
        self._completion = completion
        self._issued.release()

    def set_known(self) -> None:
        """Signal that the session has been notified of the end."""
        self._known.release()

    def fail(self, error: BaseException) -> None:
        """Signal that the copy, or the notification of the session, has failed."""
        if self._error is None:
            self._error = error
            self._known.release()
            if self._completion is None:
                self._issued.release()

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Pass an error of the block, which delivers the copy, to all waiting threads."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise


# The time before the end of a copy at which the next one is chosen: launching takes an estimated 80 to 200 us.
AHEAD_NS = 300_000
LOOK_S = 50e-6  # between polls of a copy under way; chosen as a sixth of AHEAD_NS


@dataclass
class InFlight:
    """A copy that the session has started. ``began_ns``: when the link was free for it, as far as it is known."""

    copy: Copy
    future: CopyFuture
    began_ns: int


class Copying:
    """Serves the session's copies in its own thread, until ``stop``.

    If the machine copies asynchronously, the next copy is launched shortly before the present one ends, so that the
    link is not idle while this thread notices the end, notifies the session and takes the next copy.
    """

    def __init__(
        self, session: Session, machine: Machine, store: HostExperts, slots: GpuSlots, recorder: MachineRecorder
    ) -> None:
        self.lock = threading.Condition()
        self._session, self._machine, self._store = session, machine, store
        self._slots, self._recorder = slots, recorder
        self._futures: dict[ExpertId, CopyFuture] = {}
        self._read: set[ExpertId] = set()  # staged experts that were used before the session was notified
        self._in_flight: deque[InFlight] = deque()  # oldest first; the first is on the link
        self._results: list[tuple[Work, CopyFuture]] = []
        self._closing, self._rests = False, False
        self._error: BaseException | None = None
        self._scratch = machine.host_tensor((max(layout.size_bytes for layout in store.layouts),), torch.uint8)
        self._thread = threading.Thread(target=self._serve, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the present copy. Raises LaneError if a copy has failed."""
        with self.lock:
            self._closing = True
            self.lock.notify_all()
        self._thread.join()
        if self._error is not None:
            raise LaneError.of("the copy lane", self._error) from self._error

    def wait_rest(self) -> None:
        """Block until nothing is in flight, and nothing that is queued can start. Raises LaneError if a copy failed."""
        with self.lock:
            self._rests = False
            self.lock.notify_all()
            while not (self._rests or self._closing):
                self.lock.wait()
        if self._error is not None:
            raise LaneError.of("the copy lane", self._error) from self._error

    def abort(self, error: BaseException) -> None:
        """Fail every copy that has not begun, since what it waits for never comes."""
        with self.lock:
            self._error, self._closing = error, True
            self.lock.notify_all()

    def left_ns(self) -> int:
        """The rest of the copies in flight by the planner's costs, ns. The caller holds ``lock``."""
        if not self._in_flight:
            return 0
        first, *behind = self._in_flight
        return self._left_of(first) + sum(self._copy_ns(later.copy) for later in behind)

    def expert_bytes(self, layer: int) -> int:
        """The size of one expert, as in spans."""
        return self._session.costs[layer].expert_bytes

    def expect(self, ids: Iterable[ExpertId]) -> dict[ExpertId, CopyFuture]:
        """The futures of copies that are queued or running. The caller holds ``lock``."""
        return {expert_id: self._future(expert_id) for expert_id in ids}

    def send_result(self, work: Work) -> CopyFuture:
        """Do ``work``, a copy of the CPU's results to the GPU, directly after the present copy."""
        future = CopyFuture()
        with self.lock:
            if self._error is not None:
                future.fail(self._error)
            self._results.append((work, future))
            self.lock.notify_all()
        return future

    def used(self, expert_id: ExpertId) -> None:
        """GPU work that read the expert has ended: if the expert is in a staging slot, free the slot."""
        with self.lock:
            if expert_id in self._futures:
                self._read.add(expert_id)
            elif expert_id.expert in self._session.staged(expert_id.layer):
                self._session.computed(expert_id)
                self.released(expert_id)
                self.lock.notify_all()

    def released(self, expert_id: ExpertId) -> None:
        """Free a staging slot, as the session has. The caller holds ``lock``."""
        self._slots.release(expert_id)
        self._instant("release", expert_id)

    def updated(self, updates: Updates) -> None:
        """Apply cache updates that are due. The caller holds ``lock``."""
        for expert_id in updates.evicted:
            self._slots.evict(expert_id)
            self._instant("evict", expert_id)
        for swap in updates.adopted:
            self._slots.adopt(swap)
            self._instant("evict", swap.outgoing)
            self._instant("place", swap.incoming)
        self.lock.notify_all()

    def _future(self, expert_id: ExpertId) -> CopyFuture:
        future = self._futures.setdefault(expert_id, CopyFuture())
        if self._error is not None:
            future.fail(self._error)
        return future

    def _left_of(self, first: InFlight) -> int:
        return max(1, first.began_ns + self._copy_ns(first.copy) - self._machine.now_ns())

    def _copy_ns(self, copy: Copy) -> int:
        return self._session.costs[copy.key.layer].copy_ns

    def _serve(self) -> None:
        try:
            self._machine.begin_copying()
            with torch.inference_mode():
                while (job := self._next()) is not None:
                    job()
                    self._land()
        except BaseException as error:
            self._error = error
        why = self._error or LaneError("the run has ended before a copy that work waits for")
        with self.lock:
            self._closing = True
            self.lock.notify_all()
            for future in (*self._futures.values(), *(future for _, future in self._results)):
                future.fail(why)

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next job; None when stopped."""
        with self.lock:
            while not self._closing:
                look_again_s = self._machine.poll()
                if (job := self._startable()) is not None:
                    return job
                self._rests = True
                self.lock.notify_all()
                self.lock.wait(look_again_s)
        return None

    def _startable(self) -> Callable[[], None] | None:
        """The job that the link can start now. The caller holds ``lock``."""
        if self._results:
            work, future = self._results.pop(0)
            return lambda: self._carry_result(work, future)
        copy = self._session.next_copy()
        return None if copy is None else self._begin(copy)

    def _land(self) -> None:
        """Notify the session of every end, and launch the next copy, if any, behind each copy that is about to end."""
        while self._in_flight:
            first = self._in_flight[0]
            if len(self._in_flight) == 1 and (job := self._behind(first)) is not None:
                job()
            with first.future.delivering():
                first.future.wait()
                with self.lock:
                    self._copied(first.copy)
            first.future.set_known()

    def _behind(self, first: InFlight) -> Callable[[], None] | None:
        """Wait until little is left of a copy; the job that can directly follow it on the link."""
        while not first.future.has_ended() and self._left_of(first) > AHEAD_NS:
            time.sleep(LOOK_S)
        if first.future.has_ended():
            return None  # too late to be ahead
        with self.lock:
            if self._closing or self._results:
                return None
            self._machine.poll()
            copy = self._session.next_copy()
            return None if copy is None else self._begin(copy)

    def _begin(self, copy: Copy) -> Callable[[], None]:
        """Free the slots of a copy's victims; the job that launches the copy."""
        place = self._recorder.place
        leaving = [self._slots.buffer(victim) for victim in copy.victims]
        for victim, buffer in zip(copy.victims, leaving, strict=True):
            self._instant("evict", victim)
            if self._session.policy.writes_back == "alongside":
                self._write_back(victim, buffer, self._machine.back)
        target, future = self._slots.begin(copy), self._future(copy.key)
        self._in_flight.append(InFlight(copy, future, self._machine.now_ns()))
        return lambda: self._carry(copy, target, future, place)

    def _write_back(self, expert_id: ExpertId, buffer: torch.Tensor, lane: MachineLane) -> None:
        """Copy an expert to scratch memory on the host: its own weights there are the same, and may be in use.

        The traffic is real, but the bytes are not used. As in the simulator, the incoming copy starts at once into the
        same slot; a machine that needed the bytes would have to use another slot, or wait.
        """
        scratch = self._scratch[: len(buffer)]
        completion = lane.submit(lambda: scratch.copy_(buffer, non_blocking=True))
        layer, expert = expert_id
        self._recorder.add("d2h", completion, "writeback", layer, expert, 0, self.expert_bytes(layer))

    def _carry(self, copy: Copy, target: torch.Tensor, future: CopyFuture, place: tuple[str, int]) -> None:
        layer, expert = copy.key
        with future.delivering():
            completion = self._machine.copy_in(target, self._store.buffer(layer, expert))
        future.begin(completion)
        self._recorder.add("h2d", completion, copy.kind, layer, expert, 0, copy.expert_bytes, place=place)
        if self._session.policy.writes_back == "in turn":
            for written in self._session.written_back(copy):
                self._write_back(written, target, self._machine.link)

    def _copied(self, copy: Copy) -> None:
        """Notify the session of the end of a copy. The caller holds ``lock``."""
        self._in_flight.popleft()
        if self._in_flight:
            self._in_flight[0].began_ns = self._machine.now_ns()
        del self._futures[copy.key]
        if not self._session.copied(copy):
            self.released(copy.key)
        elif copy.key in self._read:
            self.used(copy.key)
        self._read.discard(copy.key)

    def _carry_result(self, work: Work, future: CopyFuture) -> None:
        with future.delivering():
            future.begin(self._machine.link.submit(work))
            future.wait()
        future.set_known()

    def _instant(self, kind: str, expert_id: ExpertId) -> None:
        layer, expert = expert_id
        self._recorder.instant(self._machine.now_ns(), kind, layer, -1, expert, self.expert_bytes(layer))
