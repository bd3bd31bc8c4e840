"""The host-to-device lane: pulls one copy at a time from the session, and carries CPU results where they queue here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertCosts, ExpertId, Swap, Upload
from sim.runs.spans import SpanRecorder
from sim.timeline.lanes import Lane, Neighbour, SharedMemory


class CopyLane:
    """Serves the session's copies; ``arrived(copy)`` is called at the end of each.

    Victims that a policy writes back take the lane ``back``, longer by what they overlap with copies and, until
    ``cpu_until_ns()``, with CPU experts, as far as these are known when the copy starts. A copy could have started when
    it was queued or, where the lane had to rest until a slot came free or a pin was lifted, when that happened.
    """

    def __init__(
        self, env: simpy.Environment, memory: SharedMemory, recorder: SpanRecorder, costs: Sequence[ExpertCosts],
        session: Session, back: Lane, cpu_until_ns: Callable[[], int], arrived: Callable[[Copy], None],
    ) -> None:
        self._env, self._memory, self._recorder, self._costs = env, memory, recorder, costs
        self._session, self._back, self._cpu_until_ns, self._arrived = session, back, cpu_until_ns, arrived
        self._result: tuple[int, int, int, int, Callable[[], None]] | None = None
        self._busy = False
        self._demand_may_start = True
        self._queued = {"demand": 0, "prefetch": 0}  # when the latest of each kind was queued
        self._asked: dict[ExpertId, int] = {}  # when each swap was
        self._slots = dict(session.residency.staging)  # free staging slots, as last seen
        self._slot_since = dict.fromkeys(self._slots, 0)  # when there last was one again
        self._resting = False  # whether the free lane has found no work that could start

    def queued(self, kind: str) -> None:
        """Note that the session may have new copies of this kind, which may start."""
        self._queued[kind] = int(self._env.now)
        self._demand_may_start = True
        self.wake()

    def hold_demand(self) -> None:
        """Note a plan that takes effect later: until demand loads are ``queued``, only other copies may start."""
        self._demand_may_start = False
        self.wake()

    def asked(self, swaps: Sequence[Swap | Upload]) -> None:
        """Note the swaps that the session has queued; the caller wakes the lane."""
        if swaps:
            self._asked.update(dict.fromkeys((swap.incoming for swap in swaps), int(self._env.now)))

    def wake(self, _: simpy.Event | None = None) -> None:
        """Start the next piece of work if the lane is free."""
        if self._busy:
            return
        if self._result is not None:
            self._start_result()
            return
        copy = self._session.next_copy(self._demand_may_start)
        if copy is None:
            self._resting = True
        else:
            self._start(copy)

    def left_ns(self) -> int:
        """What is left of the running transfer."""
        return self._memory.left_ns(SharedMemory.H2D) if self._busy else 0

    def backlog_ns(self) -> int:
        """What is left of the running transfer, and all that waits for the lane, at the rate of uncontended copies."""
        return self.left_ns() + self._session.queued_copies * self._costs[0].copy_ns

    def send_result(self, layer: int, tokens: int, duration: int, size_bytes: int, done: Callable[[], None]) -> None:
        """Carry the CPU experts' result to the GPU, next after the copy that is running."""
        self._result = (layer, tokens, duration, size_bytes, done)
        self._result_ready = int(self._env.now)
        self.wake()

    def release(self, staged: ExpertId) -> None:
        """Record that a staging slot came free."""
        for quota, free in self._session.residency.staging.items():
            if free and not self._slots[quota]:
                self._slot_since[quota] = int(self._env.now)
            self._slots[quota] = free
        (layer, expert), now = staged, int(self._env.now)
        self._recorder.instant(now, "release", layer, -1, expert, self._costs[layer].of(expert).expert_bytes)

    def free_staged_at(self, end: int, staged: ExpertId) -> None:
        """Free the slot of a staged expert at ``end``, when the GPU span that uses it ends."""
        event = self._env.timeout(end - self._env.now, staged)
        event.callbacks.append(self._computed)

    def _computed(self, event: simpy.Event) -> None:
        staged = event.value
        assert isinstance(staged, ExpertId)
        self._session.computed(staged)
        self.release(staged)
        self.wake()

    def _start(self, copy: Copy) -> None:
        self._busy = True
        now, recorder = int(self._env.now), self._recorder
        for victim in copy.victims:
            size_bytes = self._costs[victim.layer].of(victim.expert).expert_bytes
            recorder.instant(now, "evict", victim.layer, -1, victim.expert, size_bytes)
            if self._session.policy.writes_back:
                self._write_back(victim, now, self._costs[copy.key.layer].of(copy.key.expert).copy_ns)
        self._copy, self._begin = copy, (self._ready(copy), now, recorder.step, recorder.phase)
        self._resting = False
        copy_ns = self._costs[copy.key.layer].of(copy.key.expert).copy_ns
        self._memory.start(SharedMemory.H2D, (copy_ns,), self._copied)

    def _write_back(self, victim: ExpertId, now: int, copy_ns: int) -> None:
        """Reserve the lane back from ``now`` on, when a copy of ``copy_ns`` starts."""
        (layer, expert), costs = victim, self._costs[victim.layer].of(victim.expert)
        rate = costs.both_ways_permille
        copies_until = now + copy_ns * 1000 // rate + self._session.queued_copies * copy_ns
        copies, experts = Neighbour(rate, lambda: copies_until), Neighbour(costs.copy_permille, self._cpu_until_ns)
        start = max(now, self._back.free_ns)
        duration = experts.slowed(copies.slowed(costs.writeback_ns, start), start)
        end = self._back.reserve(now, duration, "writeback", layer, expert, 0, costs.expert_bytes)
        self._memory.write_back(start, end, rate)

    def _ready(self, copy: Copy) -> int:
        """When the copy, which starts now, could have started."""
        queued = self._asked.pop(copy.key) if copy.kind == "swap" else self._queued[copy.kind]
        if copy.into == "staging":
            self._slots[copy.kind] -= 1
            queued = max(queued, self._slot_since[copy.kind])
        return int(self._env.now) if self._resting else queued

    def _copied(self, ends: list[int]) -> None:
        copy, (ready, start, step, phase), (now,) = self._copy, self._begin, ends
        layer, expert = copy.key
        self._recorder.rows.append(
            ("h2d", ready, start, now, copy.kind, phase, step, layer, -1, expert, 0, copy.expert_bytes)
        )
        self._busy = False
        if not self._session.copied(copy):
            self.release(copy.key)
        self._arrived(copy)
        self.wake()

    def _start_result(self) -> None:
        assert self._result is not None
        self._busy, self._resting, self._result_start = True, False, int(self._env.now)
        self._memory.start(SharedMemory.H2D, (self._result[2],), self._result_over)

    def _result_over(self, ends: list[int]) -> None:
        assert self._result is not None
        layer, tokens, _, size_bytes, done = self._result
        recorder, (now,) = self._recorder, ends
        recorder.rows.append(
            ("h2d", self._result_ready, self._result_start, now, "result", recorder.phase, recorder.step, layer, -1, -1,
             tokens, size_bytes)
        )
        self._result, self._busy = None, False
        done()
        self.wake()
