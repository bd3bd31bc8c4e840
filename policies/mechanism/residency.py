"""Residency: which experts hold GPU memory. Capacity, promises and evictions are decided here and nowhere else.

Memory is cache slots, grouped by layer or in one pool of bytes, and staging slots, with one quota for demand loads and
one for prefetches. A promise takes a cache slot when a layer is planned; its victims leave when the copy starts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from policies.mechanism.views import Copy, ExpertId, PolicyError, ResidencyView
from policies.protocols import Budget, Cache, InitialPlacement


class Residency:
    """Slots of the cache and of the staging area, and the experts in them."""

    def __init__(
        self, budget: Budget, placement: InitialPlacement, cache: Cache, demand_slots: int = 0, prefetch_slots: int = 0
    ) -> None:
        self.bytes = budget.expert_bytes
        self.ids = [[ExpertId(layer, e) for e in range(budget.experts)] for layer in range(budget.layers)]
        self.resident: list[set[int]] = [set() for _ in self.bytes]
        self.staged: list[set[int]] = [set() for _ in self.bytes]
        self.view = ResidencyView(self.resident, self.staged)
        self.pooled = placement.slots is None
        self.uniform = len(set(self.bytes)) == 1
        self.staging = {"demand": demand_slots, "prefetch": prefetch_slots}  # free staging slots
        self._intact: dict[str, list[ExpertId]] = {"demand": [], "prefetch": []}  # in free staging slots, oldest first
        self._quota: dict[ExpertId, str] = {}  # staged or staging expert -> the quota its slot is from
        self._cache = cache
        self._free = _capacity(budget, placement)  # bytes by group, neither held nor promised
        self._room = list(self._free)  # bytes by group that are not held; victims hold theirs until their copy starts
        for layer, experts in enumerate(placement.residents):
            for expert in experts:
                self._place(self.ids[layer][expert])

    def _place(self, id: ExpertId) -> None:
        group = self.group(id.layer)
        self._free[group] -= self.bytes[id.layer]
        self._room[group] -= self.bytes[id.layer]
        if self._free[group] < 0 or id.expert in self.resident[id.layer]:
            raise PolicyError(f"initial placement: no slot of its own for expert {id.expert} of layer {id.layer}")
        self.resident[id.layer].add(id.expert)
        self._cache.admitted(id, group)

    def group(self, layer: int) -> int:
        """The group of slots that a layer's experts compete for."""
        return 0 if self.pooled else layer

    def free(self, layer: int) -> int:
        """Bytes of the layer's group that are neither held nor promised."""
        return self._free[self.group(layer)]

    def holds(self, id: ExpertId) -> bool:
        """Could a GPU kernel read it now?"""
        return id.expert in self.resident[id.layer] or id.expert in self.staged[id.layer]

    def promise(self, id: ExpertId, blocked: Set[ExpertId]) -> tuple[ExpertId, ...] | None:
        """Take a cache slot for ``id``: the victims that leave when its copy starts, or None if it is not admitted.

        ``blocked`` experts stay.
        """
        cache, group, size = self._cache, self.group(id.layer), self.bytes[id.layer]
        if not cache.admits:
            return None
        free = self._free[group]
        victims: list[ExpertId] = []
        while free < size:
            victim = cache.victim(id, group, blocked)
            if victim is None:
                return None
            self._check_victim(victim, group, blocked)
            victims.append(victim)
            free += self.bytes[victim.layer]
            if free < size:
                blocked = {*blocked, victim}
        for victim in victims:
            cache.evicted(victim, group)
        self._free[group] = free - size
        cache.admitted(id, group)
        return tuple(victims)

    def promise_slot_of(self, incoming: ExpertId, outgoing: ExpertId) -> tuple[ExpertId, ...]:
        """A swap: ``incoming`` takes the slot of ``outgoing``."""
        group = self.group(incoming.layer)
        self._cache.evicted(outgoing, group)
        self._free[group] += self.bytes[outgoing.layer] - self.bytes[incoming.layer]
        self._cache.admitted(incoming, group)
        return (outgoing,)

    def adopt(self, incoming: ExpertId, outgoing: ExpertId) -> bool:
        """A swap without a copy, if ``incoming`` is still in a free staging slot: the two exchange their slots."""
        if outgoing.expert not in self.resident[outgoing.layer]:
            return False  # another swap has taken its slot
        if self.bytes[incoming.layer] < max(self.bytes):
            return False  # a cache slot of this layer is too small to become a staging slot
        for intact in self._intact.values():
            if incoming in intact:
                intact.remove(incoming)
                self.fill(incoming, self.promise_slot_of(incoming, outgoing))
                return True
        return False

    def fill(self, id: ExpertId, victims: Sequence[ExpertId]) -> None:
        """Put ``id`` into the cache slot promised to it without a copy: ``victims`` leave, and it is there at once."""
        group = self.group(id.layer)
        for victim in victims:
            self.resident[victim.layer].remove(victim.expert)
            self._room[group] += self.bytes[victim.layer]
        self._room[group] -= self.bytes[id.layer]
        self.resident[id.layer].add(id.expert)

    def start(self, copy: Copy) -> None:
        """The copy begins: its victims leave, a staged one takes its staging slot."""
        group = self.group(copy.id.layer)
        for victim in copy.victims:
            self.resident[victim.layer].remove(victim.expert)
            self._room[group] += self.bytes[victim.layer]
        if copy.into == "cache":
            self._room[group] -= self.bytes[copy.id.layer]
            if self._room[group] < 0:
                raise PolicyError(f"no room for the copy of {copy.id}: {-self._room[group]} bytes are missing")
        if copy.into == "staging":
            quota = "prefetch" if copy.kind == "prefetch" else "demand"
            self.staging[quota] -= 1
            self._quota[copy.id] = quota
            intact = self._intact[quota]
            del intact[: max(0, len(intact) - self.staging[quota])]  # slots that hold nothing go first, then the oldest
        for intact in self._intact.values():
            if copy.id in intact:
                intact.remove(copy.id)

    def finish(self, copy: Copy) -> None:
        """The copy has arrived: the expert can be read."""
        where = self.resident if copy.into == "cache" else self.staged
        where[copy.id.layer].add(copy.id.expert)

    def release(self, id: ExpertId) -> None:
        """Free the staging slot of ``id``; until another copy takes the slot, a cache update may adopt the expert."""
        self.staged[id.layer].remove(id.expert)
        quota = self._quota.pop(id)
        self.staging[quota] += 1
        self._intact[quota].append(id)

    def _check_victim(self, victim: ExpertId, group: int, blocked: Set[ExpertId]) -> None:
        if victim in blocked or victim.expert not in self.resident[victim.layer] or self.group(victim.layer) != group:
            raise PolicyError(
                f"cache {type(self._cache).__name__} chose {victim} as a victim: "
                f"it is pinned, promised or not in group {group}"
            )


def _capacity(budget: Budget, placement: InitialPlacement) -> list[int]:
    """Free bytes by group; refuses slots that do not fit the budget."""
    if placement.slots is None:
        return [budget.cache_bytes]
    free = [slots * size for slots, size in zip(placement.slots, budget.expert_bytes, strict=True)]
    if sum(free) > budget.cache_bytes:
        raise PolicyError(f"placement asks for {sum(free)} bytes of slots, the budget has {budget.cache_bytes}")
    return free
