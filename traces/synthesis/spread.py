"""The spread of a hit rate over the models that a made-up routing could be like: how far it rests on the one taken."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from traces.models.shape import ModelShape
from traces.synthesis.families import Basis, nearest_stored, relatives, traits_of
from traces.synthesis.named import adapted
from traces.synthesis.published import choices, lru_at

SHARES = (0.125, 0.25, 0.5, 0.75)  # of the experts
_TEXTS, _TOKENS = 2, 128  # that are simulated: an estimate in a tenth of a second a model


class Spread(NamedTuple):
    """Hit rates of an LRU cache by layer at the same sizes, with the routing of each relative."""

    basis: Basis
    like: str  # the stored model that was taken
    rates: tuple[tuple[float, ...], ...]  # [relatives, sizes]

    def at(self, place: int) -> tuple[float, float]:
        """The lowest and the highest at one of the sizes."""
        of_size = [rates[place] for rates in self.rates]
        return min(of_size), max(of_size)


@lru_cache(maxsize=16)
def hit_spread(shape: ModelShape, shares: tuple[float, ...] = SHARES) -> Spread:
    """The spread of hit rates of caches that hold these shares of the experts."""
    stored = nearest_stored(shape)
    made = [choices(adapted(shape, fit), _TEXTS, _TOKENS) for fit in relatives(shape)]
    return Spread(stored.basis, stored.fit.name, tuple(lru_at(ids, shape.experts, shares) for ids in made))


def in_words(shape: ModelShape, share: float) -> str:
    """The routing that was taken for a model, and the hit rates of an LRU cache of that share that it leaves open."""
    spread = hit_spread(shape, (share,))
    if spread.basis == "own statistics":
        return f"routing of {spread.like}'s own statistics"
    low, high = spread.at(0)
    hits = f"an LRU cache of {100 * share:.0f} % of the experts hits {100 * low:.0f} to {100 * high:.0f} %"
    traits = traits_of(shape)
    if spread.basis == "nearest" or traits is None:
        return f"routing of the nearest model alone, {spread.like}: with that of others {hits}"
    about = f"balanced by {_BALANCE[traits.balance]}, {traits.scoring}"
    return f"routing of its family ({about}), like {spread.like}: over its members {hits}"


_BALANCE = {"bias": "a bias", "loss": "a loss", "none": "a way not published"}
