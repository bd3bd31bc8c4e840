"""The queue of the copy lane: demand loads, prefetches and swaps, and which of them is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from typing import Literal, TypeAlias

from policies.mechanism.checks import check_update
from policies.mechanism.host_share import HostShare
from policies.mechanism.host_tier import HostTier
from policies.mechanism.residency import Residency
from policies.mechanism.victims import Slots, Victims, victims_in_time
from policies.mechanism.views import Copy, Eviction, ExpertId, PolicyError, Swap, Updates, Upload
from policies.protocols import Composition

MOST_IN_FLIGHT = 2  # the one on the link, and one behind it

NO_UPDATES = Updates()

CacheUpdate: TypeAlias = Swap | Upload | Eviction


class CopyQueue:
    """Three queues over one residency manager. No expert is in flight twice, and none on the GPU is copied.

    ``in_flight``: copies that have started and not arrived, oldest first. The first is on the link; a second one may be
    submitted behind it, so that a real link does not idle until the host notices the first one's end.
    ``host``: where not all experts are in the host's memory; a copy starts only while its expert is.
    """

    def __init__(
        self, policy: Composition, residency: Residency, host: HostTier | HostShare | None = None
    ) -> None:
        self.in_flight: list[Copy] = []
        self.flying: tuple[ExpertId, ...] = ()  # the experts of ``in_flight``
        self._policy, self._residency, self._host = policy, residency, host
        self.loads: deque[Copy] = deque()
        self.prefetches: list[ExpertId] = []  # best first
        self.swaps: dict[ExpertId, Swap | Upload] = {}  # by incoming expert, oldest first
        self._swaps_of: dict[int, list[ExpertId]] = {}  # by layer: those that were last queued, some copied since

    @property
    def queued(self) -> int:
        """How many copies wait for the lane."""
        return len(self.loads) + len(self.prefetches) + len(self.swaps)

    @property
    def load_may_start(self) -> bool:
        """True if there is a demand load, and the first one is held by the host and has a slot when it starts."""
        if not self.loads or (self._host is not None and not self._host.holds(self.loads[0].key)):
            return False
        return self.loads[0].into == "cache" or self._residency.staging["demand"] > 0

    def start_load(self) -> Copy | None:
        """Start the first demand load; None: it has no staging slot, or is yet to be read, and blocks the rest."""
        return self._start(self.loads.popleft()) if self.load_may_start else None

    def start_background(self, pinned: Set[ExpertId]) -> Copy | None:
        """Start the next prefetch or cache update, if one can start. ``pinned`` experts are not displaced."""
        copy = self._next_background({*pinned, *self.flying} if self.flying else pinned)
        return None if copy is None else self._start(copy)

    def _next_background(self, pinned: Set[ExpertId]) -> Copy | None:
        if self._policy.swaps_before_prefetches:
            return self._next_swap(pinned) or self._next_prefetch(pinned)
        return self._next_prefetch(pinned) or self._next_swap(pinned)

    def _start(self, copy: Copy) -> Copy:
        self._residency.start(copy)
        self.in_flight.append(copy)
        self.flying = (*self.flying, copy.key)
        return copy

    def end(self, copy: Copy) -> None:
        """The oldest copy in flight has arrived. Raises PolicyError for another one."""
        if not self.in_flight or copy is not self.in_flight[0]:
            raise PolicyError(f"copied: expected the oldest copy in flight, got {copy.key}; {self.flying} are")
        del self.in_flight[0]
        self.flying = self.flying[1:]
        self._residency.finish(copy)

    def add_loads(self, layer: int, loads: Sequence[int], pinned: Set[ExpertId]) -> list[ExpertId]:
        """Queue demand loads in order, each with its slot and victims; those not admitted go through staging.

        Returns the victims: they stay until their copies start, and no other copy may displace them.
        """
        residency = self._residency
        copies, size_of = [residency.ids[layer][expert] for expert in loads], residency.size_of
        free = residency.free(layer)
        slots = self._slots_for(copies, pinned)
        if not residency.uniform and len(slots) > 1:
            slots = victims_in_time(slots, copies, free, size_of)
        for key in copies:
            victims = slots[key]
            if victims is None:
                self._check_staging(key)
            into: Literal["cache", "staging"] = "staging" if victims is None else "cache"
            self.loads.append(Copy(key, "demand", into, victims or (), size_of(key)))
        return [victim for victims in slots.values() for victim in victims or ()]

    def _slots_for(self, copies: Sequence[ExpertId], pinned: Set[ExpertId]) -> Slots:
        """A cache slot, with its victims, for each copy that the cache admits or swaps in; None for the others."""
        cache, swaps = self._policy.cache, self.swaps
        if not (cache.admits or swaps):
            return dict.fromkeys(copies)
        guarded = {*pinned, *self.flying}
        slots: Slots = {}
        for key in cache.order(copies):
            slots[key] = victims = self._promote(swaps.pop(key, None), key, guarded)
            guarded.add(key)
            if victims:
                guarded.update(victims)
        return slots

    def still_absent(self, layer: int, experts: Sequence[int], ahead: Sequence[int]) -> tuple[int, ...]:
        """Experts that are neither on the GPU nor in flight, nor computed ``ahead`` by the CPU."""
        ids, flying = self._residency.ids[layer], self.flying
        return tuple(
            e for e in experts if ids[e] not in flying and e not in ahead and not self._residency.holds(ids[e])
        )

    def add_streamed(self, layer: int, streamed: Sequence[int]) -> None:
        """Queue experts that only pass through staging because their whole layer is streamed.

        A queued swap of one of them is dropped, since its expert is copied now and released; a cache may request it
        again.
        """
        for expert in streamed:
            key = self._residency.ids[layer][expert]
            self._check_staging(key)
            self.swaps.pop(key, None)
            self.loads.append(Copy(key, "demand", "staging", (), self._residency.size_of(key)))

    def held_first(self, host: HostTier | HostShare) -> list[ExpertId]:
        """Put demand loads that the host holds before the others, and return all in order."""
        self.loads = deque(sorted(self.loads, key=lambda load: not host.holds(load.key)))
        return [load.key for load in self.loads]

    def waits(self, key: ExpertId) -> bool:
        """True if a prefetch or cache update of ``key`` is queued."""
        return key in self.swaps or key in self.prefetches

    def take_prefetches_of(self, layer: int, loads: Sequence[int]) -> tuple[ExpertId, ...]:
        """Drop what is queued for ``layer``: ``loads`` become demand loads, the others (returned) are withdrawn."""
        mine = [key for key in self.prefetches if key.layer <= layer]
        self.prefetches = [key for key in self.prefetches if key.layer > layer]
        return tuple(key for key in mine if key.expert not in loads)

    def replace_prefetches(self, ranked: Sequence[ExpertId]) -> tuple[tuple[ExpertId, ...], tuple[ExpertId, ...]]:
        """A new foresight: returns what is queued now, and what is withdrawn."""
        flying = self.flying
        wanted: dict[ExpertId, None] = {}
        for key in ranked:
            if key not in flying and not self._residency.holds(key):
                wanted[key] = None
        withdrawn = tuple([key for key in self.prefetches if key not in wanted]) if self.prefetches else ()
        self.prefetches = list(wanted)
        return tuple(wanted), withdrawn

    def update(self, updates: Sequence[CacheUpdate], kept: Set[ExpertId] | None = None) -> Updates:
        """New swaps and uploads of a layer replace its queued ones.

        With ``kept``, updates that need no copy and displace none of these are done at once.
        """
        if not updates:
            return NO_UPDATES
        residency = self._residency
        copies = [update for update in updates if not isinstance(update, Eviction)]
        leaving: list[ExpertId] = []
        if kept is not None and len(copies) < len(updates):
            evictions = [update.outgoing for update in updates if isinstance(update, Eviction)]
            leaving = [key for key in evictions if key not in kept]
        for copy in copies:
            check_update(self._policy, copy, residency.resident, leaving)
        for layer in {copy.incoming.layer for copy in copies}:
            for key in self._swaps_of.pop(layer, ()):
                self.swaps.pop(key, None)
        evicted: tuple[ExpertId, ...] = ()
        adopted: tuple[Swap, ...] = ()
        if kept is not None:
            evicted = tuple([key for key in leaving if residency.evict(key)])
            swaps = [swap for swap in copies if isinstance(swap, Swap) and swap.outgoing not in kept]
            adopted = tuple([swap for swap in swaps if residency.adopt(*swap)])
        flying = self.flying
        queued = tuple([copy for copy in copies if copy.incoming not in flying and copy not in adopted])
        for copy in queued:
            self.swaps[copy.incoming] = copy
            self._swaps_of.setdefault(copy.incoming.layer, []).append(copy.incoming)
        return Updates(queued, adopted, evicted)

    def _promote(self, swap: Swap | Upload | None, key: ExpertId, guarded: Set[ExpertId]) -> Victims:
        """The slot of a load, or of a queued update whose expert is needed now, if that slot may be had."""
        if not isinstance(swap, Swap):
            return self._residency.promise(key, guarded, requested=swap is not None)
        outgoing = swap.outgoing
        if outgoing in guarded or outgoing.expert not in self._residency.resident[outgoing.layer]:
            return None
        return self._residency.promise_slot_of(key, outgoing)

    def _check_staging(self, key: ExpertId) -> None:
        if self._policy.demand_slots < 1:
            raise PolicyError(
                f"policy {self._policy.name!r} loads {key}, which its cache does not admit, without any staging slot: "
                f"give it demand_slots >= 1"
            )

    def _next_prefetch(self, pinned: Set[ExpertId]) -> Copy | None:
        prefetcher, residency = self._policy.prefetcher, self._residency
        prefetches = self.prefetches
        while prefetches and (residency.holds(prefetches[0]) or prefetches[0] in self.flying):
            prefetches.pop(0)  # a swap has copied it since, or is copying it
        key = self._first_held(prefetches)
        if key is None or prefetcher is None:
            return None
        if prefetcher.into == "cache" and self._overcommitted():
            return None
        victims = residency.promise(key, pinned) if prefetcher.into == "cache" else None
        if victims is None and residency.staging["prefetch"] < 1:
            return None
        prefetches.remove(key)
        if victims is None:
            return Copy(key, "prefetch", "staging", (), residency.size_of(key))
        return Copy(key, "prefetch", "cache", victims, residency.size_of(key))

    def _first_held(self, prefetches: Sequence[ExpertId]) -> ExpertId | None:
        """The first prefetch that can be copied: where some are yet to be read, the first that the host holds."""
        if self._host is None:
            return prefetches[0] if prefetches else None
        held = (key for key in prefetches if self._host.holds(key))
        return next((key for key in held if not self._residency.holds(key) and key not in self.flying), None)

    def _overcommitted(self) -> bool:
        """True if victims of queued loads still hold memory that counts as free (only if sizes differ in a group).

        They do where, from some load on, the victims are larger than what replaces them: until then there is less room.
        """
        size_of, more = self._residency.size_of, 0
        for load in reversed(self.loads):
            if load.into == "cache":
                more += load.expert_bytes - sum([size_of(victim) for victim in load.victims])
                if more < 0:
                    return True
        return False

    def _next_swap(self, pinned: Set[ExpertId]) -> Copy | None:
        """The first swap or upload that is possible now; those that are no longer possible are dropped."""
        residency, copy = self._residency, None
        dropped: list[ExpertId] = []
        for key, swap in self.swaps.items():
            layer, new = key
            if new in residency.resident[layer] or (isinstance(swap, Swap) and self._gone(swap.outgoing)):
                dropped.append(key)
            elif self._host is not None and not self._host.holds(key):
                continue
            elif new not in residency.staged[layer] and key not in self.flying:
                victims = self._victims_of(swap, pinned)
                if victims is not None:
                    dropped.append(key)
                    copy = Copy(key, "swap", "cache", victims, residency.size_of(key))
                    break
        for key in dropped:
            del self.swaps[key]
        return copy

    def _gone(self, key: ExpertId) -> bool:
        return key.expert not in self._residency.resident[key.layer]

    def _victims_of(self, swap: Swap | Upload, pinned: Set[ExpertId]) -> Victims:
        """The victims of a queued update, None if it has to wait."""
        if isinstance(swap, Swap):
            return None if swap.outgoing in pinned else self._residency.promise_slot_of(*swap)
        return None if self._overcommitted() else self._residency.promise(swap.incoming, pinned, requested=True)
