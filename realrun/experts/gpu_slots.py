"""The GPU's arena of slots: equal buffers that experts are copied into, as the session decides.

All cache slots are alike, and so are the staging slots of one quota. A free staging slot keeps its last expert until
another copy takes the slot, since the session may still adopt that expert; the order is that of
``policies.mechanism.residency``.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from torch import Tensor

from policies.mechanism.views import Copy, ExpertId, Swap
from policies.protocols import Needs
from realrun.errors import RefusedError
from sim.runs.prepare import Prepared

Group = Literal["cache", "demand", "prefetch"]


class GpuSlots:
    """Slots in ``arena`` [slots, bytes] uint8; the first ``demand`` + ``prefetch`` are staging slots."""

    def __init__(self, arena: Tensor, demand: int, prefetch: int) -> None:
        buffers = iter(arena)
        self._free: dict[Group, deque[tuple[Tensor, ExpertId | None]]] = {
            "demand": deque((next(buffers), None) for _ in range(demand)),
            "prefetch": deque((next(buffers), None) for _ in range(prefetch)),
        }
        self._free["cache"] = deque((buffer, None) for buffer in buffers)
        self._held: dict[ExpertId, tuple[Tensor, Group]] = {}

    def buffer(self, expert_id: ExpertId) -> Tensor:
        """The slot of an expert that is on the GPU, or on its way there."""
        return self._held[expert_id][0]

    def place(self, expert_id: ExpertId) -> Tensor:
        """Take a cache slot before the first token; the caller fills it."""
        return self._take(expert_id, "cache")

    def begin(self, copy: Copy) -> Tensor:
        """Free the slots of a copy's victims, and return the slot that it goes to."""
        for victim in copy.victims:
            self._give(victim, keep=False)
        into: Group = "cache" if copy.into == "cache" else "prefetch" if copy.kind == "prefetch" else "demand"
        buffer = self._take(copy.key, into)
        if kept := self._kept(copy.key):  # it is copied again
            group, stale = kept
            self._free[group].appendleft((stale, None))
        return buffer

    def release(self, expert_id: ExpertId) -> None:
        """Free a staging slot; its expert stays readable until the slot is taken."""
        self._give(expert_id, keep=True)

    def evict(self, expert_id: ExpertId) -> None:
        """Free a cache slot without a copy that takes it."""
        self._give(expert_id, keep=False)

    def adopt(self, swap: Swap) -> None:
        """Exchange the slots of an expert in a free staging slot and one in a cache slot, without a copy."""
        kept = self._kept(swap.incoming)
        assert kept is not None
        group, buffer = kept
        emptied, _ = self._held.pop(swap.outgoing)
        self._free[group].appendleft((emptied, None))  # empty slots are taken first
        self._held[swap.incoming] = buffer, "cache"

    def _kept(self, expert_id: ExpertId) -> tuple[Group, Tensor] | None:
        """Take the free slot that still has an expert, if there is one."""
        for group, free in self._free.items():
            for place, (buffer, intact) in enumerate(free):
                if intact == expert_id:
                    del free[place]
                    return group, buffer
        return None

    def _take(self, expert_id: ExpertId, group: Group) -> Tensor:
        buffer, _ = self._free[group].popleft()
        self._held[expert_id] = buffer, group
        return buffer

    def _give(self, expert_id: ExpertId, keep: bool) -> None:
        buffer, group = self._held.pop(expert_id)
        if keep:
            self._free[group].append((buffer, expert_id))
        else:
            self._free[group].appendleft((buffer, None))


def check_one_width(policy: str, needs: Needs) -> None:
    """Raises RefusedError for a policy with narrow copies of experts: slots and kernels are for one width."""
    if needs.narrow_share is not None:
        raise RefusedError(
            f"policy {policy!r} needs copies of experts in fewer bits, which the executor does not have; simulate it, "
            "or choose another policy"
        )


def slots_needed(prepared: Prepared) -> int:
    """The number of a run's cache and staging slots on the GPU. Raises RefusedError for narrow copies."""
    check_one_width(prepared.composition.name, prepared.needs)
    size, policy = prepared.shape.expert_bytes_by_layer[0], prepared.composition
    return prepared.memory.cache_bytes // size + policy.demand_slots + policy.prefetch_slots
