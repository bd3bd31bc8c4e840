"""Lanes: serial resources. Some are reserved ahead by arithmetic; CPU and copies share the DRAM and are re-timed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import simpy

from sim.runs.spans import SpanRecorder


class Lane:
    """A serial resource that may be reserved ahead, in order: a span starts when it is ready and the lane free."""

    __slots__ = ("free_ns", "name", "recorder")

    def __init__(self, name: str, recorder: SpanRecorder) -> None:
        self.name = name
        self.recorder = recorder
        self.free_ns = 0

    def reserve(
        self, ready: int, duration: int, kind: str, layer: int, expert: int = -1, tokens: int = 0, size_bytes: int = 0,
        target_layer: int = -1, until: int = 0,
    ) -> int:
        """Take the lane for ``duration`` ns, and at least until ``until``, from the first moment at or after ``ready``;
        return the end."""
        start = self.free_ns
        if ready > start:
            start = ready
        end = start + duration
        if until > end:
            end = until
        self.free_ns = end
        recorder = self.recorder
        recorder.rows.append(
            (self.name, ready, start, end, kind, recorder.phase, recorder.step, layer, target_layer, expert, tokens,
             size_bytes)
        )
        return end


class Neighbour(NamedTuple):
    """A lane that slows another one down, to ``permille`` of its rate, until ``until_ns()`` if nothing is added."""

    permille: int
    until_ns: Callable[[], int]

    def slowed(self, duration: int, start: int) -> int:
        """What takes ``duration`` alone, from ``start`` on."""
        shared = min(duration * 1000 // self.permille, self.until_ns() - start)
        return duration + max(0, shared) * (1000 - self.permille) // 1000


class GpuLane(Lane):
    """The GPU of a machine on which it shares memory with ``copies``, and memory or cores with ``experts`` on the CPU.

    A span is made longer by what it overlaps with what they have been given when it is reserved (its order and its
    start are those of a ``Lane``), or when a layer is planned while it lasts (``slow_down``). What a neighbour has yet
    to do is taken to last as long as without slowing.
    """

    __slots__ = ("_last", "copies", "experts")

    def __init__(self, recorder: SpanRecorder, copies: Neighbour, experts: Neighbour) -> None:
        super().__init__("gpu", recorder)
        self.copies, self.experts = copies, experts
        self._last = -1, 0, 0  # row of the last span, when it started, and how long it takes by itself

    def reserve(
        self, ready: int, duration: int, kind: str, layer: int, expert: int = -1, tokens: int = 0, size_bytes: int = 0,
        target_layer: int = -1, until: int = 0,
    ) -> int:
        """See ``Lane``."""
        start = max(ready, self.free_ns)
        self._last = len(self.recorder.rows), start, duration
        duration = self._slowed(duration, start)
        return super().reserve(ready, duration, kind, layer, expert, tokens, size_bytes, target_layer, until)

    def slow_down(self, now: int) -> None:
        """Neighbours may have been given work since the last span was reserved: time what is left of it anew.

        That span is mostly of shared experts, during which a layer is planned, its copies and CPU experts begin.
        """
        place, start, own = self._last
        begin = max(now, start)
        left = self.free_ns - begin
        if left > 0:
            end = begin + self._slowed(own * left // (self.free_ns - start), begin)
            self.free_ns = max(self.free_ns, end)
            row = self.recorder.rows[place]
            self.recorder.rows[place] = (*row[:3], self.free_ns, *row[4:])

    def _slowed(self, duration: int, start: int) -> int:
        return self.experts.slowed(self.copies.slowed(duration, start), start)


class Side:
    """The work of one side of the memory: a job and those that follow it, each from the whole ns at which one ends."""

    __slots__ = ("done", "ends", "following", "left", "rate", "since", "timer")

    def __init__(self) -> None:
        self.done: Callable[[list[int]], None] | None = None  # None: idle
        self.left = 0  # work left of the job,
        self.since = 0  # when that was,
        self.rate = 1000  # and how much of it is done in a ns
        self.following: deque[int] = deque()  # work of each later job
        self.ends: list[int] = []  # of the jobs before
        self.timer: simpy.Event | None = None  # at the end of the last; older ones that still fire are ignored

    def advance(self, now: int) -> None:
        """Work until ``now``; the last job is not over before its timer says so."""
        while self.following:
            end = self.since - (-self.left // self.rate)
            if end > now:
                break
            self.ends.append(end)
            self.left, self.since = self.following.popleft(), end
        left = self.left - (now - self.since) * self.rate
        self.left, self.since = left if left > 0 else 0, now

    def left_ns(self) -> int:
        """Until the last job ends, if the rate stays."""
        left = -(-self.left // self.rate)
        return left + sum([-(-work // self.rate) for work in self.following]) if self.following else left


class SharedMemory:
    """The DRAM under the CPU experts and the host-to-device copies: a fluid pair. Write-backs slow down both.

    Each side runs at most one series of jobs. Alone it moves 1000 work units a nanosecond, together with the other side
    its own contended rate. Work is an integer; a series is re-timed whenever the other side, or a write-back, starts or
    ends. A write-back takes as much of the DRAM as a copy does, and leaves a copy the rate of a link that is busy both
    ways. Next to two others, a side runs at the product of the rates next to each.
    """

    CPU, H2D = 0, 1

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._together = (1000, 1000)
        self._both_ways = 0  # the rate of copies while an expert is written back; 0: none is
        self._sides = (Side(), Side())

    def start(
        self, side: int, works_ns: Sequence[int], done: Callable[[list[int]], None],
        together: tuple[int, int] | None = None,
    ) -> None:
        """Begin jobs, at least one, that alone would take ``works_ns``; when the last ends, ``done`` is called with all
        ends. ``together``: the rates of both sides, in permille, while both run; the CPU's jobs come with them."""
        mine, other = self._sides[side], 1 - side
        if together is not None:
            self._together = together
        assert mine.done is None, "a lane serves one series at a time"
        mine.done, mine.since, mine.ends = done, int(self._env.now), []
        mine.left = works_ns[0] * 1000
        if len(works_ns) > 1:
            mine.following.extend([work_ns * 1000 for work_ns in works_ns[1:]])
        self._time(side, self._rate(side))
        if self._sides[other].done is not None:
            self._retime(other, mine.since)

    def write_back(self, start_ns: int, end_ns: int, both_ways_permille: int) -> None:
        """Slow down both sides from ``start_ns`` to ``end_ns``, copies to ``both_ways_permille``."""
        for at_ns, rate in ((start_ns, both_ways_permille), (end_ns, 0)):
            self._env.timeout(at_ns - int(self._env.now), rate).callbacks.append(self._set_both_ways)

    def _set_both_ways(self, event: simpy.Event) -> None:
        self._both_ways = cast(int, event.value)
        for side in (self.CPU, self.H2D):
            if self._sides[side].done is not None:
                self._retime(side, int(self._env.now))

    def left_ns(self, side: int) -> int:
        """What is left of the job of ``side``, in ns at the present rate, and of those that follow, in ns alone."""
        mine = self._sides[side]
        if mine.done is None:
            return 0
        mine.advance(int(self._env.now))
        return -(-mine.left // mine.rate) + sum(mine.following) // 1000

    def _rate(self, side: int) -> int:
        """The rate of a side next to what runs now."""
        rate = 1000 if self._sides[1 - side].done is None else self._together[side]
        if self._both_ways:
            rate = max(rate * (self._both_ways if side == self.H2D else self._together[side]) // 1000, 1)
        return rate

    def _retime(self, side: int, now: int) -> None:
        """Set a new timer if a start or an end has changed this side's rate."""
        mine, rate = self._sides[side], self._rate(side)
        if rate != mine.rate:
            mine.advance(now)
            self._time(side, rate)

    def _time(self, side: int, rate: int) -> None:
        mine = self._sides[side]
        mine.rate = rate
        timer = mine.timer = self._env.timeout(mine.left_ns(), side)
        timer.callbacks.append(self._fired)

    def _fired(self, timer: simpy.Event) -> None:
        side = cast(int, timer.value)
        mine, other = self._sides[side], 1 - side
        if timer is not mine.timer:
            return
        done, now = mine.done, int(self._env.now)
        assert done is not None
        if mine.following:
            mine.advance(now)
        mine.done = None
        mine.ends.append(now)
        done(mine.ends)  # often starts the next series, and then the other side's rate stays as it is
        if self._sides[other].done is not None:
            self._retime(other, now)
