"""Placements: how the cache budget is divided among layers, and which experts are resident before the first token.

All of them work in whole experts, which may differ in size from layer to layer. What is left of the budget after an
even division goes to the layers in a fixed order, at most one more expert each.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Literal

import numpy as np

from policies.mechanism.views import PolicyError
from policies.protocols import Budget, InitialPlacement, Placement


def even_slots(budget: Budget, order: Iterable[int] | None = None) -> list[int]:
    """Slots by layer, equal but for the rest, which gives one more each in ``order`` (default: ascending)."""
    base = min(budget.cache_bytes // sum(budget.expert_bytes), budget.experts)
    slots = [base] * budget.layers
    left = budget.cache_bytes - base * sum(budget.expert_bytes)
    for layer in range(budget.layers) if order is None else order:
        size = budget.expert_bytes[layer]
        if slots[layer] == base < budget.experts and size <= left:
            slots[layer] += 1
            left -= size
    return slots


class NoPlacement:
    """Even slots, empty."""

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement(tuple(even_slots(budget)), ((),) * budget.layers)


class PoolPlacement:
    """One pool of bytes over all layers, empty."""

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement(None, ((),) * budget.layers)


class RandomPlacement:
    """Even slots, filled with experts drawn without replacement (DALI, Section 4.3: the cache starts at random)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def place(self, budget: Budget) -> InitialPlacement:
        """Draw the residents of each layer, layer by layer from one generator."""
        draw = random.Random(self.seed)
        slots = even_slots(budget)
        residents = tuple(tuple(sorted(draw.sample(range(budget.experts), count))) for count in slots)
        return InitialPlacement(tuple(slots), residents)


class LayerWisePlacement:
    """Whole layers on the GPU from the last one backwards; memory that does not hold another whole layer stays unused.

    llama.cpp's ``--n-cpu-moe n``, which keeps the experts of the first n layers on the CPU (DALI, Section 6.1).
    """

    def place(self, budget: Budget) -> InitialPlacement:
        """Fill layers from the last until the next one does not fit."""
        slots = [0] * budget.layers
        left = budget.cache_bytes
        for layer in reversed(range(budget.layers)):
            left -= budget.experts * budget.expert_bytes[layer]
            if left < 0:
                break
            slots[layer] = budget.experts
        return InitialPlacement(tuple(slots), tuple(tuple(range(count)) for count in slots))


class PopularityPlacement:
    """The experts that calibration prompts used most, and slots for just these.

    Plain: by popularity over the whole model until the budget is spent (Fiddler, Section 3.2). ``uniform``: even slots
    with each layer's most popular, and the rest to the best of those not placed yet, at most one a layer (DAOP,
    Section IV-A). Ties go to the lower layer, then the lower expert. ``popularity`` [layers, experts] None: the
    budget's, over prompt and decode tokens; raises PolicyError if there is none.
    """

    def __init__(self, uniform: bool = False, popularity: np.ndarray | None = None) -> None:
        self.uniform = uniform
        self.popularity = popularity

    def place(self, budget: Budget) -> InitialPlacement:
        popularity = _popularity(budget, self.popularity)
        residents = _uniform(budget, popularity) if self.uniform else _global(budget, popularity)
        chosen = tuple(tuple(sorted(layer)) for layer in residents)
        return InitialPlacement(tuple(len(layer) for layer in chosen), chosen)


def _popularity(budget: Budget, given: np.ndarray | None) -> np.ndarray:
    expected = (budget.layers, budget.experts)
    popularity = budget.popularity if given is None else given
    if popularity is None:
        raise PolicyError("placement by popularity: the budget has none; count it on calibration prompts")
    if popularity.shape != expected:
        raise PolicyError(f"placement by popularity: expected shape {expected}, got {popularity.shape}")
    return popularity


def _global(budget: Budget, popularity: np.ndarray) -> list[list[int]]:
    chosen: list[list[int]] = [[] for _ in range(budget.layers)]
    left, least = budget.cache_bytes, min(budget.expert_bytes)
    for flat in np.argsort(-popularity, axis=None, kind="stable").tolist():
        if left < least:
            break
        layer, expert = divmod(flat, budget.experts)
        if budget.expert_bytes[layer] <= left:
            chosen[layer].append(expert)
            left -= budget.expert_bytes[layer]
    return chosen


def _uniform(budget: Budget, popularity: np.ndarray) -> list[list[int]]:
    ranked = np.argsort(-popularity, axis=1, kind="stable")
    base = min(budget.cache_bytes // sum(budget.expert_bytes), budget.experts)
    runner_up = np.take_along_axis(popularity, ranked[:, [min(base, budget.experts - 1)]], axis=1)[:, 0]
    slots = even_slots(budget, np.argsort(-runner_up, kind="stable").tolist())
    return [ranked[layer, :count].tolist() for layer, count in enumerate(slots)]


def random_or_popular(start: Literal["random", "popular"], seed: int) -> Placement:
    """Even slots, filled at random or with each layer's most popular experts."""
    return RandomPlacement(seed) if start == "random" else PopularityPlacement(uniform=True)


class Pooled:
    """The residents of another placement, in one pool over all layers."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement(None, self.placement.place(budget).residents)
