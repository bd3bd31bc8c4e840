"""AdapMoE: cache sizes by layer from calibration, one expert prefetched by the next gate, weak experts dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from policies.calibration import Calibration, Counts, Floats
from policies.mechanism.views import LayerView, Routing
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.prefetchers import TopPrefetcher
from policies.parts.routers import TrueRouter, routing_of_tokens
from policies.protocols import Budget, Composition, InitialPlacement, Needs
from policies.system import BuildContext, ChoiceError, Policy, register
from trilane.common.hints import Count

_MOST_UNITS = 1 << 17  # of memory: more than any model of equal experts has slots
NEEDS = Needs(
    forecasts=(("gate", 1),), forecast_phases=("decode",), calibration=True, calibrated_tokens=True, gpu_only=True
)


class WeakExpertsRouter(TrueRouter):
    """Drops a token's experts after the first whose share of the token's weights is below a threshold; the others'
    weights are scaled to the sum that they had together with those."""

    def __init__(self, drop_below: float) -> None:
        self.drop_below = drop_below

    def route(self, view: LayerView) -> Routing:
        """The router's own experts without the weak ones."""
        ids, weights = view.routing.token_ids, view.routing.token_weights
        kept = [self._strong(row) for row in weights]
        if all(count >= len(row) for count, row in zip(kept, weights, strict=True)):
            return view.routing
        strong_ids = [row[:count] for row, count in zip(ids, kept, strict=True)]
        return routing_of_tokens(strong_ids, [_scaled(row, count) for row, count in zip(weights, kept, strict=True)])

    def _strong(self, weights: Sequence[float]) -> int:
        """Number of a token's experts that stay."""
        least = self.drop_below * sum(weights)
        return max(1, sum(weight >= least for weight in weights))


def _scaled(weights: Sequence[float], count: int) -> list[float]:
    """The first ``count`` weights, scaled to the sum of all."""
    total, kept = sum(weights), sum(weights[:count])
    return [weight * total / kept for weight in weights[:count]] if kept else list(weights[:count])


def lru_misses(ids: NDArray[np.int16], experts: int) -> Counts:
    """Misses of an LRU cache on the tokens ``ids`` [tokens, layers, k], by layer and number of slots:
    [layers, experts + 1].

    A token is one event: its experts are looked up together, then become the most recent, in id order. An expert hits
    in n slots if fewer than n were used more recently; its first use is a miss.
    """
    tokens, layers, top_k = ids.shape
    layer = np.arange(layers)[:, None]
    last = np.full((layers, experts), -1, np.int64)  # when each expert was used last
    hits = np.zeros((layers, experts + 1), np.int64)  # by the number of experts used more recently
    for token, chosen in enumerate(np.sort(ids, axis=-1)):
        used = last[layer, chosen]
        depth = (last[:, None, :] > used[..., None]).sum(axis=-1)
        np.add.at(hits, (layer, np.where(used < 0, experts, depth)), 1)
        last[layer, chosen] = token * top_k + np.arange(top_k)
    saved = np.cumsum(hits[:, :experts], axis=1)
    misses: Counts = tokens * top_k - np.concatenate([np.zeros((layers, 1), np.int64), saved], axis=1)
    misses.setflags(write=False)  # shared by all runs of one calibration
    return misses


class SlotsByMisses:
    """Empty slots by layer with the fewest ``misses`` [layers, experts + 1] in total.

    Slots that avoid no further miss go to the layers in turn.
    """

    def __init__(self, misses: Counts) -> None:
        self.misses = misses

    def place(self, budget: Budget) -> InitialPlacement:
        slots = fewest_misses(self.misses, budget.expert_bytes, budget.cache_bytes)
        _hand_out_rest(slots, budget)
        return InitialPlacement(tuple(slots), ((),) * budget.layers)


class SlotsByMissesFull:
    """Slots by misses, filled with each layer's most popular experts by ``popularity`` [layers, experts]; ties go to
    the lower id."""

    def __init__(self, misses: Counts, popularity: Floats) -> None:
        self._slots = SlotsByMisses(misses)
        self._ranked: list[list[int]] = np.argsort(-popularity, axis=1, kind="stable").tolist()

    def place(self, budget: Budget) -> InitialPlacement:
        slots = self._slots.place(budget).slots
        assert slots is not None
        return InitialPlacement(slots, tuple(tuple(sorted(r[:n])) for r, n in zip(self._ranked, slots, strict=True)))


def fewest_misses(misses: Counts, expert_bytes: Sequence[int], cache_bytes: int) -> list[int]:
    """The slots of each layer, of experts of ``expert_bytes``, that fit ``cache_bytes`` and miss least in total.

    Dynamic programming over layers and memory, in units of the greatest common divisor of the sizes: exact. Only where
    that makes too many units, they are coarser and sizes are rounded up.
    """
    most = misses.shape[1] - 1
    useful = min(cache_bytes, most * sum(expert_bytes))
    unit = max(gcd(*expert_bytes), useful // _MOST_UNITS)
    sizes = [-(-size // unit) for size in expert_bytes]
    room = useful // unit
    best = np.zeros(room + 1, np.int64)  # by memory: fewest misses of the layers so far
    choices = []
    for curve, size in zip(misses.tolist(), sizes, strict=True):
        best, choice = _add_layer(best, curve, size)
        choices.append(choice)
    slots = []
    for choice, size in zip(reversed(choices), reversed(sizes), strict=True):
        slots.append(int(choice[room]))
        room -= slots[-1] * size
    return slots[::-1]


def _add_layer(best: Counts, curve: Sequence[int], size: int) -> tuple[Counts, Counts]:
    """Fewest misses by memory with one more layer, and that layer's slots; of equals the fewest slots."""
    total, choice = best + curve[0], np.zeros_like(best)
    for count in range(1, min(len(curve) - 1, (len(best) - 1) // size) + 1):
        taken = count * size
        other = best[: len(best) - taken] + curve[count]
        better = other < total[taken:]
        total[taken:][better] = other[better]
        choice[taken:][better] = count
    return total, choice


def _hand_out_rest(slots: list[int], budget: Budget) -> None:
    """One more slot for each layer in turn, as long as there is memory and an expert to put there."""
    sizes = budget.expert_bytes
    left = budget.cache_bytes - sum(count * size for count, size in zip(slots, sizes, strict=True))
    before = -1
    while left != before:
        before = left
        for layer, size in enumerate(sizes):
            if slots[layer] < budget.experts and size <= left:
                slots[layer] += 1
                left -= size


@lru_cache(maxsize=8)
def _misses(calibration: Calibration, experts: int) -> Counts:
    """Counted once for all runs of a sweep. Raises ChoiceError if there is nothing to count."""
    if not calibration.decode_ids.size:
        raise ChoiceError(
            f"policy 'adapmoe' sizes its caches by what decode tokens of calibration prompts would have missed; "
            f"calibration {calibration.source} has no decode tokens: capture it with generated ones"
        )
    return lru_misses(calibration.decode_ids, experts)


@register(
    "adapmoe",
    "LRU, sizes by layer; the next gate prefetches one",
    source="AdapMoE (arXiv 2408.10284), as read in docs/readings.md#adapmoe",
)
@dataclass(frozen=True)
class AdapMoe(Policy):
    """AdapMoE, as read in docs/readings.md.

    prefetch: experts of the next layer that are prefetched, in decode only; at most one, the next gate's likeliest that
        is absent. 0 for none.
    drop_below: drops a token's second expert (with a larger top-k: any after the first) when its share of the sum of
        the token's weights is below this, which changes what the model computes. None: never. The paper derives
        thresholds by layer from the sensitivity of the loss, the released code has constants for Mixtral; here it
        is one number.
    start: which experts are in the caches at first: each layer's most "popular" experts on calibration prompts, or
        none, "empty" (ours).
    demand_slots: staging slots for loads of an event that is larger than the layer's cache (ours).

    Prefetches go into the next layer's cache in place of its least recent expert, but never of one that the gate
    chooses (ours; the paper is silent). The sizes of the layers' caches have the fewest misses on the decode tokens of
    the calibration prompts.
    """

    prefetch: Literal[0, 1] = 1
    drop_below: float | None = None
    start: Literal["popular", "empty"] = "popular"
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        """Prefetching takes forecasts, dropping experts changes the routing."""
        drops = self.drop_below is not None
        needs = replace(NEEDS, changes_routing=drops, tokens=drops)
        return needs if self.prefetch else replace(needs, forecasts=())

    def compose(self, context: BuildContext) -> Composition:
        """LRU by layer with sizes from calibration."""
        calibration = context.required_calibration()
        misses, full = _misses(calibration, context.experts), self.start == "popular"
        return Composition(
            placement=SlotsByMissesFull(misses, calibration.popularity) if full else SlotsByMisses(misses),
            router=TrueRouter() if self.drop_below is None else WeakExpertsRouter(self.drop_below),
            assigner=LoadAll(),
            prefetcher=TopPrefetcher(1, "gate", "cache") if self.prefetch else None,
            cache=LruCache(),
            demand_slots=self.demand_slots,
        )
