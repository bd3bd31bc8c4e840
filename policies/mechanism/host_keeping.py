"""Contents of the host's memory above a disk, as a system keeps them or as a policy's cache does.

Systems:

- "experts": the least recently used one leaves, as engines with a cache of their own keep them;
- "pages": as Linux keeps pages of a file. What was used once leaves before what was used again, and of the latter the
  oldest count as used once again where they hold more than a share of the memory (mm/vmscan.c, ``inactive_is_low``);
- "pinned": a fixed set stays, and the others share what is left as "experts" do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain
from math import isqrt
from typing import Literal, Protocol

from policies.mechanism.views import ExpertId, PolicyError
from policies.protocols import HostCache

Keeping = Literal["experts", "pages", "pinned"]
SizeOf = Callable[[ExpertId], int]


class Keeper(Protocol):
    """Orders what is in the host's memory."""

    def fill(self, key: ExpertId, rest_bytes: int) -> bool:
        """Before the first token there is room for ``key``, and then for ``rest_bytes``: whether it is to be held."""
        ...

    def came(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        """``key`` is held from now on."""
        ...

    def left(self, key: ExpertId) -> None:
        """``key`` is no longer held."""
        ...

    def touch(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        """``key``, which is held, is needed."""
        ...

    def release(self, key: ExpertId) -> None:
        """Note the end of the last use of ``key`` that was under way."""
        ...

    def leaving(self) -> Sequence[ExpertId]:
        """Experts that leave when the next read starts, whether it needs the room or not."""
        ...

    def victims(self, incoming: ExpertId, in_use: Container[ExpertId]) -> Iterator[ExpertId]:
        """Experts that leave for ``incoming``, the next one first; none that is in use."""
        ...


class SystemKeeper:
    """Keeps experts as a system does. ``buffers``: bytes that are not pinned."""

    def __init__(self, keeping: Keeping, size_of: SizeOf, capacity_bytes: int, buffers: int) -> None:
        self._keeping, self._size_of, self._buffers = keeping, size_of, buffers
        self._often_at_most = max(isqrt(10 * (capacity_bytes >> 30)), 1)  # times the bytes that were used once
        self._pinned = set[ExpertId]()
        self._once = OrderedDict[ExpertId, None]()  # the next to leave first
        self._often = OrderedDict[ExpertId, None]()
        self._bytes = {"once": 0, "often": 0}

    def fill(self, key: ExpertId, rest_bytes: int) -> bool:
        if self._keeping == "pinned" and rest_bytes >= self._buffers:
            self._pinned.add(key)
        self.came(key, ())
        return True

    def came(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        if key not in self._pinned:
            self._once[key] = None
            self._bytes["once"] += self._size_of(key)

    def left(self, key: ExpertId) -> None:
        name, where = ("once", self._once) if key in self._once else ("often", self._often)
        del where[key]
        self._bytes[name] -= self._size_of(key)

    def touch(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        if key in self._often:
            self._often.move_to_end(key)
        elif key in self._once:
            self._once.move_to_end(key)
            if self._keeping == "pages":
                self._move(key, "once", "often")
                while self._bytes["often"] > self._often_at_most * self._bytes["once"]:
                    self._move(next(iter(self._often)), "often", "once")

    def release(self, key: ExpertId) -> None:
        """Used or not, it stays until there is no room."""

    def leaving(self) -> Sequence[ExpertId]:
        return ()

    def victims(self, incoming: ExpertId, in_use: Container[ExpertId]) -> Iterator[ExpertId]:
        return (old for old in chain(self._once, self._often) if old not in in_use)

    def _move(self, key: ExpertId, source: str, target: str) -> None:
        lists, size = {"once": self._once, "often": self._often}, self._size_of(key)
        del lists[source][key]
        lists[target][key] = None
        self._bytes[source] -= size
        self._bytes[target] += size


class CacheKeeper:
    """Keeps experts as a policy's cache says: its *members*, and next to them those that only *pass*, since it did not
    admit them. What has passed, and what the cache has evicted, leaves when the next read starts.

    ``rooms``: bytes of members by group, one pool or the layers.
    """

    def __init__(self, cache: HostCache, size_of: SizeOf, rooms: Sequence[int]) -> None:
        self._cache, self._size_of, self._free = cache, size_of, list(rooms)
        self._pooled = len(rooms) == 1
        self._members = OrderedDict[ExpertId, None]()
        self._passing = OrderedDict[ExpertId, None]()  # yet to be used, or in use
        self._leaving = OrderedDict[ExpertId, None]()

    def fill(self, key: ExpertId, rest_bytes: int) -> bool:
        group, size = self._group(key), self._size_of(key)
        fits = size <= self._free[group]
        if fits:
            self._free[group] -= size
            self._members[key] = None
        return fits

    def begin(self, best_first: bool) -> None:
        """Tell the cache of its first members. ``best_first``: of those that were ranked the best comes last, as if
        used last, so that it is not the first to leave."""
        for key in reversed(self._members) if best_first else self._members:
            self._cache.admitted(key, self._group(key))

    def came(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        if not self._admitted(key, in_use):
            self._passing[key] = None

    def left(self, key: ExpertId) -> None:
        if key in self._members:
            self._expel(key)
        else:
            del (self._passing if key in self._passing else self._leaving)[key]

    def touch(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        if key not in self._members:
            self._passing.pop(key, None)
            self._leaving.pop(key, None)
            self.came(key, in_use)

    def release(self, key: ExpertId) -> None:
        if key in self._passing:
            del self._passing[key]
            self._leaving[key] = None

    def leaving(self) -> Sequence[ExpertId]:
        return list(self._leaving)

    def victims(self, incoming: ExpertId, in_use: Container[ExpertId]) -> Iterator[ExpertId]:
        yield from [key for key in self._passing if key not in in_use]
        blocked, groups = _Either(in_use, set()), len(self._free)
        for back in range(groups):  # from the incoming one's: those of the layers that come again last go first
            group = (self._group(incoming) - back) % groups
            while (victim := self._victim(incoming, group, blocked)) is not None:
                blocked.more.add(victim)
                yield victim

    def _admitted(self, key: ExpertId, in_use: Container[ExpertId]) -> bool:
        """Make it a member, if the cache admits it; those that it replaces pass from now on."""
        group, size = self._group(key), self._size_of(key)
        if not self._cache.admits:
            return False
        while self._free[group] < size:
            victim = self._victim(key, group, in_use)
            if victim is None:
                return False
            self._expel(victim)
            self._leaving[victim] = None
        self._join(key)
        return True

    def _join(self, key: ExpertId) -> None:
        group = self._group(key)
        self._free[group] -= self._size_of(key)
        self._members[key] = None
        self._cache.admitted(key, group)

    def _expel(self, key: ExpertId) -> None:
        group = self._group(key)
        del self._members[key]
        self._free[group] += self._size_of(key)
        self._cache.evicted(key, group)

    def _victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        victim = self._cache.victim(incoming, group, blocked)
        if victim is not None and (victim not in self._members or victim in blocked or self._group(victim) != group):
            raise PolicyError(
                f"host cache {type(self._cache).__name__} chose {victim!r} as a victim: expected a member of group "
                f"{group} that is not in use", self._cache.victim,
            )
        return victim

    def _group(self, key: ExpertId) -> int:
        return 0 if self._pooled else key.layer


class SharedKeeper:
    """The keepers of several GPUs, each of the experts of its own layers, which it numbers from 0."""

    def __init__(self, keepers: Sequence[tuple[range, CacheKeeper]]) -> None:
        self._keepers = keepers
        self._of_layer = [number for number, (layers, _) in enumerate(keepers) for _ in layers]

    def fill(self, key: ExpertId, rest_bytes: int) -> bool:
        keeper, own, _ = self._of(key)
        return keeper.fill(own, rest_bytes)

    def begin(self, best_first: bool) -> None:
        """``CacheKeeper.begin`` of all."""
        for _, keeper in self._keepers:
            keeper.begin(best_first)

    def came(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        keeper, own, layers = self._of(key)
        keeper.came(own, OfLayers(in_use, layers))

    def left(self, key: ExpertId) -> None:
        keeper, own, _ = self._of(key)
        keeper.left(own)

    def touch(self, key: ExpertId, in_use: Container[ExpertId]) -> None:
        keeper, own, layers = self._of(key)
        keeper.touch(own, OfLayers(in_use, layers))

    def release(self, key: ExpertId) -> None:
        keeper, own, _ = self._of(key)
        keeper.release(own)

    def leaving(self) -> Sequence[ExpertId]:
        return [of_model(key, layers) for layers, keeper in self._keepers for key in keeper.leaving()]

    def victims(self, incoming: ExpertId, in_use: Container[ExpertId]) -> Iterator[ExpertId]:
        """Choose those of its own layers first, then those of the GPU before, as if for its last layer, and so on."""
        at_work = self._of_layer[incoming.layer]
        for back in range(len(self._keepers)):
            layers, keeper = self._keepers[at_work - back]
            layer = len(layers) - 1 if back else incoming.layer - layers.start
            own = keeper.victims(ExpertId(layer, incoming.expert), OfLayers(in_use, layers))
            yield from (of_model(key, layers) for key in own)

    def _of(self, key: ExpertId) -> tuple[CacheKeeper, ExpertId, range]:
        layers, keeper = self._keepers[self._of_layer[key.layer]]
        return keeper, ExpertId(key.layer - layers.start, key.expert), layers


def of_model(key: ExpertId, layers: range) -> ExpertId:
    """An expert of some ``layers``, which are numbered from 0, as one of the model."""
    return ExpertId(layers.start + key.layer, key.expert)


class OfLayers(Container[ExpertId]):
    """Experts of the model in some of its layers, which are numbered from 0. Plain pairs are told as well, with which
    caches of many members look."""

    def __init__(self, experts: Container[ExpertId], layers: range) -> None:
        self._experts, self._layers = experts, layers

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and of_model(ExpertId(*key), self._layers) in self._experts


class _Either(Container[ExpertId]):
    """Experts of one or of the other."""

    def __init__(self, one: Container[ExpertId], more: set[ExpertId]) -> None:
        self._one, self.more = one, more

    def __contains__(self, key: object) -> bool:
        return key in self.more or key in self._one
