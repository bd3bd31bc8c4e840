"""The host-to-device lane: pulls one copy at a time from the session, and carries CPU results where they queue here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import simpy

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertCosts, ExpertId, Swap, Upload
from sim.runs.spans import SpanRecorder
from sim.timeline.clock import Clock, Moment
from sim.timeline.lanes import Lane, Neighbour, SharedMemory


class CpuResult(NamedTuple):
    """A transfer to the GPU ahead of experts: the sum of a layer's CPU experts, or what another GPU hands over.
    ``done`` is called when it has arrived."""

    layer: int
    tokens: int
    duration_ns: int
    size_bytes: int
    done: Callable[[], object]
    ready_ns: int
    kind: str


class CopyLane:
    """Serves the session's copies; ``arrived(copy)`` is called at the end of each.

    Experts that a policy writes back take d2h, longer by what they overlap with copies and, until ``cpu_until_ns()``,
    with CPU experts, as far as these are known when they start: with the copy or, in turn, at its end, and then the
    next copy waits for them. A copy could have started when it was queued or, where the lane had to rest until a slot
    came free or a pin was lifted, when that happened. With ``gpu_until_ns`` a demand load starts no earlier than the
    GPU has done what it was given, and ``by_gpu`` could start no earlier, since the GPU makes it.
    """

    def __init__(
        self, clock: Clock, memory: SharedMemory, recorder: SpanRecorder, costs: Sequence[ExpertCosts],
        session: Session, d2h: Lane, cpu_until_ns: Callable[[], int], arrived: Callable[[Copy], None],
        gpu_until_ns: Callable[[], int] | None = None, by_gpu: bool = False, link: int = SharedMemory.H2D,
    ) -> None:
        self._clock, self._memory, self._recorder, self._costs = clock, memory, recorder, costs
        self._session, self._d2h, self._cpu_until_ns, self._arrived = session, d2h, cpu_until_ns, arrived
        self._gpu_until_ns, self._by_gpu, self._link = gpu_until_ns, by_gpu, link
        self._results: deque[CpuResult] = deque()
        self._busy = False
        self._demand_may_start = True
        self._queued_ns = {"demand": 0, "prefetch": 0}  # when the latest of each kind was queued
        self._requested_ns: dict[ExpertId, int] = {}  # when each swap was
        self._slots = dict(session.residency.staging)  # free staging slots, as last seen
        self._slot_since_ns = dict.fromkeys(self._slots, 0)  # when there last was one again
        self._resting = False  # whether the free lane has found no work that could start
        self._in_turn = session.policy.writes_back == "in turn"
        self.read_ns: Mapping[ExpertId, int] = {}  # when each expert was last read from a disk
        self.began_ns = 0  # when the running copy, or the last one, began
        self._rest: simpy.Event | None = None  # when nothing is left that could start, if waited for
        self._gpu_since_ns = 0  # from when on the GPU had nothing to do, for which a copy has waited

    def start_queued(self, kind: Literal["demand", "prefetch"]) -> None:
        """Note that the session may have new copies of this kind, which may start."""
        self._queued_ns[kind] = self._clock.now
        self._demand_may_start = True
        self.wake()

    def hold_demand(self) -> None:
        """Note a plan that takes effect later: until ``start_queued``, no demand loads may start, only other copies."""
        self._demand_may_start = False
        self.wake()

    def note_swaps(self, swaps: Sequence[Swap | Upload]) -> None:
        """Note the swaps that the session has queued; the caller wakes the lane."""
        self._requested_ns.update(dict.fromkeys([swap.incoming for swap in swaps], self._clock.now))

    def wake(self) -> None:
        """Start the next piece of work if the lane is free."""
        if self._busy:
            return
        if self._results:
            self._start_result()
            return
        copy = self._session.next_copy(self._demand_may_start)
        if copy is None:
            self._resting = True
            if self._rest is not None:
                self._rest.succeed()
                self._rest = None
        else:
            self._begin_copy(copy)

    def await_rest(self) -> simpy.Event | None:
        """An event when nothing is left that could start; None if that is so now."""
        if self._busy:
            self._rest = simpy.Event(self._clock)
        return self._rest

    def remaining_ns(self) -> int:
        """Time in ns that is left of the running transfer, or of the write-back for which the lane waits."""
        if not self._busy:
            return 0
        return self._memory.remaining_ns(self._link) or max(self._d2h.free_ns - self._clock.now, 0)

    def backlog_ns(self) -> int:
        """Time in ns of the rest of the running transfer, and of all that waits for the lane, without contention."""
        return self.remaining_ns() + self._session.queued_copies * self._costs[0].copy_ns

    def send_result(
        self, layer: int, tokens: int, duration_ns: int, size_bytes: int, done: Callable[[], object],
        kind: str = "result",
    ) -> None:
        """Carry the CPU experts' result to the GPU, next after the copy that is running."""
        self._results.append(CpuResult(layer, tokens, duration_ns, size_bytes, done, self._clock.now, kind))
        self.wake()

    def release(self, staged: ExpertId) -> None:
        """Record that a staging slot came free."""
        now_ns = self._clock.now
        for quota, free in self._session.residency.staging.items():
            if free and not self._slots[quota]:
                self._slot_since_ns[quota] = now_ns
            self._slots[quota] = free
        layer, expert = staged
        self._recorder.instant(now_ns, "release", layer, -1, expert, self._costs[layer].of(expert).expert_bytes)

    def free_staged_at(self, end_ns: int, staged: ExpertId) -> None:
        """Free the slot of a staged expert at ``end_ns``, when the GPU span that uses it ends."""
        Moment(self._clock, end_ns, staged, self._free_staged)

    def _free_staged(self, event: simpy.Event) -> None:
        staged = event.value
        assert isinstance(staged, ExpertId)
        self._session.computed(staged)
        self.release(staged)
        self.wake()

    def _begin_copy(self, copy: Copy) -> None:
        """Start a copy, once the GPU has done what it was given if it has to wait for that."""
        until_ns = self._gpu_until_ns() if self._gpu_until_ns and copy.kind == "demand" else 0
        if until_ns > self._clock.now:
            self._busy = True
            Moment(self._clock, until_ns, copy, self._gpu_done)
        else:
            self._start(copy)

    def _gpu_done(self, event: simpy.Event) -> None:
        copy = event.value
        assert isinstance(copy, Copy)
        self._gpu_since_ns = self._clock.now
        self._begin_copy(copy)

    def _start(self, copy: Copy) -> None:
        self._busy = True
        self.began_ns = now_ns = self._clock.now
        recorder = self._recorder
        layer, expert = copy.key
        copy_ns = self._costs[layer].of(expert).copy_ns
        for victim in copy.victims:
            size_bytes = self._costs[victim.layer].of(victim.expert).expert_bytes
            recorder.instant(now_ns, "evict", victim.layer, -1, victim.expert, size_bytes)
        if not self._in_turn:
            until_ns = now_ns + copy_ns * 1000 // self._costs[layer].both_ways_permille
            self._write_back(copy, now_ns, until_ns + self._session.queued_copies * copy_ns)
        self._copy, self._begin = copy, (self._ready_ns(copy, now_ns), now_ns, recorder.step, recorder.phase)
        self._resting = False
        self._memory.start(self._link, (copy_ns,), self._end)

    def _write_back(self, copy: Copy, now_ns: int, copies_until_ns: int) -> int:
        """Reserve d2h from ``now_ns`` on for what goes back with a copy, next to copies until ``copies_until_ns``;
        return the end in ns."""
        for layer, expert in self._session.written_back(copy):
            costs = self._costs[layer].of(expert)
            rate = costs.both_ways_permille
            copies = Neighbour(rate, lambda: copies_until_ns)
            experts = Neighbour(costs.copy_permille, self._cpu_until_ns)
            start_ns = max(now_ns, self._d2h.free_ns)
            duration_ns = experts.slowed(copies.slowed(costs.writeback_ns, start_ns), start_ns)
            end_ns = self._d2h.reserve(now_ns, duration_ns, "writeback", layer, expert, 0, costs.expert_bytes)
            self._memory.write_back(start_ns, end_ns, rate, self._link)
            now_ns = end_ns if self._in_turn else now_ns
        return now_ns

    def _ready_ns(self, copy: Copy, now_ns: int) -> int:
        """Time in ns at which the copy, which starts now, could have started."""
        queued_ns = self._requested_ns.pop(copy.key) if copy.kind == "swap" else self._queued_ns[copy.kind]
        if copy.into == "staging":
            self._slots[copy.kind] -= 1
            queued_ns = max(queued_ns, self._slot_since_ns[copy.kind])
        if self._by_gpu and copy.kind == "demand":
            queued_ns = max(queued_ns, self._gpu_since_ns)
        return now_ns if self._resting else max(queued_ns, self.read_ns.get(copy.key, 0))

    def _end(self, ends_ns: list[int]) -> None:
        copy, (ready_ns, start_ns, step, phase), (now_ns,) = self._copy, self._begin, ends_ns
        layer, expert = copy.key
        self._recorder.rows.append(
            ("h2d", ready_ns, start_ns, now_ns, copy.kind, phase, step, layer, -1, expert, 0, copy.expert_bytes)
        )
        written_ns = self._write_back(copy, now_ns, now_ns) if self._in_turn else now_ns
        self._busy = written_ns > now_ns
        if not self._session.copied(copy):
            self.release(copy.key)
        self._arrived(copy)
        if self._busy:
            Moment(self._clock, written_ns, None, self._go_on)
        else:
            self.wake()

    def _go_on(self, _: simpy.Event) -> None:
        self._busy = False
        self.wake()

    def _start_result(self) -> None:
        self._busy, self._resting, self._result_start_ns = True, False, self._clock.now
        self._memory.start(self._link, (self._results[0].duration_ns,), self._end_result)

    def _end_result(self, ends_ns: list[int]) -> None:
        result, recorder, (now_ns,) = self._results.popleft(), self._recorder, ends_ns
        recorder.rows.append(
            ("h2d", result.ready_ns, self._result_start_ns, now_ns, result.kind, recorder.phase, recorder.step,
             result.layer, -1, -1, result.tokens, result.size_bytes)
        )
        self._busy = False
        result.done()
        self.wake()
