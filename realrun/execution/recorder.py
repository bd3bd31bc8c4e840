"""The work of a real machine's lanes as spans of ``sim.runs.spans``; times are read when a step is over."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeAlias

from realrun.machine.lanes import Completion, OnItsLane
from sim.runs.spans import Row

# lane, completion, kind, phase, step, layer, target layer, expert, tokens, bytes
Entry: TypeAlias = "tuple[str, Completion, str, str, int, int, int, int, int, int]"

# Pieces of work whose times are not read yet; on CUDA each holds two events. Chosen: many steps, but little memory.
MOST_OPEN = 100_000


class _Past(OnItsLane):
    """A completion of something that is over."""

    def wait(self) -> None:
        """Return at once."""

    def has_ended(self) -> bool:
        """True."""
        return True


@dataclass
class Timed(_Past):
    """A span with known times, such as the host's own work."""

    ready_ns: int
    start_ns: int
    end_ns: int


@dataclass
class Waited(_Past):
    """The host's reading of a result: from the end of ``completion``, or ``began_ns`` if later, to ``end_ns``.

    The end of the completion is read with all other times, not while the layer waits.
    """

    began_ns: int
    completion: Completion
    end_ns: int

    start_ns = ready_ns = property(lambda self: max(self.began_ns, self.completion.end_ns))


class MachineRecorder:
    """Spans, relative to ``zero_ns``, the machine's time at the beginning of the run."""

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self.rows: list[Row] = []
        self.step, self.phase = -1, "prefill"
        self.zero_ns = 0
        self._open: list[Entry] = []
        self._lock = threading.Lock()

    def add(
        self, lane: str, completion: Completion, kind: str, layer: int, expert: int = -1, tokens: int = 0,
        size_bytes: int = 0, target_layer: int = -1, place: tuple[str, int] | None = None,
    ) -> None:
        """Record a piece of work, which need not have ended, in the present phase and step or another ``place``."""
        phase, step = place or self.place
        with self._lock:
            self._open.append((lane, completion, kind, phase, step, layer, target_layer, expert, tokens, size_bytes))

    @property
    def place(self) -> tuple[str, int]:
        """The present phase and step."""
        return self.phase, self.step

    def instant(self, now_ns: int, kind: str, layer: int, target_layer: int, expert: int, size_bytes: int) -> None:
        """Record a zero-length span on the copy lane: an event in an expert's memory."""
        self.add("h2d", Timed(now_ns, now_ns, now_ns), kind, layer, expert, 0, size_bytes, target_layer)

    def flush(self) -> None:
        """Read the times of all work; called when the machine has settled."""
        with self._lock:
            rows, self._open = self._open, []
        self._read(rows)

    def end_step(self) -> None:
        """Read the times of earlier steps' work that has ended, if there is much of it.

        Reading takes some microseconds for each piece of work, so that short runs read everything at their end.
        """
        with self._lock:
            if len(self._open) <= self._most_open:
                return
            entries, self._open = self._open, []
            over = [entry[4] < self.step and entry[1].has_ended() for entry in entries]
            self._open = [entry for entry, is_over in zip(entries, over, strict=True) if not is_over]
        self._read([entry for entry, is_over in zip(entries, over, strict=True) if is_over])

    def _read(self, rows: list[Entry]) -> None:
        for lane, completion, *what in rows:
            ends = (completion.ready_ns, completion.start_ns, completion.end_ns)
            self.rows.append((lane, *(max(0, ns - self.zero_ns) for ns in ends), *what))  # type: ignore[arg-type]
