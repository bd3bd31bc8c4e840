"""SeqMoE: eviction and prefetches by forecasts of whole tokens, over all layers and the end of a step (arXiv
2609.12978)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.parts.assigners import LoadAll
from policies.parts.caches import RankedCache
from policies.parts.placements import PoolPlacement
from policies.parts.prefetchers import NoProtection
from policies.protocols import Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count, above, at_most, between


class ForecastCache(RankedCache):
    """Evicts the member of which the fewest uses are expected: Belady's rule with forecasts in place of the future.

    The turns of a layer that are forecast count by what the forecasts say, each ``discount`` times as much as the one
    before; the other turns count by the share of the last turns that used the expert, halved in ``half_life`` turns.
    """

    def __init__(self, turns: int, discount: float, half_life: float) -> None:
        super().__init__()
        self._weights = [discount**turn for turn in range(turns)]
        self._rest = discount**turns / (1 - discount)
        self._fade = 0.5 ** (1 / half_life)
        self._coming: dict[tuple[int, int], frozenset[int]] = {}  # by step and layer: the experts of its forecast
        self._shares: dict[int, dict[int, float]] = defaultdict(dict)  # by layer and expert
        self._turn: dict[int, int] = defaultdict(int)  # of each layer, the step of its next turn
        self._members: dict[int, set[ExpertId]] = defaultdict(set)  # by layer
        self._full = False  # whether a member has had to leave

    def expect(self, step: int, forecasts: Iterable[Forecast]) -> None:
        """Forecasts known at the beginning of ``step`` take the place of earlier ones."""
        self._coming = {
            (step + forecast.steps_ahead, forecast.layer): frozenset(forecast.active) for forecast in forecasts
        }
        for layer in self._members:
            self._rerank_layer(layer)

    def expected_uses(self, key: ExpertId) -> float:
        """Expected uses of an expert in the turns of its layer to come."""
        layer, expert = key
        share, turn = self._shares[layer].get(expert, 0.0), self._turn[layer]
        uses = self._rest * share
        for ahead, weight in enumerate(self._weights):
            named = self._coming.get((turn + ahead, layer))
            uses += weight * (share if named is None else expert in named)
        return uses

    rank_of = expected_uses

    def next_turn(self, layer: int) -> Collection[int]:
        """The experts that a forecast names for a layer's coming turn, if there is one."""
        return self._coming.get((self._turn[layer], layer), ())

    def least_expected(self) -> float:
        """Uses of the member that would leave first, of all groups; -1 as long as nothing had to leave."""
        firsts = (members.lowest(()) for members in self._groups.values() if self._full)
        return min((self.expected_uses(key) for key in firsts if key is not None), default=-1.0)

    def observe(self, view: LayerView) -> None:
        """A turn of the layer is being taken: forecasts are now about the turns after it."""
        layer, shares, fade = view.layer, self._shares[view.layer], self._fade
        for expert in shares:
            shares[expert] *= fade
        for expert in view.routing.active:
            shares[expert] = shares.get(expert, 0.0) + 1 - fade
        self._turn[layer] = view.step + 1
        self._rerank_layer(layer)

    def admitted(self, key: ExpertId, group: int) -> None:
        self._members[key.layer].add(key)
        super().admitted(key, group)

    def evicted(self, key: ExpertId, group: int) -> None:
        self._members[key.layer].remove(key)
        super().evicted(key, group)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least rank that is not blocked; there is no room left."""
        self._full = True
        return super().victim(incoming, group, blocked)

    def _rerank_layer(self, layer: int) -> None:
        for key in self._members[layer]:
            self.rerank(key)


class DeadlinePrefetcher(NoProtection):
    """Absent experts that forecasts name for the coming turn of each layer: as many as arrive in time, those of most
    expected uses, in the order of their turns ("job sequencing with deadlines": each copy is a job of equal length, due
    when its layer is at work). None that is expected less than the member which it would displace.

    The coming turn of a layer that is done is in the next step. A layer takes as long as the one at work.
    """

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, cache: ForecastCache, layers: int, prefetches: bool = True) -> None:
        """``prefetches``: False only tells the cache of the forecasts."""
        self._cache, self._layers, self._prefetches = cache, layers, prefetches

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """The jobs that are done in time, by their place on the link."""
        if view.layer == 0:
            self._cache.expect(view.step, forecasts)
        if not self._prefetches:
            return ()
        costs, cache = view.costs[view.layer], self._cache
        layer_ns = plan.makespan_ns + costs.between_ns
        busy_ns, least = view.h2d_backlog_ns + len(plan.loads) * costs.copy_ns, cache.least_expected()
        jobs: list[tuple[float, int, ExpertId]] = []  # -uses, deadline in copies
        for ahead in range(1, self._layers + 1):
            deadline = (ahead * layer_ns - busy_ns) // costs.copy_ns
            if deadline < 1:
                continue
            layer = (view.layer + ahead) % self._layers
            resident = view.residency.resident[layer]
            absent = [ExpertId(layer, expert) for expert in cache.next_turn(layer) if expert not in resident]
            valued = ((cache.expected_uses(key), key) for key in absent)
            jobs += [(-uses, deadline, key) for uses, key in valued if uses > least]
        return _sequenced(sorted(jobs))


def _sequenced(jobs: Iterable[tuple[float, int, ExpertId]]) -> list[ExpertId]:
    """Jobs of one unit, best first: each as late as its deadline and the better ones allow; those without a place are
    left out."""
    places: dict[int, ExpertId] = {}
    for _, deadline, key in jobs:
        place = deadline
        while place in places:
            place -= 1
        if place:
            places[place] = key
    return [places[place] for place in sorted(places)]


@register(
    "seqmoe",
    "forecasts of whole tokens: probabilistic Belady, prefetches over a step's end",
    source="SeqMoE (arXiv 2609.12978)",
)
@dataclass(frozen=True)
class SeqMoe(Policy):
    """Known by its abstract, and by what others quote of it.

    steps: tokens that are forecast; the paper has 8, each needs a forecast of the trace (``token@1``, ...) or a stated
        recall.
    prefetch: whether forecast experts are copied ahead.
    discount: how much a use counts against one a token earlier (ours).
    half_life: tokens after which a use counts half in what is expected beyond the forecasts (ours).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    steps: Annotated[int, between(1, 16)] = 2
    prefetch: bool = True
    discount: Annotated[float, above(0), at_most(0.99)] = 0.5
    half_life: Annotated[float, above(0), at_most(1e6)] = 16.0
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        forecasts = tuple(("token", ahead) for ahead in range(1, self.steps + 1))
        return Needs(forecasts=forecasts, gpu_only=True)

    def compose(self, context: BuildContext) -> Composition:
        """One pool over all layers; without prefetches the forecasts go to the cache alone."""
        cache = ForecastCache(self.steps, self.discount, self.half_life)
        return Composition(
            placement=PoolPlacement(),
            assigner=LoadAll(),
            prefetcher=DeadlinePrefetcher(cache, context.layers, self.prefetch),
            cache=cache,
            demand_slots=self.demand_slots,
        )
