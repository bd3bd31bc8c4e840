"""The disk lane: one read of an expert into the host's memory after another; the CPU's experts that wait for theirs.

The CPU computes the experts of a layer that are held when its share begins, and then the others as they have been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import simpy

from policies.mechanism.host_tier import HostTier, Read
from policies.mechanism.session import Session
from policies.mechanism.shared_host import SharedReads
from policies.mechanism.views import ExpertCosts, ExpertId
from sim.runs.spans import SpanRecorder
from sim.timeline.clock import Clock, Moment
from sim.timeline.cpu_lane import CpuBatch, CpuLane


class DiskLane:
    """Serves the reads into ``host``, of which the ``reader`` says the next; each of ``landed`` is called with the
    expert of one that has ended. ``costs``: of all layers."""

    def __init__(
        self, clock: Clock, recorder: SpanRecorder, costs: Sequence[ExpertCosts], host: HostTier,
        reader: Session | SharedReads,
    ) -> None:
        self.clock, self.recorder, self._costs, self._host, self._reader = clock, recorder, costs, host, reader
        self.landed: list[Callable[[ExpertId], None]] = []
        self._queued_ns = {"read": 0, "read_ahead": 0}  # when the latest of each kind was queued
        self._in_effect = True  # whether the last plan is
        self._busy = self._resting = False
        self._until_ns = 0  # end of the last read that has begun

    def remaining_ns(self) -> int:
        """Time in ns that is left of the running read."""
        return max(self._until_ns - self.clock.now, 0)

    def start(self) -> None:
        """Record what the host holds before the first token."""
        for key in sorted(self._host.held):
            self._instant("keep", key)

    def hold(self) -> None:
        """Note a plan that takes effect later: until ``start_queued("read")`` its reads may not start."""
        self._in_effect, self._queued_ns["read_ahead"] = False, self.clock.now
        self.wake()

    def start_queued(self, kind: Literal["read", "read_ahead"]) -> None:
        """Note that the session may have new reads of this kind, which may start."""
        self._queued_ns[kind] = self.clock.now
        if kind == "read":
            self._in_effect = True
        self.wake()

    def wake(self) -> None:
        """Start the next read if the disk is free."""
        if self._busy:
            return
        read = self._reader.next_read(self._in_effect)
        if read is None:
            self._resting = True
        else:
            self._begin(read)

    def _begin(self, read: Read) -> None:
        now_ns = self.clock.now
        ready_ns = now_ns if self._resting else self._queued_ns[read.kind]
        self._busy, self._resting = True, False
        for victim in read.victims:
            self._instant("drop", victim)
        layer, expert = read.key
        self._until_ns = now_ns + self._costs[layer].of(expert).read_ns
        Moment(self.clock, self._until_ns, (read, ready_ns, now_ns), self._end)

    def _end(self, event: simpy.Event) -> None:
        read, ready_ns, start_ns = event._value
        now_ns, recorder, (layer, expert) = self.clock.now, self.recorder, read.key
        recorder.rows.append(
            ("disk", ready_ns, start_ns, now_ns, read.kind, recorder.phase, recorder.step, layer, -1, expert, 0,
             read.expert_bytes)
        )
        self._busy = False
        self._reader.has_read(read)
        for landed in self.landed:
            landed(read.key)
        self.wake()

    def _instant(self, kind: str, key: ExpertId) -> None:
        now_ns, recorder, (layer, expert) = self.clock.now, self.recorder, key
        size_bytes = self._costs[layer].of(expert).expert_bytes
        recorder.rows.append(
            ("disk", now_ns, now_ns, now_ns, kind, recorder.phase, recorder.step, layer, -1, expert, 0, size_bytes)
        )


class WaitingExpert(NamedTuple):
    """An expert that the CPU computes once it has been read: arguments of ``CpuLane.add``."""

    kind: str
    workload: dict[int, int]
    ready_ns: int
    layer: int
    follows: bool


class ReadExperts:
    """The experts that the CPU computes of a GPU's layers: those that the host holds at once, the others as they are
    read.

    ``landed()`` is called when one of these layers has been read, ``shared(joins)`` when all of a share of the CPU have
    been computed.
    """

    def __init__(
        self, disk: DiskLane, session: Session, cpu: CpuLane, landed: Callable[[], None],
        shared: Callable[[int], None],
    ) -> None:
        assert session.host is not None
        self._disk, self._session, self._host, self._cpu = disk, session, session.host, cpu
        self._landed, self._shared = landed, shared
        self.arrived_ns: dict[ExpertId, int] = {}  # when each expert was last read
        self._waiting: dict[ExpertId, list[WaitingExpert]] = {}
        self._batches = Counter[tuple[str, int]]()  # of a share that have not ended, by kind and layer of its experts
        disk.landed.append(self._land)

    def add(
        self, kind: str, experts: Sequence[int], workload: dict[int, int], ready_ns: int, layer: int,
        follows: bool = False,
    ) -> None:
        """``CpuLane.add``, now of those experts that are held and of each other one when it has been read."""
        target = layer + (kind == "precompute")
        ids = self._session.residency.ids[target]
        here = [expert for expert in experts if self._host.holds(ids[expert])]
        late = [expert for expert in experts if not self._host.holds(ids[expert])]
        self._batches[kind, target] = bool(here) + len(late)
        if here:
            self._cpu.add(kind, here, workload, ready_ns, layer, follows)
        for place, expert in enumerate(late):
            waiting = WaitingExpert(kind, workload, ready_ns, layer, follows or bool(here) or place > 0)
            self._waiting.setdefault(ids[expert], []).append(waiting)

    def end_batch(self, batch: CpuBatch) -> None:
        """Handle the end of experts on the CPU, which the host need not hold any more."""
        ids, share = self._session.residency.ids[batch.target], (batch.kind, batch.target)
        self._session.computed_on_cpu([ids[expert] for expert in batch.experts])
        self._disk.wake()
        self._batches[share] -= 1
        if not self._batches[share]:
            self._shared(batch.joins)

    def _land(self, read: ExpertId) -> None:
        """Handle the end of a read: of an expert of these layers, what waits for it goes on."""
        key, now_ns = self._host.own(read), self._disk.clock.now
        if key is None:
            return
        self.arrived_ns[key] = now_ns
        for kind, workload, ready_ns, at_work, follows in self._waiting.pop(key, ()):
            self._cpu.add(kind, [key.expert], workload, max(ready_ns, now_ns), at_work, follows)
        self._landed()
