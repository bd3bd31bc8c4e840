"""The copy thread: pulls a copy from the session whenever the link is free (twin of ``sim.engine.copy_lane``).

The session is talked to by the host, by this thread, and by whoever learns that GPU work has ended. ``turn`` is held by
the one who does; the others see its decisions whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from policies.session import Session
from policies.views import Copy, ExpertId, Updates
from realrun.errors import LaneError
from realrun.execution.recorder import Recorder
from realrun.experts.expert_store import ExpertStore
from realrun.experts.gpu_slots import GpuSlots
from realrun.machine.lanes import Machine, Mark, Work


class Arrival:
    """A copy to come, for those who wait: issued by the copy thread, then under way, then known to the session."""

    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._error: BaseException | None = None
        self._issued, self._known = threading.Lock(), threading.Lock()  # held until then: quicker than events
        self._issued.acquire()
        self._known.acquire()

    def issued(self) -> Mark:
        """Block until the copy has begun; its mark. Raises LaneError if it never will."""
        with self._issued:
            pass
        if self._mark is None:
            assert self._error is not None
            raise LaneError.of("the copy lane", self._error) from self._error
        return self._mark

    def wait(self) -> None:
        """Block until the copy has ended."""
        self.issued().wait()

    def wait_known(self) -> None:
        """Block until the session has been told too."""
        self.wait()
        with self._known:
            pass
        if self._error is not None:
            raise LaneError.of("the copy lane", self._error) from self._error

    ready_ns = property(lambda self: self.issued().ready_ns)
    start_ns = property(lambda self: self.issued().start_ns)
    end_ns = property(lambda self: self.issued().end_ns)

    def begin(self, mark: Mark) -> None:
        """The copy is under way."""
        self._mark = mark
        self._issued.release()

    def know(self) -> None:
        """The session knows that it has arrived."""
        self._known.release()

    def fail(self, error: BaseException) -> None:
        """It will never come, or will never be known."""
        if self._error is None:
            self._error = error
            self._known.release()
            if self._mark is None:
                self._issued.release()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """The block brings it; who waits is told if that fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.know()


class Copying:
    """Serves the session's copies in a thread of its own, until ``stop``."""

    def __init__(
        self, session: Session, machine: Machine, store: ExpertStore, slots: GpuSlots, recorder: Recorder
    ) -> None:
        self.turn = threading.Condition()
        self._session, self._machine, self._store = session, machine, store
        self._slots, self._recorder = slots, recorder
        self._arrivals: dict[ExpertId, Arrival] = {}
        self._read: set[ExpertId] = set()  # staged experts that were used before the session knew of their arrival
        self._began: tuple[Copy, int] | None = None  # the running copy, and when it began
        self._results: list[tuple[Work, Arrival]] = []
        self._closing = False
        self._error: BaseException | None = None
        self._scratch = machine.host_tensor((max(layout.bytes for layout in store.layouts),), torch.uint8)
        self._thread = threading.Thread(target=self._serve, name="link", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the copy that is running; nothing else comes. Raises LaneError if a copy has failed."""
        with self.turn:
            self._closing = True
            self.turn.notify_all()
        self._thread.join()
        if self._error is not None:
            raise LaneError.of("the copy lane", self._error) from self._error

    def left_ns(self) -> int:
        """What is left of the running copy by the planner's costs; called in one's turn."""
        if self._began is None:
            return 0
        copy, began = self._began
        return max(1, began + self._session.costs[copy.id.layer].copy_ns - self._machine.now_ns())

    def expert_bytes(self, layer: int) -> int:
        """Bytes of one expert, as spans count them."""
        return self._session.costs[layer].bytes

    def expect(self, ids: Iterable[ExpertId]) -> dict[ExpertId, Arrival]:
        """The arrivals of copies that are queued or running; called in one's turn."""
        return {id: self._arrival(id) for id in ids}

    def send_result(self, work: Work) -> Arrival:
        """Do ``work``, a copy of the CPU's results to the GPU, next after the copy that is running."""
        arrival = Arrival()
        with self.turn:
            if self._error is not None:
                arrival.fail(self._error)
            self._results.append((work, arrival))
            self.turn.notify_all()
        return arrival

    def used(self, id: ExpertId) -> None:
        """GPU work that read ``id`` has ended: if it lies in a staging slot, the slot is free."""
        with self.turn:
            if id in self._arrivals:
                self._read.add(id)
            elif id.expert in self._session.staged(id.layer):
                self._session.computed(id)
                self.released(id)
                self.turn.notify_all()

    def released(self, id: ExpertId) -> None:
        """The session has freed a staging slot; called in one's turn."""
        self._slots.release(id)
        self._instant("release", id)

    def updated(self, updates: Updates) -> None:
        """Cache updates have become due; called in one's turn."""
        for swap in updates.adopted:
            self._slots.adopt(swap)
            self._instant("evict", swap.outgoing)
            self._instant("place", swap.incoming)
        self.turn.notify_all()

    def _arrival(self, id: ExpertId) -> Arrival:
        arrival = self._arrivals.setdefault(id, Arrival())
        if self._error is not None:
            arrival.fail(self._error)
        return arrival

    def _serve(self) -> None:
        try:
            self._machine.begin_copying()
            with torch.inference_mode():
                while (job := self._next()) is not None:
                    job()
        except BaseException as error:
            self._error = error
        self._let_down(self._error or LaneError("the run has ended before a copy that work waits for"))

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do."""
        with self.turn:
            while not self._closing:
                if self._results:
                    work, arrival = self._results.pop(0)
                    return lambda: self._carry_result(work, arrival)
                if (copy := self._session.next_copy()) is not None:
                    return self._begin(copy)
                self.turn.wait()
        return None

    def _begin(self, copy: Copy) -> Callable[[], None]:
        """Its victims leave."""
        now, place = self._machine.now_ns(), self._recorder.place
        leaving = [self._slots.buffer(victim) for victim in copy.victims]
        for victim, buffer in zip(copy.victims, leaving, strict=True):
            self._instant("evict", victim)
            if self._session.policy.writes_back:
                self._write_back(victim, buffer)
        target, arrival = self._slots.begin(copy), self._arrival(copy.id)
        self._began = copy, now
        return lambda: self._carry(copy, target, arrival, place)

    def _write_back(self, id: ExpertId, buffer: torch.Tensor) -> None:
        """Back to the host: into scratch memory, since the weights there are the same and may be being read.

        What is moved is real traffic; the bytes written back are not used. The incoming copy begins at once, into the
        same slot, as the simulator has it: a machine that needed the bytes would give it another slot, or wait.
        """
        scratch = self._scratch[: len(buffer)]
        mark = self._machine.back.submit(lambda: scratch.copy_(buffer, non_blocking=True))
        self._recorder.add("d2h", mark, "writeback", id.layer, id.expert, 0, self.expert_bytes(id.layer))

    def _carry(self, copy: Copy, target: torch.Tensor, arrival: Arrival, place: tuple[str, int]) -> None:
        layer, expert = copy.id
        with arrival.coming():
            mark = self._machine.copy_in(target, self._store.buffer(layer, expert))
            arrival.begin(mark)
            self._recorder.add("h2d", mark, copy.kind, layer, expert, 0, copy.bytes, place=place)
            mark.wait()
            with self.turn:
                self._copied(copy)

    def _copied(self, copy: Copy) -> None:
        """The session is told; called in one's turn."""
        self._began = None
        del self._arrivals[copy.id]
        if not self._session.copied(copy):
            self.released(copy.id)
        elif copy.id in self._read:
            self.used(copy.id)
        self._read.discard(copy.id)

    def _carry_result(self, work: Work, arrival: Arrival) -> None:
        with arrival.coming():
            arrival.begin(self._machine.link.submit(work))
            arrival.wait()

    def _instant(self, kind: str, id: ExpertId) -> None:
        self._recorder.instant(self._machine.now_ns(), kind, id.layer, -1, id.expert, self.expert_bytes(id.layer))

    def _let_down(self, error: BaseException) -> None:
        """Nobody is left waiting for a thread that has ended."""
        with self.turn:
            for arrival in (*self._arrivals.values(), *(arrival for _, arrival in self._results)):
                arrival.fail(error)
