"""The GPU's arena of slots: equal buffers that experts are copied into. Who sits where follows the session's decisions.

Cache slots are alike, and so are the staging slots of one quota. A staging slot that is free again keeps its expert
until another copy takes the slot (the session may still adopt the expert), in the same order as
``policies.mechanism.residency``.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from torch import Tensor

from policies.mechanism.views import Copy, ExpertId, Swap
from sim.runs.prepare import Prepared

Group = Literal["cache", "demand", "prefetch"]


class GpuSlots:
    """``arena`` [slots, bytes] uint8, of which the first ``demand`` and ``prefetch`` are staging slots."""

    def __init__(self, arena: Tensor, demand: int, prefetch: int) -> None:
        buffers = iter(arena)
        self._free: dict[Group, deque[tuple[Tensor, ExpertId | None]]] = {
            "demand": deque((next(buffers), None) for _ in range(demand)),
            "prefetch": deque((next(buffers), None) for _ in range(prefetch)),
        }
        self._free["cache"] = deque((buffer, None) for buffer in buffers)
        self._held: dict[ExpertId, tuple[Tensor, Group]] = {}

    def buffer(self, id: ExpertId) -> Tensor:
        """Where an expert lies that is on the GPU, or on its way there."""
        return self._held[id][0]

    def place(self, id: ExpertId) -> Tensor:
        """A cache slot before the first token; the caller fills it."""
        return self._take(id, "cache")

    def begin(self, copy: Copy) -> Tensor:
        """A copy starts: its victims leave; the slot that it goes to."""
        for victim in copy.victims:
            self._give(victim, keep=False)
        into: Group = "cache" if copy.into == "cache" else "prefetch" if copy.kind == "prefetch" else "demand"
        buffer = self._take(copy.id, into)
        self._forget(copy.id)
        return buffer

    def release(self, id: ExpertId) -> None:
        """A staging slot is free again; its expert stays readable until the slot is taken."""
        self._give(id, keep=True)

    def adopt(self, swap: Swap) -> None:
        """An expert in a free staging slot and one in a cache slot exchange their slots; nothing is copied."""
        group, place = next(
            (group, place) for group, free in self._free.items() for place, (_, id) in enumerate(free)
            if id == swap.incoming
        )  # fmt: skip
        buffer, _ = self._free[group][place]
        del self._free[group][place]
        emptied, _ = self._held.pop(swap.outgoing)
        self._free[group].appendleft((emptied, None))  # slots that hold nothing are taken first
        self._held[swap.incoming] = buffer, "cache"

    def _forget(self, id: ExpertId) -> None:
        """An expert that comes anew is nobody's to adopt: a free slot that still has it counts as empty."""
        for free in self._free.values():
            for place, (buffer, intact) in enumerate(free):
                if intact == id:
                    del free[place]
                    free.appendleft((buffer, None))
                    return

    def _take(self, id: ExpertId, group: Group) -> Tensor:
        buffer, _ = self._free[group].popleft()
        self._held[id] = buffer, group
        return buffer

    def _give(self, id: ExpertId, keep: bool) -> None:
        buffer, group = self._held.pop(id)
        if keep:
            self._free[group].append((buffer, id))
        else:
            self._free[group].appendleft((buffer, None))


def slots_needed(prepared: Prepared) -> int:
    """Cache and staging slots that a run has on the GPU."""
    size, policy = prepared.shape.expert_bytes_of(0), prepared.composition
    return prepared.memory.cache_bytes // size + policy.demand_slots + policy.prefetch_slots
