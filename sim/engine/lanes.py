"""Lanes: serial resources. Some are reserved ahead by arithmetic; CPU and copies share the DRAM and are re-timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import simpy

from sim.engine.spans import Recorder


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


class GpuLane(Lane):
    """The GPU, which may be slower while copies run: on machines where it shares their memory.

    ``copies_left_ns`` tells for how long from now, ``now_ns``, copies will run if nothing more is asked for. A span is
    made longer by what it overlaps with that (its order and its start are those of a ``Lane``).
    """

    __slots__ = ("_left_ns", "_now_ns", "_permille")

    def __init__(
        self, recorder: Recorder, permille: int, now_ns: Callable[[], int], left_ns: Callable[[], int]
    ) -> None:
        super().__init__("gpu", recorder)
        self._permille, self._now_ns, self._left_ns = permille, now_ns, left_ns

    def reserve(
        self, ready: int, duration: int, kind: str, layer: int, expert: int = -1, tokens: int = 0, bytes: int = 0,
        target_layer: int = -1,
    ) -> int:  # fmt: skip
        """See ``Lane``."""
        start = max(ready, self.free_ns)
        beside = min(duration * 1000 // self._permille, self._now_ns() + self._left_ns() - start)
        duration += max(0, beside) * (1000 - self._permille) // 1000
        return super().reserve(ready, duration, kind, layer, expert, tokens, bytes, target_layer)


class SharedMemory:
    """The DRAM under the CPU experts and the host-to-device copies: a fluid pair.

    Each side runs at most one job. Alone it moves 1000 work units a nanosecond, together with the other side its own
    contended rate. Work is an integer; a job is re-timed whenever the other side starts or ends.
    """

    CPU, H2D = 0, 1

    def __init__(self, env: simpy.Environment, cpu_permille: int, copy_permille: int) -> None:
        self._env = env
        self._together = (cpu_permille, copy_permille)
        self._done: list[Callable[[], None] | None] = [None, None]
        self._left = [0, 0]  # work left when the present timer was set,
        self._since = [0, 0]  # when that was,
        self._rate = [1000, 1000]  # and for which rate
        self._timer: list[simpy.Event | None] = [None, None]  # older ones that still fire are ignored

    def start(self, side: int, work_ns: int, done: Callable[[], None]) -> None:
        """Begin a job that alone would take ``work_ns``; ``done`` is called when it ends."""
        assert self._done[side] is None, "a lane serves one job at a time"
        other = 1 - side
        self._done[side] = done
        if self._done[other] is None:
            self._time(side, work_ns * 1000, 1000)
        else:
            self._time(side, work_ns * 1000, self._together[side])
            self._retime(other)

    def left_ns(self, side: int) -> int:
        """What is left of the job of ``side``, in ns at the present rate; 0 if there is none."""
        return 0 if self._done[side] is None else -(-self._work_left(side) // self._rate[side])

    def _work_left(self, side: int) -> int:
        return max(0, self._left[side] - (int(self._env.now) - self._since[side]) * self._rate[side])

    def _retime(self, side: int) -> None:
        """Set a new timer if the other side's start or end has changed this one's rate."""
        rate = 1000 if self._done[1 - side] is None else self._together[side]
        if rate != self._rate[side]:
            self._time(side, self._work_left(side), rate)

    def _time(self, side: int, work: int, rate: int) -> None:
        self._left[side], self._since[side], self._rate[side] = work, int(self._env.now), rate
        timer = self._timer[side] = self._env.timeout(-(-work // rate), side)
        timer.callbacks.append(self._fired)

    def _fired(self, timer: simpy.Event) -> None:
        side = cast(int, timer.value)
        if timer is not self._timer[side]:
            return
        done, other = self._done[side], 1 - side
        assert done is not None
        self._done[side] = None
        done()  # often starts the next job, and then the other side's rate stays as it is
        if self._done[other] is not None:
            self._retime(other)
