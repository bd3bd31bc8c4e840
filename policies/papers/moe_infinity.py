"""MoE-Infinity: a pool and prefetches ranked by the experts that a sequence is expected to use; and the released code.

An activation matrix counts the tokens of one sequence, prompt and decode, by layer and expert. The partial matrix of a
running sequence is matched to those of past sequences; the closest one is what it is expected to become.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from policies.calibration import Counts, Floats
from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.parts.assigners import LoadAll
from policies.parts.caches import DemandCache, LfuCache
from policies.parts.placements import Pooled, PoolPlacement, PopularityPlacement
from policies.parts.prefetchers import NoProtection
from policies.protocols import Composition, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, at_least

_DIGITS = 9  # of a similarity: a smaller difference is a tie, since numpy's sums differ between machines
_LEAST = 2.0**-10  # a count below any real one: of the experts never predicted, those of later layers rank lower


class ActivationMatcher:
    """Matches every running sequence to the past ones, layer by layer. A token has ``top_k`` experts.

    ``library``: [past sequences, layers, experts] counts. The similarity is the mean, over the layers that the sequence
    has seen, of the cosine between its row and the past one's (our reading of "cosine over the layers seen"); ties go
    to the earlier entry. What a batch is expected to use is the sum over its sequences.
    """

    def __init__(self, library: Counts, batch: int, top_k: int) -> None:
        past, layers, experts = library.shape
        self._library = library.astype(np.float64)
        norms = np.linalg.norm(self._library, axis=2, keepdims=True)
        self._unit = np.ascontiguousarray((self._library / np.maximum(norms, 1)).transpose(1, 2, 0))
        tokens = self._library.sum(axis=2, keepdims=True) / top_k
        with np.errstate(divide="ignore"):  # of a chance of 0
            self._log_idle = np.log1p(-np.minimum(self._library / np.maximum(tokens, 1), 1))
        self._current = np.zeros((batch, layers, experts))
        self._cosines = np.zeros((batch, layers, past))
        self._row: dict[int, int] = {}  # of each sequence that has begun
        self._tokens = np.ones(batch)  # of each row in this step, at least one
        self._closest = np.zeros(0, np.intp)  # past sequence of each row
        place = np.arange(layers)
        nearness = 1 - (place - place[:, None]) % layers / layers
        self._nearness = nearness[..., None]  # [layer at work, layer, 1]
        self.predicted = np.zeros((layers, experts))  # tokens, summed over the matched matrices
        self.priority = np.zeros((layers, experts))  # the same, by how soon the layer comes

    def observe(self, view: LayerView) -> None:
        """Count the tokens of the layer, match again. Sequences begin with step 0."""
        layer = view.layer
        if view.step == layer == 0:
            self._row.clear()
            self._current[:], self._cosines[:], self.predicted = 0, 0, np.zeros_like(self.predicted)
        if view.sequences:
            self._count(view)
            known = len(self._row)
            rows = self._current[:known, layer]
            norms = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
            self._cosines[:known, layer] = (rows / np.maximum(norms, 1)) @ self._unit[layer]
            self._closest = self._cosines[:known].sum(axis=1).round(_DIGITS).argmax(axis=1)
            self.predicted = self._library[self._closest].sum(axis=0)
        self.priority = (self.predicted + _LEAST) * self._nearness[layer]

    def chances(self, layers: slice) -> Floats:
        """Probabilities [layers, experts] that a step of as many tokens as this one uses them at all, if each token
        of a sequence chooses as those of the matched one did, independently of the others."""
        idle = self._log_idle[self._closest, layers]  # of one token
        chances: Floats = 1 - np.exp(np.tensordot(self._tokens[: len(idle)], idle, axes=1))
        return chances.round(_DIGITS)

    def _count(self, view: LayerView) -> None:
        row = self._row
        rows = [row.setdefault(sequence, len(row)) for sequence in view.sequences]
        self._tokens = np.maximum(np.bincount(rows, minlength=len(self._tokens)), 1)
        np.add.at(self._current[:, view.layer], (np.array(rows)[:, None], np.asarray(view.routing.token_ids)), 1)


class ActivationCache(DemandCache):
    """Evicts the least of predicted tokens x (1 - distance / layers), where layers that this pass has finished count as
    those of the next pass. Demand loads are always admitted, prefetches only for a member of lower priority. Ties: the
    lower id."""

    def __init__(self, matcher: ActivationMatcher) -> None:
        self._matcher = matcher
        self._layer = 0
        self.group: NDArray[np.int64] = np.full(matcher.predicted.shape, -1, np.int64)  # of each expert; -1: none

    def observe(self, view: LayerView) -> None:
        self._layer = view.layer
        self._matcher.observe(view)

    def admitted(self, key: ExpertId, group: int) -> None:
        self.group[key] = group

    def evicted(self, key: ExpertId, group: int) -> None:
        self.group[key] = -1

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least priority that is not blocked; None if a prefetch has no higher priority."""
        priority = self._matcher.priority
        ranks = np.where(self.group == group, priority, np.inf).ravel()
        while True:
            place = int(ranks.argmin())
            if ranks[place] == np.inf:
                return None
            key = ExpertId(*divmod(place, priority.shape[1]))
            if key not in blocked:
                demanded = incoming.layer == self._layer
                return key if demanded or priority[incoming] > ranks[place] else None
            ranks[place] = np.inf


class ActivationHostCache(ActivationCache):
    """An ``ActivationCache`` for the host's memory above a disk. (The GPU's cache tells the matcher of a layer.)"""

    def observe(self, view: LayerView) -> None:
        self._layer = view.layer


class ActivationPrefetcher(NoProtection):
    """Absent experts of the next ``lookahead`` layers of this pass whose probability of use is above ``floor``, by
    descending priority; the best ``size``. Ties go to the nearer layer, then to the lower id. The cache decides which
    are admitted."""

    into: Literal["cache", "staging"] = "cache"

    def __init__(
        self, matcher: ActivationMatcher, cache: ActivationCache, size: int, lookahead: int, floor: float
    ) -> None:
        self.size, self.lookahead, self.floor = size, lookahead, floor
        self._matcher, self._cache = matcher, cache

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """The queue of prefetches, ranked again in every layer."""
        first = view.layer + 1
        ahead = slice(first, first + self.lookahead)
        wanted = (self._cache.group[ahead] < 0) & (self._matcher.chances(ahead) > self.floor)
        ranks = np.where(wanted, self._matcher.priority[ahead], 0.0).ravel()
        least = np.partition(ranks, -self.size)[-self.size] if self.size < len(ranks) else 0.0
        places = np.flatnonzero(ranks >= least if least > 0 else ranks > 0)
        best = places[np.argsort(-ranks[places], kind="stable")][: self.size]
        experts = self._matcher.predicted.shape[1]
        return [ExpertId(first + place // experts, place % experts) for place in best.tolist()]


@register(
    "moe-infinity",
    "past sequences rank prefetches and residents",
    source="MoE-Infinity (arXiv 2401.14361), as read in docs/readings.md#moe-infinity",
)
@dataclass(frozen=True)
class MoeInfinity(Policy):
    """MoE-Infinity, as read in docs/readings.md.

    library: past sequences that are kept, the last of the calibration's; 1,000 in the released code (trace_capacity).
    lookahead: how many layers ahead prefetches reach. None: to the last layer of the pass.
    prefetch: how many experts may wait to be prefetched at a time, 0 for none; they are ranked again in every layer, so
        that only those that the link can copy during one layer matter (ours).
    floor: only experts that are likelier than this to be used in the step are prefetched (ours). More likely than not,
        because a useless copy keeps the link from those that a layer waits for. 0: all that are predicted at all, which
        is the literal reading, and nearly every expert.
    start: which experts are in the pool at first: the "ranked" most used experts of the past sequences, or none,
        "empty" (ours).
    demand_slots: staging slots for loads of an event that is larger than the cache (ours).
    host: above a disk, the "scenario" says what stays in the host's memory, or the same priority does ("ranked"; ours:
        the source names host memory as the store). Prefetches are read ahead.

    Past sequences are the calibration's: none is added while a run plays its one batch.
    """

    needs = Needs(tokens=True, calibration=True, gpu_only=True)

    library: Count = 1000
    lookahead: Count | None = None
    prefetch: NonNegative = 16
    floor: Annotated[float, at_least(0)] = 0.5
    start: Literal["ranked", "empty"] = "ranked"
    demand_slots: Count = 2
    host: Literal["scenario", "ranked"] = "scenario"

    def compose(self, context: BuildContext) -> Composition:
        """One pool, ranked by what the batch is expected to use."""
        library = context.required_calibration().activations[-self.library :]
        matcher = ActivationMatcher(library, context.batch, context.top_k)
        cache = ActivationCache(matcher)
        size, lookahead = self.prefetch, self.lookahead or context.layers
        full = self.start == "ranked"
        return Composition(
            placement=Pooled(PopularityPlacement(popularity=library.sum(axis=0))) if full else PoolPlacement(),
            assigner=LoadAll(),
            prefetcher=ActivationPrefetcher(matcher, cache, size, lookahead, self.floor) if size else None,
            cache=cache,
            host_cache=ActivationHostCache(matcher) if self.host == "ranked" else None,
            demand_slots=self.demand_slots,
            parameters={"lookahead": lookahead},
        )


@register(
    "moe-infinity@impl",
    "one pool, fewest visits evicted first; no prefetches",
    source="EfficientMoE/MoE-Infinity d617801; docs/readings.md#moe-infinity",
)
@dataclass(frozen=True)
class MoeInfinityImpl(Policy):
    """The open-source version (commit d617801): its wrappers of Mixtral and DeepSeek have prefetching commented out.

    demand_slots: staging slots for loads of an event that is larger than the cache (ours).

    Of equally many visits the lowest expert is evicted, then the lowest layer: its scan (expert_dispatcher.cpp) takes
    the first. Its free budget also shrinks with every hit during warm-up, so that it may hold less than it was given;
    that is not modelled: give it a smaller cache.
    """

    needs = Needs(gpu_only=True)

    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        """One pool; the expert with the fewest visits since its admission is evicted."""
        return Composition(
            placement=PoolPlacement(),
            assigner=LoadAll(),
            cache=LfuCache(history=False, recency=False),
            demand_slots=self.demand_slots,
        )
