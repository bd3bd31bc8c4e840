"""Stand-ins for a session and for GPU slots while a machine is profiled."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from torch import Tensor

from policies.mechanism.views import Copy, ExpertId


class CopyScript:
    """The part of a session that the copy thread uses, with scripted copies in place of decisions.

    ``cost``: of the experts of every layer; the copy thread expects a copy to take its ``copy_ns``.
    """

    def __init__(self, layers: int, expert_bytes: int) -> None:
        self.queue: deque[Copy] = deque()
        self.cost = SimpleNamespace(expert_bytes=expert_bytes, copy_ns=1)
        self.costs = [self.cost] * layers
        self.policy = SimpleNamespace(writes_back=False)

    def next_copy(self) -> Copy | None:
        return self.queue.popleft() if self.queue else None

    def copied(self, copy: Copy) -> bool:
        """As in ``Session``; False, since the slot is free again."""
        return False

    def staged(self, layer: int) -> set[int]:
        """As in ``Session``; always empty."""
        return set()


class AllThere:
    """GPU slots that always hold every expert: a copy writes the same weights again."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena

    def buffer(self, expert_id: ExpertId) -> Tensor:
        return self._arena[expert_id.layer, expert_id.expert]

    def begin(self, copy: Copy) -> Tensor:
        return self.buffer(copy.key)

    def release(self, expert_id: ExpertId) -> None:
        """As in ``GpuSlots``; nothing to do."""
