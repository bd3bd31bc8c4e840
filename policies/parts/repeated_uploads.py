"""Uploads that are requested again while they wait, as by llama.cpp PR #27861: slots with second copies, and a table of
slots that forgets the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping

from policies.mechanism.views import ExpertId, LayerView
from policies.parts.admission import Admission
from policies.parts.caches import DemandCache
from policies.parts.upload_cache import CountedSlots, UploadCache


class RepeatedUploads(UploadCache):
    """Uploads by request (``frees="request"``), LRU, of ``experts`` a layer.

    The code has a table: in which slot an expert is. An expert that misses while its upload waits is requested again,
    into another slot, and the copy that is published last has the entry. Whichever of its slots is then given away
    clears the entry: the expert is *lost*, and misses though a slot has it, until it is requested and published once
    more. By that a slot too many stays for as long as the expert is in use, and costs a miss and an upload each time
    that it is given away.

    As no expert is copied twice here, the upload of another one *stands in* for a second copy: of the layer's absent
    experts the least used that did not miss in the step. It takes as long, and is never in service. When it is
    published, it takes the last use of the slot that lost the entry, so that the expert itself is the copy with the
    entry. Ours: while it stands in, its own misses are not requested, and a second copy is useless if its expert has
    left the first slot by then. And an expert whose slot an earlier request of the step has got is requested by the
    code in that step, here from its next miss on.
    """

    def __init__(self, admission: Admission, slots: CountedSlots, inserts: int, experts: int) -> None:
        self._clock = SlotClock()
        super().__init__(self._clock, admission, slots, inserts, frees="request")
        self._experts = experts
        self._uses: Counter[ExpertId] = Counter()
        self._stands_for: dict[ExpertId, ExpertId] = {}  # what a stand-in, waiting or in a slot, copies
        self._unpublished: dict[int, list[ExpertId]] = {}  # stand-ins by layer

    def observe(self, view: LayerView) -> None:
        """Count uses as well."""
        super().observe(view)
        if view.phase == "decode":
            self._uses.update(ExpertId(view.layer, expert) for expert in view.routing.active)

    def evicted(self, key: ExpertId, group: int) -> None:
        """A slot is given away; a second copy takes the entry of its expert along."""
        super().evicted(key, group)
        copied = self._stands_for.pop(key, None)
        if copied is not None and copied in self._members.get(group, ()):
            self._clock.lost.add(copied)
            self._in_service[copied.layer].discard(copied.expert)

    def _published(self, layer: int, resident: Collection[int]) -> set[int]:
        """Stand-ins that have arrived give their experts an entry; neither they nor the lost are in service."""
        waiting = self._unpublished.get(layer, ())
        self._unpublished[layer] = [key for key in waiting if key.expert not in resident]
        for key in waiting:
            if key.expert in resident:
                self._clock.publish(self._stands_for[key], key)
        return {expert for expert in resident if self._has_entry(ExpertId(layer, expert))}

    def _has_entry(self, key: ExpertId) -> bool:
        return key not in self._stands_for and key not in self._clock.lost

    def _key(self, miss: ExpertId, chosen: Collection[ExpertId]) -> ExpertId | None:
        if miss in self._stands_for:
            return None
        if miss not in self._waiting and miss not in self._clock.lost:
            return miss
        taken = {*self._members.get(miss.layer, ()), *self._waiting, *self._missed[miss.layer], *chosen}
        everyone = (ExpertId(miss.layer, expert) for expert in reversed(range(self._experts)))
        others = (key for key in everyone if key not in taken)
        return min(others, key=self._uses.__getitem__, default=None)

    def _wait(self, layer: int, uploads: Mapping[ExpertId, ExpertId]) -> None:
        super()._wait(layer, uploads)
        stand_ins = {key: miss for key, miss in uploads.items() if key != miss}
        self._stands_for.update(stand_ins)
        self._unpublished.setdefault(layer, []).extend(stand_ins)


class SlotClock(DemandCache):
    """LRU by the time of the last use of a slot; experts in ``lost`` are not used, whatever is routed."""

    def __init__(self) -> None:
        self.lost: set[ExpertId] = set()
        self._used: dict[int, dict[ExpertId, int]] = {}  # by group
        self._time = 0

    def observe(self, view: LayerView) -> None:
        """The members in use become the most recent."""
        used = self._used.get(view.layer, {})
        for expert in view.routing.active:
            key = ExpertId(view.layer, expert)
            if key in used and key not in self.lost:
                self._touch(used, key)

    def admitted(self, key: ExpertId, group: int) -> None:
        """A new member is the most recent."""
        self._touch(self._used.setdefault(group, {}), key)

    def evicted(self, key: ExpertId, group: int) -> None:
        """Forget it."""
        del self._used[group][key]
        self.lost.discard(key)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The least recent member that is not blocked."""
        used = self._used.get(group, {})
        return min((key for key in used if key not in blocked), key=used.__getitem__, default=None)

    def publish(self, key: ExpertId, stand_in: ExpertId) -> None:
        """``key`` has an entry again, used now; its stand-in has the last use that it had itself."""
        self.lost.discard(key)
        used = self._used[key.layer]
        if key in used:
            used[stand_in] = used[key]
            self._touch(used, key)

    def _touch(self, used: dict[ExpertId, int], key: ExpertId) -> None:
        self._time += 1
        used[key] = self._time
