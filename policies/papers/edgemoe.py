"""EdgeMoE: prefetches by the experts of the layers before, and a cache by frequency and distance of the layer."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from policies.calibration import Counts, Floats
from policies.mechanism.host_tier import by_popularity
from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView, Routing
from policies.parts.assigners import LoadAll, ResidentOrCpu
from policies.parts.caches import DemandCache, StaticCache
from policies.parts.placements import NoPlacement, Pooled, PoolPlacement, PopularityPlacement
from policies.protocols import Composition, Needs, Placement
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count

TokenIds: TypeAlias = Sequence[Sequence[int]]  # [tokens][k]
_TOGETHER = 256  # tokens that are looked up at a time, which bounds the memory that a long prompt takes


class ActivationProfile:
    """Section III-C: how likely a token uses each expert of a layer, given those that it used in the two layers before.

    ``ids`` [tokens, layers, k]: what was counted. The paper's dictionary has the experts of two consecutive layers as
    key, one of each. Here a token with k experts in each has all k x k pairs for keys, which count alike (ours).
    ``together``: a batch has the pairs of all its active experts, as one token that uses them all.
    """

    def __init__(self, ids: NDArray[np.int16], experts: int, together: bool = False) -> None:
        self._together = together
        used = np.zeros((ids.shape[1], len(ids), experts), np.float32)  # [layers, tokens, experts]
        np.put_along_axis(used, ids.transpose(1, 0, 2).astype(np.intp), 1.0, axis=2)
        self._used = used

    def workloads(self, layer: int, before: TokenIds, earlier: TokenIds | None = None) -> Floats:
        """Expected tokens [experts] of each expert of ``layer``. ``before``: what the tokens used in the layer before
        it; ``earlier``: in the one before that, if there is one. Tokens without a known key expect nothing."""
        if self._together:
            before, earlier = _active(before), None if earlier is None else _active(earlier)
        total: Floats = np.zeros(self._used.shape[2])
        for start in range(0, len(before), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            keys = self._in_common(layer - 1, before[some])
            if earlier is not None:
                keys *= self._in_common(layer - 2, earlier[some])
            seen = keys.sum(axis=1, keepdims=True, dtype=np.float64)
            total += ((keys @ self._used[layer]) / np.maximum(seen, 1)).sum(axis=0)
        return total

    def _in_common(self, layer: int, ids: TokenIds) -> NDArray[np.float32]:
        """Numbers [tokens, counted tokens] of experts of the layer that both use."""
        experts = np.zeros((len(ids), self._used.shape[2]), np.float32)
        np.put_along_axis(experts, np.asarray(ids, np.intp), 1.0, axis=1)
        return np.asarray(experts @ self._used[layer].T)


def _active(ids: TokenIds) -> TokenIds:
    """The experts that any token uses, as those of one token."""
    return [sorted({expert for token in ids for expert in token})]


class ProfilePrefetcher:
    """The next layer's ``size`` experts of most expected tokens.

    ``among`` "all": those of them that are absent; "absent": the first of the absent ones. The ``size`` first are not
    displaced meanwhile. Needs tokens.
    """

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, profile: ActivationProfile, size: int, among: Literal["all", "absent"] = "all") -> None:
        self.profile, self.size = profile, size
        self._among_all = among == "all"
        self._routing: Routing | None = None  # for which was predicted last, in this layer of this step
        self._place = (-1, -1)
        self._ranked: list[ExpertId] = []

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts of the next layer, the likeliest first."""
        ranked = self._predicted(view)
        resident = view.residency.resident[view.layer + 1]
        first = ranked[: self.size] if self._among_all else ranked
        return [key for key in first if key.expert not in resident][: self.size]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return frozenset(self._predicted(view)[: self.size])

    def _predicted(self, view: LayerView) -> list[ExpertId]:
        """Experts of the next layer by descending expected tokens, ties to the lower id; those of none are left out."""
        routing, layer = view.routing, view.layer + 1
        if routing is not self._routing:
            follows = self._routing is not None and self._place == (view.step, view.layer - 1)
            earlier = self._routing.token_ids if self._routing is not None and follows else None
            expected = self.profile.workloads(layer, routing.token_ids, earlier)
            order = np.argsort(-expected, kind="stable")
            self._ranked = [ExpertId(layer, expert) for expert in order[expected[order] > 0].tolist()]
            self._routing, self._place = routing, (view.step, view.layer)
        return self._ranked


class DistanceLfuCache(DemandCache):
    """Evicts the member of least frequency / distance, where the distance of an expert is how many layers on from the
    one at work its own comes (a whole pass for the layer at work). Frequencies are tokens, and start at ``counts``
    [layers, experts]. Ties go to the lower id.

    The printed formula divides by (S - i + I) mod S for layer i, with I at work of S, which is least for the layer that
    was at work last; the text gives "priority to the eviction of experts [...] whose layers are farther away", and is
    followed here.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts: Floats = counts.astype(np.float64)
        self._groups: dict[int, NDArray[np.bool_]] = {}  # [layers, experts]: members
        self._distances = self._from(0)

    def _from(self, layer: int) -> Floats:
        """Distances [layers, 1] of the layers from the one at work."""
        layers = len(self._counts)
        return np.asarray((np.arange(layers) - layer - 1) % layers + 1, np.float64)[:, None]

    def observe(self, view: LayerView) -> None:
        self._distances = self._from(view.layer)
        self._counts[view.layer, list(view.routing.active)] += view.routing.tokens

    def admitted(self, key: ExpertId, group: int) -> None:
        self._groups.setdefault(group, np.zeros(self._counts.shape, np.bool_))[key] = True

    def evicted(self, key: ExpertId, group: int) -> None:
        """No longer a member; it is counted on."""
        self._groups[group][key] = False

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        if group not in self._groups:
            return None
        layers, experts = np.nonzero(self._groups[group])
        order = np.argsort((self._counts / self._distances)[layers, experts], kind="stable")
        ranked = (ExpertId(int(layers[i]), int(experts[i])) for i in order)
        return next((key for key in ranked if key not in blocked), None)


@register(
    "edgemoe",
    "profiled pairs of layers prefetch; LFU by distance",
    source="EdgeMoE (arXiv 2308.14352), Section III-C",
)
@dataclass(frozen=True)
class EdgeMoe(Policy):
    """EdgeMoE, as read in docs/readings.md.

    prefetch: experts of the next layer that are predicted, 0 for none. None: the model's top-k.
    among: "all" predicts the likeliest experts and copies the absent ones of them; "absent" copies as many of the
        likeliest absent ones (DALI's reading of its own prefetch, Section 4.2).
    batch: what is looked up for several tokens: what each of them used, to be added up ("tokens"), or the active
        experts of the two layers, whichever token used them ("together").
    pool: one cache over all layers, which is what makes the distance of a layer matter; False: slots by layer (ours).
    start: which experts are in the cache at first: the most frequent ("ranked"), or none, "empty" (ours).
    demand_slots: staging slots for loads of an event that is larger than the cache (ours).
    tier: what the cache is in. "gpu": copies over the link, as later papers use the method. "host": the host's memory
        above a disk, as published (weights outside the experts in memory, experts on flash); the CPU computes all
        experts, and the GPU holds none.

    Activations are profiled on the decode tokens of the calibration, frequencies on all its tokens. Expert-wise
    bit-widths are not modelled: all experts of a layer have one size.
    """

    prefetch: NonNegative | None = None
    among: Literal["all", "absent"] = "all"
    batch: Literal["tokens", "together"] = "tokens"
    pool: bool = True
    start: Literal["ranked", "empty"] = "ranked"
    demand_slots: Count = 2
    tier: Literal["gpu", "host"] = "gpu"

    @property
    def needs(self) -> Needs:
        return Needs(tokens=self.prefetch != 0, calibration=True, gpu_only=self.tier == "gpu")

    def compose(self, context: BuildContext) -> Composition:
        """Calibrated activations predict, and calibrated frequencies evict."""
        calibration = context.required_calibration()
        size = context.top_k if self.prefetch is None else self.prefetch
        counts: Counts = calibration.activations.sum(axis=0)
        prefetcher = None
        if size:
            profile = ActivationProfile(calibration.decode_ids, context.experts, self.batch == "together")
            prefetcher = ProfilePrefetcher(profile, size, self.among)
        if self.tier == "host":
            return Composition(
                placement=PoolPlacement(), assigner=ResidentOrCpu(), cache=StaticCache(), demand_slots=0,
                host_cache=DistanceLfuCache(counts), host_prefetcher=prefetcher, host_by_layer=not self.pool,
                host_start=by_popularity(counts.tolist()) if self.start == "ranked" else (),
                parameters={"prefetch": size},
            )
        return Composition(
            placement=self._placement(counts.astype(np.float64)),
            assigner=LoadAll(),
            prefetcher=prefetcher,
            cache=DistanceLfuCache(counts),
            demand_slots=self.demand_slots,
            parameters={"prefetch": size},
        )

    def _placement(self, counts: Floats) -> Placement:
        if self.start == "empty":
            return PoolPlacement() if self.pool else NoPlacement()
        if self.pool:
            return Pooled(PopularityPlacement(popularity=counts))
        return PopularityPlacement(uniform=True, popularity=counts)
