"""How much host memory there is on a virtual machine whose memory grows as it is touched, and on any other.

What is short is touched step by step, as long as the machine grows, and given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from realrun.machine.host_memory import HostMemory, host_memory
from realrun.machine.pages import Pages

# Choices, so that a refusal takes seconds and other programs keep their memory:
STEP_BYTES = 10**9
RESERVE_BYTES = 5 * 10**8  # available memory that is never touched
STILL_BYTES, STILL_S = 16 * 10**9, 10.0  # touched without growth, or for so long: the machine does not grow
RETRIES, PAUSE_S = 3, 1.0  # once little is left, for a machine that needs time to grow


@dataclass
class GrowingMemory:
    """For one question. Memory is held until this object goes."""

    read: Callable[[], HostMemory] = host_memory
    take: Callable[[int], object] = Pages
    pause: Callable[[float], None] = time.sleep
    clock_s: Callable[[], float] = time.monotonic
    _held: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._now = self.read()
        self._held_at_growth, self._growth_s = 0, self.clock_s()

    def available_bytes(self, needed_bytes: int) -> int:
        """Available now or, where that is less than needed, once memory has been touched.

        Touches no more than what is available less a reserve, and nothing where a control group's limit is in the way.
        """
        while self._with_held(self._now.available_bytes) < needed_bytes <= self._with_held(self._now.allowed_bytes):
            if self._stands_still() or not self._step():
                break
        return self._with_held(self._now.available_bytes)

    def _with_held(self, rest_bytes: int) -> int:
        return len(self._held) * STEP_BYTES + rest_bytes

    def _stands_still(self) -> bool:
        touched_bytes = (len(self._held) - self._held_at_growth) * STEP_BYTES
        return touched_bytes >= STILL_BYTES or self.clock_s() - self._growth_s >= STILL_S

    def _step(self) -> bool:
        """Touch more or, where little is left, let the machine grow; False if it has not."""
        if self._now.available_bytes < STEP_BYTES + RESERVE_BYTES:
            return any(self._grows_meanwhile() for _ in range(RETRIES))
        self._held.append(self.take(STEP_BYTES))
        self._look()
        return True

    def _grows_meanwhile(self) -> bool:
        self.pause(PAUSE_S)
        return self._look()

    def _look(self) -> bool:
        """Whether the machine has grown since the last look."""
        before, self._now = self._now, self.read()
        grown = self._now.total_bytes > before.total_bytes
        if grown:
            self._held_at_growth, self._growth_s = len(self._held), self.clock_s()
        return grown
