"""Cache sizes by layer: those that would have missed least on calibration prompts (AdapMoE's dynamic programming)."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

from policies.calibration import Counts, Floats
from policies.protocols import Budget, InitialPlacement

_MOST_UNITS = 1 << 17  # of memory: more than any model of equal experts has slots


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
    """Slots by layer with the fewest ``misses`` [layers, experts + 1] in total; nobody in them.

    Slots that spare no further miss go to the layers in turn.
    """

    def __init__(self, misses: Counts) -> None:
        self.misses = misses

    def place(self, budget: Budget) -> InitialPlacement:
        """Divide the budget."""
        slots = fewest_misses(self.misses, budget.expert_bytes, budget.cache_bytes)
        _hand_out_rest(slots, budget)
        return InitialPlacement(tuple(slots), ((),) * budget.layers)


class SlotsByMissesFull:
    """The same slots, with each layer's most popular experts by ``popularity`` [layers, experts] in them; ties go to
    the lower id."""

    def __init__(self, misses: Counts, popularity: Floats) -> None:
        self._slots = SlotsByMisses(misses)
        self._ranked: list[list[int]] = np.argsort(-popularity, axis=1, kind="stable").tolist()

    def place(self, budget: Budget) -> InitialPlacement:
        """Divide the budget and fill it."""
        slots = self._slots.place(budget).slots
        assert slots is not None
        return InitialPlacement(slots, tuple(tuple(sorted(r[:n])) for r, n in zip(self._ranked, slots, strict=True)))


def fewest_misses(misses: Counts, expert_bytes: Sequence[int], cache_bytes: int) -> list[int]:
    """The slots of each layer, of experts of ``expert_bytes``, that fit ``cache_bytes`` and miss least in total.

    Dynamic programming over layers and memory, in units of the greatest common divisor of the sizes: exact. Only where
    that makes too many units they are coarser, and sizes are rounded up.
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
    """One slot more for each layer in turn, while there is memory and an expert to put there."""
    sizes = budget.expert_bytes
    left = budget.cache_bytes - sum(count * size for count, size in zip(slots, sizes, strict=True))
    before = -1
    while left != before:
        before = left
        for layer, size in enumerate(sizes):
            if slots[layer] < budget.experts and size <= left:
                slots[layer] += 1
                left -= size
