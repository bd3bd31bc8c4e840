"""Uploads that are requested again while they wait, as by llama.cpp PR #27861: slots with second copies, and a table of
slots that forgets the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from policies.mechanism.views import ExpertId, LayerView
from policies.parts.admission import Admission
from policies.parts.caches import RankedCache
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
    entry. While it waits for the link, it gives its turn to another one if it misses itself, and to the expert that it
    stands for if that leaves its slot. In a slot, it is requested by a stand-in of its own, which on publication takes
    over its part.

    Ours: a second copy is useless if its expert leaves the first slot while it is on the link. And an expert whose slot
    an earlier request of the step has got is requested by the code in that step, here from its next miss on.
    """

    def __init__(self, admission: Admission, slots: CountedSlots, inserts: int, experts: int) -> None:
        self._clock = SlotClock()
        super().__init__(self._clock, admission, slots, inserts, frees="request")
        self._experts = experts
        self._uses: Counter[ExpertId] = Counter()
        self._stands_for = self._clock.stands_for

    def observe(self, view: LayerView) -> None:
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
        """Publish experts that have arrived, or those that they stand for; return the experts with an entry."""
        for key in self._members.get(layer, ()):
            if key in self._coming and key.expert in resident:
                self._publish(key, self._stands_for.get(key, key))
        return {expert for expert in resident if self._clock.has_entry(ExpertId(layer, expert))}

    def _publish(self, key: ExpertId, expert: ExpertId) -> None:
        """``expert`` has an entry by ``key``, which takes over its part if it stood for another itself."""
        self._clock.publish(expert, key)
        if key != expert and expert in self._stands_for:
            self._stands_for[key] = self._stands_for.pop(expert)

    def _request(self, layer: int) -> Sequence[ExpertId]:
        """Stand-ins that missed, and are requested themselves, give their turns away first; experts that are to leave
        their slots get those of their own stand-ins."""
        for key in self._missed[layer]:
            if key in self._stands_for and key in self._waiting:
                self._give_turn(key, self._stand_in(layer, ()))
        leaving = super()._request(layer)
        for key in [key for key in self._waiting_of[layer] if self._stands_for.get(key) in leaving]:
            copied = self._stands_for[key]
            self._give_turn(key, None if copied in self._waiting else copied)
        return leaving

    def _give_turn(self, key: ExpertId, heir: ExpertId | None) -> None:
        """``heir``, if there is one, is uploaded in place of a stand-in that waits."""
        if heir is None:
            return
        copied = self._stands_for.pop(key)
        for waiting in (self._waiting, self._waiting_of[key.layer]):
            waiting[heir] = waiting.pop(key)
        if heir != copied:
            self._stands_for[heir] = copied

    def _key(self, miss: ExpertId, chosen: Collection[ExpertId]) -> ExpertId | None:
        again = (self._waiting, self._coming, self._stands_for, self._clock.lost)
        return self._stand_in(miss.layer, chosen) if any(miss in where for where in again) else miss

    def _stand_in(self, layer: int, chosen: Collection[ExpertId]) -> ExpertId | None:
        """The absent expert to upload for a second copy; None: there is none."""
        taken = {*self._members.get(layer, ()), *self._waiting_of[layer], *self._missed[layer], *chosen}
        everyone = (ExpertId(layer, expert) for expert in reversed(range(self._experts)))
        others = (key for key in everyone if key not in taken)
        return min(others, key=self._uses.__getitem__, default=None)

    def _wait(self, layer: int, uploads: Mapping[ExpertId, ExpertId]) -> None:
        super()._wait(layer, uploads)
        self._stands_for.update({key: miss for key, miss in uploads.items() if key != miss})


class SlotClock(RankedCache):
    """LRU by the time of the last use of a slot; one without an entry is not used, whatever is routed.

    ``lost``: experts whose slots have lost their entries. ``stands_for``: what stand-ins, waiting or in slots, copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[ExpertId] = set()
        self.stands_for: dict[ExpertId, ExpertId] = {}
        self._used: dict[tuple[int, int], int] = {}  # of members
        self._time = 0

    def has_entry(self, key: ExpertId) -> bool:
        """True if the expert's slot, if it has one, is that of the table."""
        return key not in self.stands_for and key not in self.lost

    def rank_of(self, key: ExpertId) -> int:
        """When it was used last."""
        return self._used[key]

    def observe(self, view: LayerView) -> None:
        for key in (ExpertId(view.layer, expert) for expert in view.routing.active):
            if key in self._used and self.has_entry(key):
                self._touch(key)

    def admitted(self, key: ExpertId, group: int) -> None:
        self._touch(key)
        super().admitted(key, group)

    def evicted(self, key: ExpertId, group: int) -> None:
        super().evicted(key, group)
        del self._used[key]
        self.lost.discard(key)

    def publish(self, key: ExpertId, stand_in: ExpertId) -> None:
        """``key`` has an entry, used now; its stand-in, if that is another, has the last use that it had itself."""
        self.lost.discard(key)
        if key in self._used:
            self._used[stand_in] = self._used[key]
            self.rerank(stand_in)
            self._touch(key)

    def _touch(self, key: ExpertId) -> None:
        self._time += 1
        self._used[key] = self._time
        self.rerank(key)
