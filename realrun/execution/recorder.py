"""What the lanes of a real machine did, as the spans of ``sim.runs.spans``; times are read once a step is over."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeAlias

from realrun.machine.lanes import Completion
from sim.runs.spans import Row

# lane, completion, kind, phase, step, layer, target layer, expert, tokens, bytes
Entry: TypeAlias = "tuple[str, Timed | Waited | Completion, str, str, int, int, int, int, int, int]"


@dataclass
class Timed:
    """A span whose times are known already: a completion of the host's own."""

    ready_ns: int
    start_ns: int
    end_ns: int

    def has_ended(self) -> bool:
        """See ``Completion``."""
        return True


@dataclass
class Waited:
    """The host's reading of what ``completion`` delivered: from its end, or ``began_ns`` if later, to ``end_ns``.

    When the completion ended is read with all other times, not while the layer waits.
    """

    began_ns: int
    completion: Completion
    end_ns: int

    @property
    def start_ns(self) -> int:
        """When it was there."""
        return max(self.began_ns, self.completion.end_ns)

    ready_ns = start_ns

    def has_ended(self) -> bool:
        """See ``Completion``."""
        return True


# Pieces of work whose times are not read yet: on CUDA each holds two events. A choice: many steps, and little memory.
MOST_OPEN = 100_000


class MachineRecorder:
    """Spans since ``zero_ns``, the machine's time at which the run began."""

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self.rows: list[Row] = []
        self.step, self.phase = -1, "prefill"
        self.zero_ns = 0
        self._open: list[Entry] = []
        self._lock = threading.Lock()

    def add(
        self, lane: str, completion: Timed | Waited | Completion, kind: str, layer: int, expert: int = -1,
        tokens: int = 0, size_bytes: int = 0, target_layer: int = -1, place: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Remember a piece of work, which need not have ended, of the present phase and step or another ``place``."""
        phase, step = place or self.place
        with self._lock:
            self._open.append((lane, completion, kind, phase, step, layer, target_layer, expert, tokens, size_bytes))

    @property
    def place(self) -> tuple[str, int]:
        """Phase and step at work."""
        return self.phase, self.step

    def instant(self, now_ns: int, kind: str, layer: int, target_layer: int, expert: int, size_bytes: int) -> None:
        """A zero-length span on the copy lane: something happened to an expert's memory."""
        self.add("h2d", Timed(now_ns, now_ns, now_ns), kind, layer, expert, 0, size_bytes, target_layer)

    def flush(self) -> None:
        """Read the times of all that has ended since; the machine has settled."""
        with self._lock:
            rows, self._open = self._open, []
        self._read(rows)

    def end_step(self) -> None:
        """Read the times of earlier steps' work that has ended, if there is much of it.

        Reading takes some microseconds for each piece of work, which short runs leave for later.
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
            times = (max(0, ns - self.zero_ns) for ns in (completion.ready_ns, completion.start_ns, completion.end_ns))
            self.rows.append((lane, *times, *what))  # type: ignore[arg-type]
