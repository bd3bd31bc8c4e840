"""Residency: which experts hold GPU memory. Capacity, promises and evictions are decided here and nowhere else.

Memory is cache slots, grouped by layer or in one pool of bytes, and staging slots, with one quota for demand loads and
one for prefetches. A promise takes a cache slot when a layer is planned; its victims leave when the copy starts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache

from policies.mechanism.views import INFINITE_NS, Copy, ExpertCosts, ExpertId, PolicyError, ResidencyView, expert_ids
from policies.protocols import Budget, Cache, InitialPlacement


@lru_cache
def ids_by_layer(layers: int, experts: int) -> tuple[tuple[ExpertId, ...], ...]:
    """All experts, by layer: made once, since a run of a large model has tens of thousands."""
    return tuple(tuple(expert_ids(layer, range(experts))) for layer in range(layers))


class Residency:
    """Slots of the cache and of the staging area, and the experts in them."""

    def __init__(
        self, budget: Budget, placement: InitialPlacement, cache: Cache, demand_slots: int = 0, prefetch_slots: int = 0,
        narrow_bytes: Sequence[int] = (),
    ) -> None:
        """``narrow_bytes``: of a narrow copy, by layer; empty if there are none."""
        self.expert_bytes = budget.expert_bytes
        self._largest_bytes = max(budget.expert_bytes)
        self._experts, self._narrow_bytes = budget.experts, narrow_bytes
        self.ids = ids_by_layer(budget.layers, budget.experts * (2 if narrow_bytes else 1))
        self.resident: list[set[int]] = [set() for _ in self.expert_bytes]
        self.staged: list[set[int]] = [set() for _ in self.expert_bytes]
        self.view = ResidencyView(self.resident, self.staged)
        self.pooled = placement.slots is None
        self.group_of = [0 if self.pooled else layer for layer in range(budget.layers)]  # of slots
        self.uniform = not narrow_bytes and (not self.pooled or len(set(self.expert_bytes)) == 1)  # within each group
        self.staging = {"demand": demand_slots, "prefetch": prefetch_slots}  # free staging slots
        self._intact: dict[str, list[ExpertId]] = {"demand": [], "prefetch": []}  # in free staging slots, oldest first
        self._quota: dict[ExpertId, str] = {}  # staged or staging expert -> the quota its slot is from
        self._cache = cache
        self._free = _capacity(budget, placement)  # bytes by group, neither held nor promised
        self._room = list(self._free)  # bytes by group that are not held; victims hold theirs until their copy starts
        for layer, experts in enumerate(placement.residents):
            self._place(layer, experts)

    def _place(self, layer: int, experts: Sequence[int]) -> None:
        """Put a layer's first residents into its slots."""
        group, size = self.group_of[layer], self.expert_bytes[layer]
        resident, ids = self.resident[layer], self.ids[layer]
        most = self._free[group] // size
        for place, expert in enumerate(experts):
            if place >= most or expert in resident:
                raise PolicyError(f"initial placement: no slot of its own for expert {expert} of layer {layer}")
            resident.add(expert)
            self._cache.admitted(ids[expert], group)
        self._free[group] -= len(experts) * size
        self._room[group] -= len(experts) * size

    def size_of(self, key: ExpertId) -> int:
        """Bytes of an expert, or of its narrow copy."""
        layer, expert = key
        return self.expert_bytes[layer] if expert < self._experts else self._narrow_bytes[layer]

    def free(self, layer: int) -> int:
        """Bytes of the layer's group that are neither held nor promised."""
        return self._free[self.group_of[layer]]

    def holds(self, key: ExpertId) -> bool:
        """Could a GPU kernel read it now?"""
        return key.expert in self.resident[key.layer] or key.expert in self.staged[key.layer]

    def promise(
        self, key: ExpertId, blocked: Set[ExpertId], requested: bool = False
    ) -> tuple[ExpertId, ...] | None:
        """Take a cache slot for ``key``: the victims that leave when its copy starts, or None if it is not admitted.

        ``blocked`` experts stay. ``requested``: the cache itself has asked for the copy.
        """
        cache, group, size = self._cache, self.group_of[key.layer], self.size_of(key)
        if not (cache.admits or requested):
            return None
        free = self._free[group]
        victims: list[ExpertId] = []
        while free < size:
            victim = cache.victim(key, group, blocked)
            if victim is None:
                return None
            self._check_victim(victim, group, blocked)
            victims.append(victim)
            free += self.size_of(victim)
            if free < size:
                blocked = {*blocked, victim}
        for victim in victims:
            cache.evicted(victim, group)
        self._free[group] = free - size
        cache.admitted(key, group)
        return tuple(victims)

    def promise_slot_of(self, incoming: ExpertId, outgoing: ExpertId) -> tuple[ExpertId, ...]:
        """A swap: ``incoming`` takes the slot of ``outgoing``."""
        group = self.group_of[incoming.layer]
        self._cache.evicted(outgoing, group)
        self._free[group] += self.size_of(outgoing) - self.size_of(incoming)
        self._cache.admitted(incoming, group)
        return (outgoing,)

    def adopt(self, incoming: ExpertId, outgoing: ExpertId) -> bool:
        """A swap without a copy, if ``incoming`` is still in a free staging slot: the two exchange their slots."""
        for intact in self._intact.values():
            if incoming in intact:
                break
        else:
            return False
        if outgoing.expert not in self.resident[outgoing.layer]:
            return False  # another swap has taken its slot
        if self.size_of(incoming) < self._largest_bytes:
            return False  # a cache slot of that size is too small to become a staging slot
        intact.remove(incoming)
        self.fill(incoming, self.promise_slot_of(incoming, outgoing))
        return True

    def evict(self, key: ExpertId) -> bool:
        """Leave the slot of ``key`` free, if it is resident."""
        if key.expert not in self.resident[key.layer]:
            return False
        group, size = self.group_of[key.layer], self.size_of(key)
        self._cache.evicted(key, group)
        self.resident[key.layer].remove(key.expert)
        self._free[group] += size
        self._room[group] += size
        return True

    def fill(self, key: ExpertId, victims: Sequence[ExpertId]) -> None:
        """Put ``key`` into the cache slot promised to it without a copy: ``victims`` leave, and it is there at once."""
        self._take_slot(key, victims)
        self.resident[key.layer].add(key.expert)

    def start(self, copy: Copy) -> None:
        """The copy begins: its victims leave, a staged one takes its staging slot."""
        key = copy.key
        if copy.into == "cache":
            group = self._take_slot(key, copy.victims)
            if self._room[group] < 0:
                raise PolicyError(f"no room for the copy of {key}: {-self._room[group]} bytes are missing")
        else:
            quota = "prefetch" if copy.kind == "prefetch" else "demand"
            self.staging[quota] -= 1
            self._quota[key] = quota
            intact = self._intact[quota]
            del intact[: max(0, len(intact) - self.staging[quota])]  # slots that hold nothing go first, then the oldest
        for intact in self._intact.values():
            if intact and key in intact:
                intact.remove(key)

    def _take_slot(self, key: ExpertId, victims: Sequence[ExpertId]) -> int:
        """Give ``key`` the memory promised to it, once ``victims`` have left it; return its group."""
        group = self.group_of[key.layer]
        for victim in victims:
            self.resident[victim.layer].remove(victim.expert)
            self._room[group] += self.size_of(victim)
        self._room[group] -= self.size_of(key)
        return group

    def finish(self, copy: Copy) -> None:
        """The copy has arrived: the expert can be read."""
        layer, expert = copy.key
        (self.resident if copy.into == "cache" else self.staged)[layer].add(expert)

    def release(self, key: ExpertId) -> None:
        """Free the staging slot of ``key``; until another copy takes the slot, a cache update may adopt the expert."""
        self.staged[key.layer].remove(key.expert)
        quota = self._quota.pop(key)
        self.staging[quota] += 1
        self._intact[quota].append(key)

    def release_unused(self, layer: int, used: Sequence[int]) -> tuple[ExpertId, ...]:
        """Free the staging slots of a layer's experts that are not ``used``, and return these."""
        unused = tuple([self.ids[layer][e] for e in sorted(self.staged[layer]) if e not in used])
        for key in unused:
            self.release(key)
        return unused

    def ready_ns(
        self, layer: int, active: Sequence[int], flying: Sequence[Copy], costs: Sequence[ExpertCosts], backlog_ns: int
    ) -> dict[int, int]:
        """When each of a layer's experts can be read: 0 on the GPU; the last of the copies in flight at the backlog."""
        resident, staged = self.resident[layer], self.staged[layer]
        if staged:
            ready = {e: 0 if e in resident or e in staged else INFINITE_NS for e in active}
        else:
            ready = {e: 0 if e in resident else INFINITE_NS for e in active}
        for copy in reversed(flying):
            if copy.key.layer == layer and copy.key.expert in ready:
                ready[copy.key.expert] = max(backlog_ns, 0)
            backlog_ns -= costs[copy.key.layer].of(copy.key.expert).copy_ns
        return ready

    def _check_victim(self, victim: ExpertId, group: int, blocked: Set[ExpertId]) -> None:
        if (
            not isinstance(victim, ExpertId) or victim in blocked or victim.expert not in self.resident[victim.layer]
            or self.group_of[victim.layer] != group
        ):
            wrong = f"it is pinned, promised or not in group {group}"
            raise PolicyError(
                f"cache {type(self._cache).__name__} chose {victim!r} as a victim: "
                f"{wrong if isinstance(victim, ExpertId) else 'expected an ExpertId'}", self._cache.victim
            )


def _capacity(budget: Budget, placement: InitialPlacement) -> list[int]:
    """Free bytes by group; refuses slots that do not fit the budget."""
    if placement.slots is None:
        return [budget.cache_bytes]
    free = [slots * size for slots, size in zip(placement.slots, budget.expert_bytes, strict=True)]
    if sum(free) > budget.cache_bytes:
        raise PolicyError(f"placement asks for {sum(free)} bytes of slots, the budget has {budget.cache_bytes}")
    return free
