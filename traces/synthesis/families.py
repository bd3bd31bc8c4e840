"""Stored routing for a model: its own statistics, else the nearest of its router's family.

How a router is kept balanced, and how it scores, decide how persistent routing is more than numbers of experts do: the
more evenly the experts of a *sequence* are used, the less a cache can learn from its last tokens, and shared experts
lower it too (arXiv 2505.16056, 20 models). A bias balances continuously and comes with a loss within each sequence
(DeepSeek-V3, Sec. 2.1.2; GLM-4.5, Sec. 2.1); Qwen3's loss over the global batch leaves a text its own experts. So the
nearest is chosen by, in this order: the same model; how it is balanced; how it scores; whether there are shared
experts; the least sum of |log2 of the ratios| of experts and of experts per token; the order of the file. A balance
that is not published decides nothing.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2
from typing import Literal, NamedTuple, TypeAlias

from traces.models.catalogue import load_model, original
from traces.models.names import parted
from traces.models.routers import ModelRouter, router_of
from traces.models.shape import ModelShape
from traces.synthesis.routing_model import RoutingModel, stored_models

Basis: TypeAlias = Literal["own statistics", "family", "nearest"]
_FINE = 32  # experts from which on a layer is fine-grained
_DIGITS = 6


class Traits(NamedTuple):
    """Traits that a family of routers has in common; ``fine``: of many small experts."""

    balance: str
    scoring: str
    shared: bool
    fine: bool

    def like(self, other: Traits | None) -> bool:
        """True for a model whose routing says how far another's may be off: scores may be formed otherwise."""
        return other is not None and self._replace(scoring=other.scoring) == other


class Stored(NamedTuple):
    """A stored routing model, and how it is related to the model that it is for."""

    fit: RoutingModel
    basis: Basis


def base_name(shape: ModelShape) -> str:
    """The model's name in the catalogue, without the suffixes of cut or quantised ones; of an alias, its model's."""
    return original(parted(shape.name).model)


@lru_cache(maxsize=64)
def nearest_stored(shape: ModelShape, left_out: frozenset[str] = frozenset()) -> Stored:
    """The stored routing for a model; ``left_out``: models whose own statistics are not to be used."""
    name, router = base_name(shape), router_of(shape)
    known = [fit for fit in stored_models().values() if fit.model not in left_out]
    fit = min(known, key=lambda fit: (fit.model != name, *_mismatches(shape, router, fit), octaves(shape, fit)))
    if fit.model == name:
        return Stored(fit, "own statistics")
    own, others = traits_of(shape), traits_of(load_model(fit.model))
    alike = own is not None and others is not None and own[:2] == others[:2]
    return Stored(fit, "family" if alike else "nearest")


def traits_of(shape: ModelShape) -> Traits | None:
    """The family of a model's router; None: not known."""
    router = router_of(shape)
    if router is None:
        return None
    return Traits(router.balance, router.scoring, shape.shared_experts > 0, shape.experts >= _FINE)


def octaves(shape: ModelShape, fit: RoutingModel) -> float:
    """Octaves that numbers of experts, and of experts per token, are apart."""
    ratios = (shape.experts / fit.experts, shape.top_k / fit.top_k)
    return round(sum(abs(log2(ratio)) for ratio in ratios), _DIGITS)


def _mismatches(shape: ModelShape, router: ModelRouter | None, fit: RoutingModel) -> tuple[bool, bool, bool]:
    """Balance, scoring and shared experts that are not those of a stored model."""
    other = load_model(fit.model)
    theirs = router_of(other)
    if router is None or theirs is None:
        return (False, False, False)
    return (
        router.balance not in ("none", theirs.balance),
        router.scoring != theirs.scoring,
        (shape.shared_experts > 0) != (other.shared_experts > 0),
    )


def relatives(shape: ModelShape, left_out: frozenset[str] = frozenset()) -> tuple[RoutingModel, ...]:
    """The stored models whose spread is how uncertain a model's routing is: those of the family of the nearest; of a
    family with one member, of all families with as fine experts. The model's own statistics stand alone.
    """
    chosen = nearest_stored(shape, left_out)
    if chosen.basis == "own statistics":
        return (chosen.fit,)
    family = traits_of(load_model(chosen.fit.model))
    known = [fit for fit in stored_models().values() if fit.model not in left_out]
    members = [fit for fit in known if family and family.like(traits_of(load_model(fit.model)))]
    fine = chosen.fit.experts >= _FINE
    return tuple(members if len(members) > 1 else [fit for fit in known if (fit.experts >= _FINE) == fine])
