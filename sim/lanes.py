"""Lanes: serial resources. Some are reserved ahead by arithmetic; CPU and copies share the DRAM and are re-timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import simpy

from sim.spans import Recorder


class Lane:
    """A serial resource that may be reserved ahead, in order: a span starts when it is ready and the lane free."""

    __slots__ = ("free_ns", "name", "recorder")

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self.free_ns = 0

    def reserve(
        self, ready: int, duration: int, kind: str, layer: int, expert: int = -1, tokens: int = 0, bytes: int = 0,
        target_layer: int = -1,
    ) -> int:  # fmt: skip
        """Take the lane for ``duration`` ns from the first moment at or after ``ready``; return the end."""
        start = self.free_ns
        if ready > start:
            start = ready
        end = self.free_ns = start + duration
        recorder = self.recorder
        recorder.rows.append(
            (self.name, ready, start, end, kind, recorder.phase, recorder.step, layer, target_layer, expert, tokens,
             bytes)
        )  # fmt: skip
        return end


class SharedMemory:
    """The DRAM under the CPU experts and the host-to-device copies: a fluid pair.

    Each side runs at most one job. Alone it moves 1000 work units a nanosecond, together with the other side its own
    contended rate. Work is an integer; a job is re-timed whenever the other side starts or ends.
    """

    CPU, H2D = 0, 1

    def __init__(self, env: simpy.Environment, cpu_permille: int, copy_permille: int) -> None:
        self._env = env
        self._together = (cpu_permille, copy_permille)
        self._left = [0, 0]
        self._done: list[Callable[[], None] | None] = [None, None]
        self._rate = [1000, 1000]  # at which the job's present timer was set
        self._version = [0, 0]  # of the present timer; older ones that still fire are ignored
        self._settled_ns = 0

    def start(self, side: int, work_ns: int, done: Callable[[], None]) -> None:
        """Begin a job that alone would take ``work_ns``; ``done`` is called when it ends."""
        assert self._done[side] is None, "a lane serves one job at a time"
        other = 1 - side
        self._settle()
        self._left[side] = work_ns * 1000
        self._done[side] = done
        if self._done[other] is None:
            self._time(side, 1000)
        else:
            self._time(side, self._together[side])
            self._retime(other)

    def left_ns(self, side: int) -> int:
        """What is left of the job of ``side``, in ns at the present rate; 0 if there is none."""
        if self._done[side] is None:
            return 0
        self._settle()
        return -(-self._left[side] // self._rate[side])

    def _retime(self, side: int) -> None:
        """Set a new timer if the other side's start or end has changed this one's rate."""
        rate = 1000 if self._done[1 - side] is None else self._together[side]
        if rate != self._rate[side]:
            self._time(side, rate)

    def _settle(self) -> None:
        """Take what has been done since the last look off what is left."""
        now = self._env.now
        elapsed = int(now) - self._settled_ns
        if elapsed:
            left, rate = self._left, self._rate
            left[0] = max(0, left[0] - elapsed * rate[0])
            left[1] = max(0, left[1] - elapsed * rate[1])
            self._settled_ns = int(now)

    def _time(self, side: int, rate: int) -> None:
        self._rate[side] = rate
        version = self._version[side] = self._version[side] + 1
        event = self._env.timeout(-(-self._left[side] // rate), (side, version))
        event.callbacks.append(self._fired)

    def _fired(self, event: simpy.Event) -> None:
        side, version = cast(tuple[int, int], event.value)
        if version != self._version[side]:
            return
        self._settle()
        done, other = self._done[side], 1 - side
        assert done is not None
        self._done[side] = None
        done()  # often starts the next job, and then the other side's rate stays as it is
        if self._done[other] is not None:
            self._retime(other)
