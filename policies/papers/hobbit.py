"""HOBBIT: copies in fewer bits of experts that matter little and miss (arXiv 2411.01433)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, Forecast, LayerView, Routing
from policies.parts.assigners import LoadAll
from policies.parts.caches import RankedCache
from policies.parts.placements import PoolPlacement
from policies.parts.routers import TrueRouter, routing_of_tokens
from policies.protocols import Composition, Needs
from policies.system import BuildContext, ChoiceError, Policy, register
from trilane.common.hints import Count, Share, at_least, between

Weight = Annotated[float, at_least(0)]
WIDE, NARROW, SKIPPED = range(3)


@dataclass(frozen=True)
class Thresholds:
    """Section 3.2: an expert matters less, the more of its token's weight goes to experts before it. Above ``narrow``
    of the weight, a copy in fewer bits is enough; above ``skip`` none is needed."""

    narrow: float
    skip: float

    def of_token(self, weights: Sequence[float]) -> Iterator[int]:
        """The need of each expert of a token, by descending weight."""
        total = sum(weights) or 1.0
        for before in accumulate(weights[:-1], initial=0.0):
            share = before / total
            yield WIDE if share <= self.narrow else NARROW if share <= self.skip else SKIPPED

    def of_tokens(self, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> dict[int, int]:
        """The need of each expert: the largest of any token (ours)."""
        needed: dict[int, int] = {}
        for chosen, shares in zip(ids, weights, strict=True):
            for expert, need in zip(chosen, self.of_token(shares), strict=True):
                needed[expert] = min(need, needed.get(expert, SKIPPED))
        return needed


class Copies:
    """Choice among the copies of an expert: of ``experts`` a layer, number e + ``experts`` is the narrow copy of e."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def chosen(self, expert: int, need: int, on_gpu: Container[int]) -> int | None:
        """The widest that is ``on_gpu``, if it is wide enough; else the one that is needed. None: neither."""
        narrow = expert + self.experts
        if expert in on_gpu or need == WIDE:
            return expert
        return narrow if need == NARROW or narrow in on_gpu else None


class MixedWidthRouter(TrueRouter):
    """Section 3.2: an expert that misses is loaded in as many bits as it needs, or left out. One that is on the GPU, or
    on its way there, is used as it is if it is wide enough. Weights stay as they are (ours).

    ``needed``: by expert, of the layer routed last; read by the cache."""

    def __init__(self, thresholds: Thresholds, copies: Copies) -> None:
        self.thresholds, self.copies = thresholds, copies
        self.needed: dict[int, int] = {}

    def route(self, view: LayerView) -> Routing:
        """The routing in force; ``view.routing`` itself if it names wide copies alone. Needs tokens."""
        routing, layer = view.routing, view.layer
        coming = {expert for expert, ready_ns in view.ready_ns.items() if ready_ns < INFINITE_NS}
        on_gpu = coming.union(view.residency.resident[layer], view.residency.staged[layer])
        self.needed = self.thresholds.of_tokens(routing.token_ids, routing.token_weights)
        used = {expert: self.copies.chosen(expert, need, on_gpu) for expert, need in self.needed.items()}
        if all(expert == copy for expert, copy in used.items()):
            return routing
        pairs = [
            [(used[e], weight) for e, weight in zip(*token, strict=True)]
            for token in zip(routing.token_ids, routing.token_weights, strict=True)
        ]
        kept = [[(copy, weight) for copy, weight in token if copy is not None] for token in pairs]
        return routing_of_tokens([[c for c, _ in token] for token in kept], [[w for _, w in token] for token in kept])


class AdaptivePrefetcher:
    """Section 3.3: what the next layer's forecast lacks on the GPU, in the bits that it needs; if it lacks nothing,
    what the layer after it lacks, and so on through the forecasts. Whatever they name is protected (ours)."""

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, thresholds: Thresholds, copies: Copies, top_k: int) -> None:
        self.thresholds, self.copies, self.top_k = thresholds, copies, top_k

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """The absent copies of the first layer that lacks any, those that need most bits first."""
        for forecast in sorted(forecasts, key=lambda forecast: forecast.layer):
            resident = view.residency.resident[forecast.layer]
            absent = [key for key in self._copies_of(view, forecast) if key.expert not in resident]
            if absent:
                return absent
        return ()

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """The copies that the forecasts would use."""
        return frozenset(key for forecast in forecasts for key in self._copies_of(view, forecast))

    def _copies_of(self, view: LayerView, forecast: Forecast) -> list[ExpertId]:
        ids = [chosen[: self.top_k] for chosen in forecast.token_ids]
        scores = [shares[: self.top_k] for shares in forecast.token_scores] or [[1.0] * len(own) for own in ids]
        needed = self.thresholds.of_tokens(ids, scores)
        on_gpu = view.residency.resident[forecast.layer]
        used = [(need, self.copies.chosen(e, need, on_gpu)) for e, need in sorted(needed.items(), key=lambda it: it[1])]
        return [ExpertId(forecast.layer, copy) for need, copy in used if copy is not None]


class FourScoresCache(RankedCache):
    """Section 3.4: one cache over all layers, which evicts the copy of the least sum of four scores, each from 0 to 1.

    ``recent``: the step of its last use over the present one; ``frequent``: its uses over all steps; ``precise``: those
    for which the router found that the wide copy is needed; ``near``: how soon its layer's turn comes. Ties go to the
    lower layer and id.
    """

    def __init__(
        self, layers: int, router: MixedWidthRouter, *, recent: float, frequent: float, precise: float, near: float
    ) -> None:
        super().__init__()
        self.router = router
        self.recent, self.frequent, self.precise, self.near = recent, frequent, precise, near
        self._layers, self._layer, self._step = layers, 0, 1
        self._rank: dict[tuple[int, int], float] = {}  # the first three scores, times the present step
        self._last: dict[tuple[int, int], int] = {}

    def observe(self, view: LayerView) -> None:
        """Every copy that is used counts once a step, and once more if its width was needed."""
        self._layer, self._step = view.layer, view.step + 1
        needed = self.router.needed
        for expert in view.routing.active:
            key = view.layer, expert
            gain = self.recent * (self._step - self._last.get(key, 0)) + self.frequent
            if needed.get(expert) == WIDE:
                gain += self.precise
            self._rank[key] = self._rank.get(key, 0.0) + gain
            self._last[key] = self._step
            self.rerank(key)

    def rank_of(self, key: ExpertId) -> float:
        """Rank by all known uses of a copy, also of those before it was admitted."""
        return self._rank.get(key, 0.0)

    def admitted(self, key: ExpertId, group: int) -> None:
        """Its layer's members are a group of their own."""
        super().admitted(key, group * self._layers + key.layer)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The first by score of the layers' least members."""
        least_in, first = super().victim, group * self._layers
        least = [least_in(incoming, first + layer, blocked) for layer in range(self._layers)]
        return min((key for key in least if key is not None), key=lambda key: (self._score(key), key), default=None)

    def _score(self, key: ExpertId) -> float:
        away = (key.layer - self._layer) % self._layers
        return self.rank_of(key) / self._step + self.near * (1 - away / self._layers)


@register(
    "hobbit",
    "copies in fewer bits for unimportant misses; one cache of four scores",
    source="HOBBIT (arXiv 2411.01433), Sections 3.2 to 3.4",
)
@dataclass(frozen=True)
class Hobbit(Policy):
    """The text is known by others' summaries of its sections.

    narrow_above, skip_above: T1 and T2, shares of a token's weight (Section 3.2).
    narrow_share: bytes of a narrow copy over those of the model's: float16 and int4, or int8 and int2 (a quarter).
    lookahead: layers ahead that a gate forecasts, in decode; 0 for no prefetches (how many the paper has is not known).
    recent, frequent, precise, near: weights of the four scores (Section 3.4), which the paper finds by measuring;
        equal here (ours).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    narrow_above: Share = 0.6
    skip_above: Share = 0.9
    narrow_share: Annotated[float, between(0.01, 1)] = 0.25
    lookahead: Literal[0, 1, 2, 3] = 3
    recent: Weight = 0.25
    frequent: Weight = 0.25
    precise: Weight = 0.25
    near: Weight = 0.25
    demand_slots: Count = 2

    def __post_init__(self) -> None:
        """Check that the threshold of fewer bits comes before that of none."""
        if self.narrow_above > self.skip_above:
            raise ChoiceError(f"skip_above: expected at least narrow_above, {self.narrow_above}, got {self.skip_above}")

    @property
    def needs(self) -> Needs:
        return Needs(
            tokens=True, forecasts=tuple(("gate", ahead) for ahead in range(1, self.lookahead + 1)),
            forecast_phases=("decode",), gpu_only=True, changes_routing=True, narrow_share=self.narrow_share,
        )

    def compose(self, context: BuildContext) -> Composition:
        """A router that chooses copies, a pool, prefetches and loads."""
        thresholds, copies = Thresholds(self.narrow_above, self.skip_above), Copies(context.experts)
        router = MixedWidthRouter(thresholds, copies)
        cache = FourScoresCache(
            context.layers, router, recent=self.recent, frequent=self.frequent, precise=self.precise, near=self.near
        )
        return Composition(
            placement=PoolPlacement(),
            router=router,
            assigner=LoadAll(),
            prefetcher=AdaptivePrefetcher(thresholds, copies, context.top_k) if self.lookahead else None,
            cache=cache,
            demand_slots=self.demand_slots,
        )
