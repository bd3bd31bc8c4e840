"""The spread of a hit rate over the models that a made-up routing could be like: how far it rests on the one taken."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from traces.models.shape import ModelShape
from traces.synthesis.families import Basis, base_name, nearest_stored, relatives, traits_of
from traces.synthesis.named import adapted, of_kind
from traces.synthesis.published import choices, lru_at
from traces.synthesis.routing_model import RoutingModel, text_kinds

SHARES = (0.125, 0.25, 0.5, 0.75)  # of the experts
_TEXTS, _TOKENS, _LAYERS = 2, 128, 8  # that are simulated: an estimate in some hundredths of a second a model


class HitSpread(NamedTuple):
    """Hit rates of an LRU cache by layer at the same sizes, with the routing of each relative."""

    basis: Basis
    like: str  # the stored model that was taken
    rates: tuple[tuple[float, ...], ...]  # [relatives, sizes]

    def at(self, place: int) -> tuple[float, float]:
        """The lowest and the highest at one of the sizes."""
        of_size = [rates[place] for rates in self.rates]
        return min(of_size), max(of_size)


@lru_cache(maxsize=16)
def hit_spread(shape: ModelShape, shares: tuple[float, ...] = SHARES) -> HitSpread:
    """The spread of hit rates of caches that hold these shares of the experts: over the relatives of a model, or over
    the kinds of text that are published for it."""
    stored = nearest_stored(shape)
    kinds = text_kinds().get(base_name(shape), {}) if stored.basis == "own statistics" else {}
    fits = [*(adapted(shape, fit) for fit in relatives(shape)), *(of_kind(shape, kind) for kind in kinds)]
    made = [choices(_thinned(fit), _TEXTS, _TOKENS) for fit in fits]
    return HitSpread(stored.basis, stored.fit.name, tuple(lru_at(ids, shape.experts, shares) for ids in made))


def _thinned(fit: RoutingModel) -> RoutingModel:
    """The routing of some layers, from those of the least to those of the most preference: each has its own cache."""
    count = min(_LAYERS, fit.moe_layers)
    chosen = np.quantile(fit.preference_share, (np.arange(count) + 0.5) / count)
    return replace(fit, moe_layers=count, preference_share=tuple(map(float, chosen)))


def in_words(shape: ModelShape, share: float) -> str:
    """The statistics of made-up routing, and the hit rates of an LRU cache of that share that they leave open."""
    spread = hit_spread(shape, (share,))
    low, high = spread.at(0)
    hits = f"an LRU cache of {100 * share:.0f} % of the experts hits {100 * low:.0f} to {100 * high:.0f} %"
    return f"{basis_in_words(shape)}{f'; {_OVER[spread.basis]} {hits}' if len(spread.rates) > 1 else ''}"


def basis_in_words(shape: ModelShape) -> str:
    """The model whose statistics made-up routing has, and how it is related."""
    stored, traits = nearest_stored(shape), traits_of(shape)
    if stored.basis == "own statistics":
        return f"the model's own statistics ({stored.fit.model})"
    if stored.basis == "nearest" or traits is None:
        return f"those of the nearest model alone ({stored.fit.model})"
    return f"those of its family (balanced by {_BALANCE[traits.balance]}, {traits.scoring}), like {stored.fit.model}"


_OVER = {
    "own statistics": "over the kinds of text that are published", "family": "over its members",
    "nearest": "with those of others",
}
_BALANCE = {"bias": "a bias", "loss": "a loss", "none": "a way not published"}
