"""Stand-ins for a session and for GPU slots while a machine is profiled: nothing is decided, everything is there."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from torch import Tensor

from policies.mechanism.views import Copy, ExpertId
from realrun.execution.recorder import Timed


class CopyScript:
    """What the copy thread asks of a session, answered from a list: nothing is decided here.

    ``cost``: of the experts of every layer; its ``copy_ns`` is what the copy thread believes that a copy takes.
    """

    def __init__(self, layers: int, expert_bytes: int) -> None:
        self.queue: deque[Copy] = deque()
        self.cost = SimpleNamespace(bytes=expert_bytes, copy_ns=1)
        self.costs = [self.cost] * layers
        self.policy = SimpleNamespace(writes_back=False)

    def next_copy(self) -> Copy | None:
        """See ``Session``."""
        return self.queue.popleft() if self.queue else None

    def copied(self, copy: Copy) -> bool:
        """See ``Session``: its slot is free again."""
        return False

    def staged(self, layer: int) -> set[int]:
        """See ``Session``."""
        return set()


class AllThere:
    """GPU slots in which every expert always is: what is copied goes where the same weights lie already."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena

    def buffer(self, expert_id: ExpertId) -> Tensor:
        """See ``GpuSlots``."""
        return self._arena[expert_id.layer, expert_id.expert]

    def begin(self, copy: Copy) -> Tensor:
        """See ``GpuSlots``."""
        return self.buffer(copy.id)

    def release(self, expert_id: ExpertId) -> None:
        """See ``GpuSlots``."""


class Ended(Timed):
    """A completion of something that is over."""

    def __init__(self, when_ns: int) -> None:
        super().__init__(when_ns, when_ns, when_ns)

    def issued(self) -> Ended:
        """See ``Completion``."""
        return self

    def wait(self) -> None:
        """See ``Completion``."""
