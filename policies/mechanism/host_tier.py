"""The host's memory as a level between a disk, which holds all experts, and the devices that use them.

A state machine like the session, of which it is a part: no clock, no input and output. What a layer needs from the
host (the experts that the CPU computes and those that are copied to the GPU) is held, or read first, one expert at a
time. An expert stays from the moment at which a layer needs it until its use has ended. What is not in use makes room
(``policies.mechanism.host_keeping``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Literal, NamedTuple

from policies.mechanism.host_keeping import CacheKeeper, Keeper, Keeping, SharedKeeper, SystemKeeper
from policies.mechanism.views import ExpertCosts, ExpertId, PolicyError
from policies.protocols import Composition


class Read(NamedTuple):
    """A read of one expert into the host's memory. ``victims`` leave it at the moment at which the read starts.

    ``kind``: "read" is needed by a layer, "read_ahead" by a copy that no layer waits for yet."""

    key: ExpertId
    kind: Literal["read", "read_ahead"]
    victims: tuple[ExpertId, ...]
    expert_bytes: int


class HostTier:
    """Experts in ``capacity_bytes`` of the host's memory. ``ranking``: all experts, in the order in which it would hold
    them at first."""

    def __init__(
        self, capacity_bytes: int, costs: Sequence[ExpertCosts], keeping: Keeping, ranking: Sequence[ExpertId]
    ) -> None:
        self._costs, self._ranking = costs, ranking
        self._users: dict[ExpertId, int] = {}  # needed now, by how many uses
        self._needed: deque[ExpertId] = deque()
        self._of_plan = 0  # of these, the last ones: needed by a plan that may not be in effect yet
        self._ahead: list[ExpertId] = []
        self.reading: Read | None = None
        self.held: set[ExpertId] = set()
        self._free = capacity_bytes
        self._buffers = 2 * max(map(self.size_of, ranking))  # one for the CPU, one for the link
        if capacity_bytes < self._buffers:
            raise PolicyError(
                f"host memory of {capacity_bytes} bytes for experts: expected room for two, {self._buffers} bytes"
            )
        self._keeper: Keeper = SystemKeeper(keeping, self.size_of, capacity_bytes, self._buffers)

    def fill(self, on_gpu: Sequence[Collection[int]], policy: Composition | None = None) -> None:
        """Hold the first of the ranking that are not ``on_gpu`` (by layer), as many as have room.

        A ``policy`` with a cache for the host's memory keeps what is there from now on, but for two buffers, and may
        have a ranking of its own."""
        if policy is None or policy.host_cache is None:
            self.fill_for(on_gpu)
        else:
            rooms = self.rooms(range(len(self._costs)), policy.host_by_layer)
            self.fill_for(on_gpu, CacheKeeper(policy.host_cache, self.size_of, rooms), policy.host_start)

    def fill_for(
        self, on_gpu: Sequence[Collection[int]], cached: CacheKeeper | SharedKeeper | None = None,
        start: Sequence[ExpertId] | None = None,
    ) -> None:
        """``fill``, where ``cached`` keeps what policies do, and they may rank what it holds at the ``start``."""
        if cached is not None:
            self._keeper = cached
        for key in self._ranking if start is None else start:
            if self.size_of(key) > self._free:
                break
            if key.expert not in on_gpu[key.layer] and self._keeper.fill(key, self._free - self.size_of(key)):
                self._hold(key)
        if cached is not None:
            cached.begin(best_first=start is not None)

    def rooms(self, layers: range, by_layer: bool) -> list[int]:
        """Bytes that a policy's cache divides: its layers' part of what is free, in one pool or by layer."""
        room, sizes = self._free - self._buffers, [costs.expert_bytes for costs in self._costs]
        total, own = sum(sizes), sizes[layers.start : layers.stop]
        return [room * size // total for size in own] if by_layer else [room * sum(own) // total]

    def holds(self, key: ExpertId) -> bool:
        """Can it be read now, by the CPU or a copy?"""
        return key in self.held

    def own(self, key: ExpertId) -> ExpertId | None:
        """An expert of the model as the session numbers it, to which all belong."""
        return key

    # --- what is needed ---------------------------------------------------------------------------------------------

    def need(self, keys: Iterable[ExpertId], by_plan: bool = False) -> None:
        """These experts are needed, in this order: they stay until as many uses of them have ended. ``by_plan``: one
        that is yet to take effect."""
        before = len(self._needed)
        for key in keys:
            self._users[key] = self._users.get(key, 0) + 1
            if key in self.held:
                self._keeper.touch(key, self._users)
            elif (self.reading is None or key != self.reading.key) and key not in self._needed:
                self._needed.append(key)
        if by_plan:
            self._of_plan = len(self._needed) - before

    def end_use(self, key: ExpertId) -> None:
        """One use of an expert, by the CPU or a copy, has ended."""
        left = self._users[key] - 1
        if left:
            self._users[key] = left
        else:
            del self._users[key]
            self._keeper.release(key)

    def read_ahead(self, keys: Iterable[ExpertId], more: bool = False, layers: Container[int] | None = None) -> None:
        """Read these experts, best first, when nothing is needed; in place of those that were to be read ahead, or
        ``more`` than those. ``layers``: where the GPU that asks has some alone, those of others follow."""
        others = () if more or layers is None else [key for key in self._ahead if key.layer not in layers]
        self._ahead = [*(self._ahead if more else ()), *(key for key in keys if key not in self.held), *others]

    def coming(self) -> list[ExpertId]:
        """The experts that are being read or needed, in the order in which they will be held."""
        return [*(() if self.reading is None else (self.reading.key,)), *self._needed]

    # --- the disk ---------------------------------------------------------------------------------------------------

    def next_read(self, in_effect: bool, wanted: Callable[[ExpertId], bool]) -> Read | None:
        """The read that starts now, the disk being free; None: nothing is to be read, or there is no room.

        ``in_effect``: the last plan is; else only what was needed before. ``wanted``: of an expert that was to be read
        ahead, whether it still is.
        """
        if self.reading is not None:
            raise PolicyError(f"next_read: expected no read under way, got {self.reading.key}")
        if len(self._needed) > (0 if in_effect else self._of_plan):
            self.reading = self._read(self._needed[0], "read")
            if self.reading is not None:
                self._needed.popleft()
                self._of_plan = min(self._of_plan, len(self._needed))
            return self.reading
        while self._ahead:
            key = self._ahead.pop(0)
            if key not in self.held and key not in self._needed and wanted(key):
                self.reading = self._read(key, "read_ahead")
                if self.reading is None:
                    self._ahead.insert(0, key)
                break
        return self.reading

    def end_read(self, read: Read) -> None:
        """The read has ended: its expert can be used. Raises PolicyError for another one than that under way."""
        if read != self.reading:
            raise PolicyError(f"end_read: expected {self.reading}, got {read}")
        self.reading = None
        self._free += read.expert_bytes  # ``_hold`` takes it
        self._hold(read.key)
        self._keeper.came(read.key, self._users)

    def _read(self, key: ExpertId, kind: Literal["read", "read_ahead"]) -> Read | None:
        """Start a read of ``key``, if what is not in use makes room for it."""
        size, victims = self.size_of(key), [*self._keeper.leaving()]
        free = self._free + sum(map(self.size_of, victims))
        candidates = self._keeper.victims(key, self._users)
        while free < size:
            victim = next(candidates, None)
            if victim is None:
                return None
            victims.append(victim)
            free += self.size_of(victim)
        for victim in victims:
            self.held.remove(victim)
            self._keeper.left(victim)
        self._free = free - size
        return Read(key, kind, tuple(victims), size)

    def _hold(self, key: ExpertId) -> None:
        self.held.add(key)
        self._free -= self.size_of(key)
        if self._free < 0:
            raise PolicyError(f"no room in the host's memory for {key}: {-self._free} bytes are missing")

    def size_of(self, key: ExpertId) -> int:
        """Bytes of an expert."""
        return self._costs[key.layer].of(key.expert).expert_bytes


def in_turn(layers: int, experts: int) -> list[ExpertId]:
    """A ranking of experts by their numbers, which say nothing about their use, of every layer in turn."""
    return [ExpertId(layer, expert) for expert in range(experts) for layer in range(layers)]


def by_popularity(popularity: Sequence[Sequence[float]]) -> list[ExpertId]:
    """A ranking of experts by their share of uses; ties to the lower layer, then to the lower expert."""
    ranked = sorted(
        (-share, layer, expert) for layer, shares in enumerate(popularity) for expert, share in enumerate(shares)
    )
    return [ExpertId(layer, expert) for _, layer, expert in ranked]
