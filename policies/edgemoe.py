"""EdgeMoE: statistical prefetching, and a cache by frequency that favours the earlier layers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from policies.assigners import LoadAll
from policies.caches import DemandCache
from policies.calibration import Counts, Floats
from policies.placements import NoPlacement, PoolPlacement
from policies.protocols import Assigner, Composition, Needs
from policies.ranking import Ranking
from policies.routers import TrueRouter
from policies.system import BuildContext, System, at_least
from policies.views import ExpertId, Forecast, LayerView

NEEDS = Needs(calibration=True, gpu_only=True)


def decayed_counts(activations: Counts) -> Floats:
    """[layers, experts]: tokens of the past sequences ``activations`` [sequences, layers, experts], those of a sequence
    halved at the start of each later one, and of the one that begins now."""
    ages = np.arange(len(activations), 0, -1)
    return np.tensordot(0.5**ages, activations, axes=1)


class LayerWeightedLfuCache(DemandCache):
    """Evicts the least of frequency x (layers - layer): the earlier of two equally busy experts stays, since every pass
    needs it sooner. Frequencies are tokens, and start at ``counts`` [layers, experts]. Ties go to the lower id."""

    def __init__(self, counts: Floats) -> None:
        layers = len(counts)
        self._ranks = [[n * (layers - layer) for n in row] for layer, row in enumerate(counts.tolist())]
        self._groups: dict[int, Ranking] = {}
        self._home: dict[tuple[int, int], Ranking] = {}

    def observe(self, view: LayerView) -> None:
        """Count the tokens of every active expert; ranks only grow, so the heap is corrected when it is asked."""
        layer, home, ranks = view.layer, self._home, self._ranks[view.layer]
        weight = len(self._ranks) - layer
        for expert, tokens in zip(view.routing.active, view.routing.tokens, strict=True):
            ranks[expert] += tokens * weight
            group = home.get((layer, expert))
            if group is not None:
                group.rank[layer, expert] = ranks[expert]  # type: ignore[index]  # equal to its ExpertId, and cheaper

    def admitted(self, id: ExpertId, group: int) -> None:
        """Comes in with its history."""
        home = self._home[id] = self._groups.setdefault(group, Ranking())
        home.put(id, self._ranks[id.layer][id.expert])

    def evicted(self, id: ExpertId, group: int) -> None:
        """Leave the group."""
        self._home.pop(id).drop(id)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least weighted frequency that is not blocked."""
        ranking = self._groups.get(group)
        return ranking.lowest(blocked) if ranking else None


class StatisticalPrefetcher:
    """The next layer's ``size`` experts of highest ``frequency`` [layers, experts], whatever the present tokens are.

    ``among`` "all": those of them that are absent; "absent": the most frequent of the absent ones. The
    ``size`` most frequent are not displaced meanwhile.
    """

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, frequency: Floats, size: int, among: Literal["all", "absent"] = "all") -> None:
        self.size = size
        self._among_all = among == "all"
        by_frequency = np.argsort(-frequency, axis=1, kind="stable").tolist()
        self._ranked = [[ExpertId(layer, e) for e in row] for layer, row in enumerate(by_frequency)]
        self._predicted = [frozenset(row[:size]) for row in self._ranked]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], assigner: Assigner) -> Sequence[ExpertId]:
        """Absent experts of the next layer, the most frequent first."""
        layer = view.layer + 1
        there = view.residency.resident[layer]
        ranked = self._ranked[layer][: self.size] if self._among_all else self._ranked[layer]
        return [id for id in ranked if id.expert not in there][: self.size]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """The predicted ones."""
        return self._predicted[view.layer + 1]


@dataclass(frozen=True)
class EdgeMoeParameters:
    """EdgeMoE as algorithms.md, Section 6, restates and fills it in.

    prefetch: experts of the next layer that are predicted, 0 for none. None: the model's top-k.
    among: "all" predicts the most frequent experts and brings the absent ones of them; "absent" brings as many of the
        most frequent absent ones (DALI's reading of its own prefetch, Section 4.2).
    pool: one cache over all layers, which is what makes the weight of a layer matter; False: slots by layer (ours).
    demand_slots: staging slots for loads of an event that is larger than the cache (ours).

    A run plays one batch of sequences. Counts are halved per sequence: those of the calibration's sequences one after
    the other and then once more, as the run begins; they are not halved within it. Expert-wise bit-widths are not
    modelled: all experts of a layer have one size.
    """

    prefetch: int | None = None
    among: Literal["all", "absent"] = "all"
    pool: bool = True
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Loads need a slot."""
        at_least(self, prefetch=0, demand_slots=1)


def build(parameters: EdgeMoeParameters, context: BuildContext) -> Composition:
    """Calibrated frequencies predict and evict."""
    calibration = context.required_calibration("edgemoe")
    size = context.top_k if parameters.prefetch is None else parameters.prefetch
    return Composition(
        name="edgemoe",
        placement=PoolPlacement() if parameters.pool else NoPlacement(),
        router=TrueRouter(),
        assigner=LoadAll(),
        prefetcher=StatisticalPrefetcher(calibration.popularity, size, parameters.among) if size else None,
        cache=LayerWeightedLfuCache(decayed_counts(calibration.activations)),
        needs=NEEDS,
        demand_slots=parameters.demand_slots,
        parameters={**asdict(parameters), "prefetch": size},
    )


EDGEMOE = System(
    name="edgemoe",
    summary="GPU only: prefetches the calibrated top-k of the next layer; LFU that favours the earlier layers",
    source="EdgeMoE, as restated and filled in by algorithms.md, Section 6",
    parameters=EdgeMoeParameters,
    build=build,
    needs=NEEDS,
)
