"""The cache of everett6/moe-prefetch with a perfect forecast (experiments/e5_oracle_ceiling.py there): while a layer is
computed, what the next token uses in the layer after it is uploaded, into free slots beyond those that misses need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.mechanism.views import Eviction, ExpertId, LayerView, Upload
from policies.papers.llama_cpp import OFFLOAD_MIN_TOKENS
from policies.parts.admission import Admission
from policies.parts.assigners import FromTokens, LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import NoPlacement
from policies.parts.upload_cache import CountedSlots, InService, UploadCache
from policies.protocols import Composition, When
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from traces.layout import DECODE

INSERTS, DEPTHS = 2, (1, 2, 3)
Routed = Sequence[Sequence[Sequence[int]]]  # by token of the answer and layer: experts


class NextToken(UploadCache):
    """Up to ``depth`` uploads a layer of what the next token uses there; ``depth`` more slots a layer are free."""

    def __init__(self, slots: CountedSlots, routed: Routed, depth: int) -> None:
        super().__init__(LruCache(), Admission(), slots, INSERTS, frees="ahead")
        self._routed, self._depth, self._token = routed, depth, -1

    def swaps(self, view: LayerView, when: When) -> Sequence[Upload | Eviction]:
        """Those of the misses, and then those of the next layer."""
        updates = super().swaps(view, when)
        if view.phase != "decode" or when != "routed":
            return updates
        self._token += view.layer == 0
        layer, coming = view.layer + 1, self._routed[self._token + 1 : self._token + 2]
        if not coming or layer == len(coming[0]):
            return updates
        keys = (ExpertId(layer, expert) for expert in coming[0][layer])
        absent = [key for key in keys if key not in self._members.get(layer, ()) and key not in self._waiting]
        chosen = absent[: max(0, min(self._depth, self._room(layer) - INSERTS))]
        self._wait(layer, {key: key for key in chosen})
        return [*updates, *map(Upload, self._waiting_of[layer])] if chosen else updates

    def _kept_free(self) -> int:
        return INSERTS + self._depth


def with_depth(scenario: Scenario, depth: int) -> Prepared:
    """Ready to play."""
    prepared = prepare(scenario)
    trace = prepared.trace
    slots = CountedSlots(NoPlacement())
    cache = NextToken(slots, trace.topk_ids[trace.phase == DECODE].tolist(), depth)
    assigner = FromTokens(OFFLOAD_MIN_TOKENS * prepared.shape.top_k, LoadAll(), InService(cache))
    given = Composition(placement=slots, assigner=assigner, cache=cache, demand_slots=1, name="next token")
    return replace(prepared, given=given)
