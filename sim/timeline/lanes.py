"""Lanes: serial resources. Some are reserved ahead by arithmetic; CPU and copies share the DRAM and are re-timed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import simpy

from policies.mechanism.shared_dram import rate_of_copies
from policies.mechanism.views import ExpertCosts
from sim.runs.spans import SpanRecorder
from sim.timeline.clock import Clock, Moment


class Lane:
    """A serial resource that may be reserved ahead, in order: a span starts when it is ready and the lane free."""

    __slots__ = ("free_ns", "name", "recorder")

    def __init__(self, name: str, recorder: SpanRecorder) -> None:
        self.name = name
        self.recorder = recorder
        self.free_ns = 0

    def reserve(
        self, ready_ns: int, duration_ns: int, kind: str, layer: int, expert: int = -1, tokens: int = 0,
        size_bytes: int = 0, target_layer: int = -1,
    ) -> int:
        """Take the lane for ``duration_ns`` from the first moment at or after ``ready_ns``; return the end in ns."""
        start_ns = self.free_ns
        if ready_ns > start_ns:
            start_ns = ready_ns
        self.free_ns = end_ns = start_ns + duration_ns
        recorder = self.recorder
        recorder.rows.append(
            (self.name, ready_ns, start_ns, end_ns, kind, recorder.phase, recorder.step, layer, target_layer, expert,
             tokens, size_bytes)
        )
        return end_ns


class Neighbour(NamedTuple):
    """A lane that slows another one down, to ``permille`` of its rate, until ``until_ns()`` if nothing is added."""

    permille: int
    until_ns: Callable[[], int]

    def slowed(self, duration_ns: int, start_ns: int) -> int:
        """Time in ns, from ``start_ns`` on, of what takes ``duration_ns`` alone."""
        shared_ns = min(duration_ns * 1000 // self.permille, self.until_ns() - start_ns)
        return duration_ns + max(0, shared_ns) * (1000 - self.permille) // 1000


Rates: TypeAlias = tuple[tuple[int, int], ...]  # of CPU and copy, in permille, while both run; of each link


class Side:
    """The work of one side of the memory: a job and those that follow it, each from the whole ns at which one ends."""

    __slots__ = ("both_ways", "done", "ends_ns", "following", "left", "others", "rate", "since_ns", "timer")

    def __init__(self) -> None:
        self.others: dict[Side, int] = {}  # and the rate while each of them runs, too
        self.both_ways = 0  # the rate of copies on this link while an expert is written back there; 0: none is
        self.done: Callable[[list[int]], None] | None = None  # None: idle
        self.left = 0  # work left of the job,
        self.since_ns = 0  # when that was,
        self.rate = 1000  # and how much of it is done in a ns
        self.following: deque[int] = deque()  # work of each later job
        self.ends_ns: list[int] = []  # of the jobs before
        self.timer: simpy.Event | None = None  # at the end of the last; older ones that still fire are ignored

    def advance(self, now_ns: int) -> None:
        """Work until ``now_ns``; the last job is not over before its timer says so."""
        while self.following:
            end_ns = self.since_ns - (-self.left // self.rate)
            if end_ns > now_ns:
                break
            self.ends_ns.append(end_ns)
            self.left, self.since_ns = self.following.popleft(), end_ns
        left = self.left - (now_ns - self.since_ns) * self.rate
        self.left, self.since_ns = left if left > 0 else 0, now_ns

    def remaining_ns(self) -> int:
        """Time until the last job ends, if the rate stays."""
        left_ns = -(-self.left // self.rate)
        return left_ns + sum([-(-work // self.rate) for work in self.following]) if self.following else left_ns


class SharedMemory:
    """The DRAM under the CPU experts and the host-to-device copies: a fluid pair, or with the links of several GPUs
    that work on a layer together, more sides. Write-backs slow down all.

    Each side runs at most one series of jobs. Alone it moves 1000 work units a nanosecond, together with another side
    its own contended rate. Work is an integer; a series is re-timed whenever another side, or a write-back, starts or
    ends. A write-back takes as much of the DRAM as a copy does, and leaves a copy the rate of a link that is busy both
    ways. Next to two others, a side runs at the product of the rates next to each.

    ``links``: the costs of experts over each link, by layer. None: those of the one link, whose rates come with the
    CPU's jobs.
    """

    CPU, H2D = 0, 1  # the sides; the links of further GPUs follow

    def __init__(self, clock: Clock, links: Sequence[Sequence[ExpertCosts]] = ()) -> None:
        self._clock, self.links = clock, links
        self._written_back: list[Side] = []  # links over which experts are written back now
        self._sides = cpu, *copies = [Side() for _ in range(1 + max(len(links), 1))]
        for number, copy in enumerate(copies):
            cpu.others[copy] = copy.others[cpu] = 1000
            others = [(other, costs) for other, costs in zip(copies, links, strict=False) if other is not copy]
            copy.others.update((other, rate_of_copies(links[number][0], costs[0])) for other, costs in others)

    def start(
        self, side: int, works_ns: Sequence[int], done: Callable[[list[int]], None],
        together: Rates | None = None,
    ) -> None:
        """Begin jobs, at least one, that alone would take ``works_ns``; when the last ends, ``done`` is called with all
        ends. ``together``: the rates of CPU and copy, in permille, while both run, of each link; the CPU's jobs come
        with them."""
        mine = self._sides[side]
        if together is not None:
            for copy, rates in zip(mine.others, together, strict=True):
                mine.others[copy], copy.others[mine] = rates
        assert mine.done is None, "a lane serves one series at a time"
        mine.done, mine.since_ns, mine.ends_ns = done, self._clock.now, []
        mine.left = works_ns[0] * 1000
        if len(works_ns) > 1:
            mine.following.extend([work_ns * 1000 for work_ns in works_ns[1:]])
        self._time(mine, self._rate(mine), mine.since_ns)
        for other in mine.others:
            if other.done is not None:
                self._retime(other, mine.since_ns)

    def write_back(self, start_ns: int, end_ns: int, both_ways_permille: int, link: int = H2D) -> None:
        """Slow down all sides from ``start_ns`` to ``end_ns``, copies over that link to ``both_ways_permille``."""
        side = self._sides[link]
        Moment(self._clock, start_ns, (side, both_ways_permille), self._set_both_ways)
        Moment(self._clock, end_ns, (side, 0), self._set_both_ways)

    def _set_both_ways(self, event: simpy.Event) -> None:
        link, permille = event._value
        link.both_ways = permille
        self._written_back = [side for side in self._sides if side.both_ways]
        for side in self._sides:
            if side.done is not None:
                self._retime(side, self._clock.now)

    def remaining_ns(self, side: int) -> int:
        """Time left of the job of ``side``, in ns at the present rate, and of those that follow, in ns alone."""
        mine = self._sides[side]
        if mine.done is None:
            return 0
        mine.advance(self._clock.now)
        return -(-mine.left // mine.rate) + sum(mine.following) // 1000

    def _rate(self, mine: Side) -> int:
        """The rate of a side next to what runs now."""
        rate = 1000
        for other, permille in mine.others.items():
            if other.done is not None:
                rate = rate * permille // 1000
        for link in self._written_back:
            rate = rate * (link.both_ways if mine is link else mine.others[link]) // 1000
        return rate if rate > 1 else 1

    def _retime(self, mine: Side, now_ns: int) -> None:
        """Set a new timer if a start or an end has changed this side's rate."""
        rate = self._rate(mine)
        if rate != mine.rate:
            mine.advance(now_ns)
            self._time(mine, rate, now_ns)

    def _time(self, mine: Side, rate: int, now_ns: int) -> None:
        mine.rate = rate
        left_ns = mine.remaining_ns() if mine.following else -(-mine.left // rate)
        mine.timer = Moment(self._clock, now_ns + left_ns, mine, self._fired)

    def _fired(self, timer: simpy.Event) -> None:
        mine: Side = timer._value
        if timer is not mine.timer:
            return
        done, now_ns = mine.done, self._clock.now
        assert done is not None
        if mine.following:
            mine.advance(now_ns)
        mine.done = None
        mine.ends_ns.append(now_ns)
        done(mine.ends_ns)  # often starts the next series, and then the other sides' rates stay as they are
        for other in mine.others:
            if other.done is not None:
                self._retime(other, now_ns)
