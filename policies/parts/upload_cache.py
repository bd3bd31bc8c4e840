"""A cache that no layer waits for: experts on the GPU run there, those that miss run on the CPU, and some of these are
copied next to the computation, for later steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence, Set
from itertools import count
from typing import Literal, cast

from policies.mechanism.views import Assignment, Eviction, ExpertId, LayerView, Upload
from policies.parts.admission import Admission
from policies.parts.assigners import settle
from policies.protocols import Budget, Cache, InitialPlacement, Placement, When

Frees = Literal["copy", "ahead", "request"]


class CountedSlots:
    """Another placement; remembers the slots of each layer (None: one pool) for the cache of the same composition."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.slots: tuple[int, ...] | None = None

    def place(self, budget: Budget) -> InitialPlacement:
        placed = self.placement.place(budget)
        self.slots = placed.slots
        return placed


class UploadCache:
    """In decode, up to ``inserts`` of the experts that miss in a layer and step are *uploaded*, lower ids first, if
    ``admission`` says that they are worth it. ``order`` says who is evicted.

    An expert is *in service* from the step after the end of its upload on: a table says which experts the GPU has, and
    a step that runs must not see it change. ``frees`` says when an expert leaves its slot to an upload:

    - "copy": when the upload starts to be copied, which it may from the routing of the layer on;
    - "ahead": at the end of a step, so that each layer has ``inserts`` free slots in the next, and no upload waits for
      the end of its step. Slots must be by layer;
    - "request": at the end of the step, when its uploads are requested, however many wait for the link already; of the
      misses, the ``inserts`` highest ids. Slots must be by layer.

    ``dwell``: steps for which an expert stays once it has a slot.
    """

    admits = False

    def __init__(
        self, order: Cache, admission: Admission, slots: CountedSlots, inserts: int, *, frees: Frees = "copy",
        dwell: int = 0,
    ) -> None:
        self._order, self._admission, self._slots, self._inserts = order, admission, slots, inserts
        self._frees, self._dwell = frees, dwell
        self._members: dict[int, dict[ExpertId, int]] = {}  # by group: the step in which they got their slots
        self._coming: set[ExpertId] = set()  # members that have not arrived, or only in this step
        self._in_service: dict[int, set[int]] = {}
        self._missed: dict[int, list[ExpertId]] = {}  # by layer, in the present step
        self._waiting: dict[ExpertId, int] = {}  # uploads that hold a free slot, with their turns
        self._turns = count()
        self._waiting_of: defaultdict[int, dict[ExpertId, int]] = defaultdict(dict)  # the same by layer
        self._full = False  # whether a pool has had no room left
        self._step = -1

    def in_service(self, layer: int) -> Set[int]:
        """The experts of a layer that the GPU may compute."""
        return self._in_service.get(layer, frozenset())

    def observe(self, view: LayerView) -> None:
        self._order.observe(view)
        self._step, served = view.step, self.in_service(view.layer)
        missed = [expert for expert in view.routing.active if expert not in served]
        if view.phase == "decode":
            self._missed[view.layer] = [ExpertId(view.layer, expert) for expert in missed]
            self._admission.observe(view, frozenset(missed))

    def admitted(self, key: ExpertId, group: int) -> None:
        """It has a slot; at the start it is in service at once."""
        self._order.admitted(key, group)
        self._members.setdefault(group, {})[key] = self._step
        if key in self._waiting:
            del self._waiting[key], self._waiting_of[key.layer][key]
        if self._step < 0:
            self._in_service.setdefault(key.layer, set()).add(key.expert)
        else:
            self._coming.add(key)

    def evicted(self, key: ExpertId, group: int) -> None:
        self._order.evicted(key, group)
        del self._members[group][key]
        self._coming.discard(key)
        self._in_service.get(key.layer, set()).discard(key.expert)

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        return incoming

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """That of the order, if victims leave when a copy starts."""
        self._full = True
        return self._victim(incoming, group, blocked) if self._frees == "copy" else None

    def swaps(self, view: LayerView, when: When) -> Sequence[Upload | Eviction]:
        """The uploads of the layer that was routed; at the end of a step the slots that are freed, and requests."""
        if when == "step_end":
            return self._end_step(view)
        if when != "routed" or view.phase != "decode" or self._frees == "request":
            return ()
        layer, missed = view.layer, self._missed[view.layer]
        room = self._room(layer)
        if self._frees == "copy":
            return [Upload(key) for key in self._choose(layer, missed, room, self._inserts)[0]]
        uploads, _ = self._choose(layer, missed, room - self._inserts, min(self._inserts, room))
        self._wait(layer, uploads)
        return [Upload(key) for key in self._waiting_of[layer]] if uploads else ()

    def _end_step(self, view: LayerView) -> Sequence[Upload | Eviction]:
        """Put experts that have arrived in service; return uploads and evictions."""
        resident = view.residency.resident
        for layer, arrived in enumerate(resident):
            self._in_service[layer] = self._published(layer, arrived)
        self._coming = {key for key in self._coming if key.expert not in resident[key.layer]}
        if view.phase != "decode" or self._frees == "copy":
            return ()
        if self._frees == "ahead":
            return [Eviction(key) for layer in self._missed for key in self._oldest(layer)]
        evictions = [Eviction(key) for layer in self._missed for key in self._request(layer)]
        return [*evictions, *map(Upload, sorted(self._waiting, key=self._waiting.__getitem__))]

    def _published(self, layer: int, resident: Collection[int]) -> set[int]:
        """The experts of a layer that are in service from the end of a step on."""
        return set(resident)

    def _oldest(self, layer: int) -> Sequence[ExpertId]:
        """The next victims of a layer, so many that it has free slots for the next step."""
        leaving: list[ExpertId] = []
        while self._room(layer) + len(leaving) < self._kept_free():
            victim = self._victim(ExpertId(layer, 0), layer, {*self._coming, *leaving})
            if victim is None:
                break
            leaving.append(victim)
        return leaving

    def _kept_free(self) -> int:
        """Free slots of a layer at the start of a step, if they are freed ahead."""
        return self._inserts

    def _request(self, layer: int) -> Sequence[ExpertId]:
        """Request uploads of the step's misses; returns the experts whose slots they get."""
        latest = self._missed[layer][::-1][: self._inserts]
        uploads, leaving = self._choose(layer, latest, self._room(layer), self._inserts)
        self._wait(layer, uploads)
        return leaving

    def _choose(
        self, layer: int, missed: Sequence[ExpertId], room: int, most: int
    ) -> tuple[dict[ExpertId, ExpertId], list[ExpertId]]:
        """Up to ``most`` uploads that are worth a slot, with the misses that they are for, and the victims of those
        beyond ``room`` free slots."""
        group = 0 if self._slots.slots is None else layer
        chosen: dict[ExpertId, ExpertId] = {}
        leaving: list[ExpertId] = []
        for miss in missed:
            if len(chosen) >= most:
                break
            key = self._key(miss, chosen)
            if key is None or key in self._members.get(group, ()):
                continue
            full = len(chosen) - len(leaving) >= room
            victim = self._victim(key, group, {*self._coming, *leaving}) if full else None
            if full and victim is None:
                break
            if self._admission.admits(miss, victim):
                chosen[key] = miss
                leaving += [victim] if victim else []
        return chosen, leaving

    def _key(self, miss: ExpertId, chosen: Collection[ExpertId]) -> ExpertId | None:
        """The expert to upload for a miss; None: an upload of it waits already."""
        return None if miss in self._waiting else miss

    def _wait(self, layer: int, uploads: Mapping[ExpertId, ExpertId]) -> None:
        """Queue uploads, given with the misses that they are for, for the link."""
        turns = dict(zip(uploads, self._turns, strict=False))
        self._waiting.update(turns)
        self._waiting_of[layer].update(turns)

    def _room(self, layer: int) -> int:
        """Free slots that no upload waits for; of a pool, whose experts may differ in size, whether there are any."""
        if self._slots.slots is None:
            return 0 if self._full else self._inserts
        return self._slots.slots[layer] - len(self._members.get(layer, ())) - len(self._waiting_of[layer])

    def _victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """That of the order, among those that need not stay."""
        if self._dwell:
            blocked = _Dwelling(blocked, self._members.get(group, {}), self._step - self._dwell)
        return self._order.victim(incoming, group, blocked)


class _Dwelling(Container[ExpertId]):
    """``blocked`` experts, and those that got their slots after step ``since``."""

    def __init__(self, blocked: Container[ExpertId], members: Mapping[ExpertId, int], since: int) -> None:
        self._blocked, self._members, self._since = blocked, members, since

    def __contains__(self, key: object) -> bool:
        return key in self._blocked or self._members[cast(ExpertId, key)] > self._since


class InService:
    """Experts in service run on the GPU, the others on the CPU; nothing is loaded, and nothing awaited."""

    def __init__(self, cache: UploadCache) -> None:
        self._cache = cache

    def assign(self, view: LayerView) -> Assignment:
        served = self._cache.in_service(view.layer)
        return settle(view, [expert in served for expert in view.routing.active])
