"""The rows of a step that each expert computes, from the ids that the router or a policy chose for every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.mechanism.views import Routing

Weigh: TypeAlias = Callable[[Routing], Routing]  # a policy's routing -> the same with the model's weights


@dataclass(frozen=True)
class RoutedTokens:
    """N tokens with k choices each. Choice j of token n has the number n * k + j, its row of partial results.

    ``weights`` [N * k] on the host, in the type of the model's router; a choice without an expert counts as zero.
    """

    tokens: int
    top_k: int
    weights: Tensor
    choices: Mapping[int, Tensor]  # of every active expert, ascending, int64

    @property
    def complete(self) -> bool:
        """True if every choice has an expert."""
        return sum(map(len, self.choices.values())) == self.tokens * self.top_k


def choices_of(ids: NDArray[np.integer]) -> dict[int, Tensor]:
    """The choices of every expert in ``ids`` [N, k], by ascending expert; negative ids are left out."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    parts = torch.split(torch.from_numpy(order), np.diff([*starts, len(flat)]).tolist())
    return {expert: part for expert, part in zip(experts.tolist(), parts, strict=True) if expert >= 0}


def routed(ids: NDArray[np.integer], weights: Tensor) -> RoutedTokens:
    """The tokens of a router's choice: ``ids`` and ``weights`` [N, k]."""
    return RoutedTokens(len(ids), ids.shape[1], weights.reshape(-1), choices_of(ids))


def routing_of(given: RoutedTokens) -> Routing:
    """The tokens' routing in the session's form, without the choices of single tokens."""
    return Routing(tuple(given.choices), tuple(map(len, given.choices.values())))


def as_it_is(routing: Routing) -> Routing:
    """The routing itself, whose weights need no change."""
    return routing


def rerouted(routing: Routing, top_k: int, dtype: torch.dtype) -> RoutedTokens:
    """The tokens of a policy's routing, which may have fewer than ``top_k`` choices for a token."""
    ids = np.full((len(routing.token_ids), top_k), -1)
    weights = torch.zeros(len(routing.token_ids), top_k, dtype=dtype)
    for token, (chosen, shares) in enumerate(zip(routing.token_ids, routing.token_weights, strict=True)):
        ids[token, : len(chosen)] = chosen
        weights[token, : len(shares)] = torch.tensor(shares)
    return routed(ids, weights)


def descending(ids: NDArray[np.integer], weights: Tensor) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]:
    """Ids and weights [N][k] of every token by descending weight, as ``Routing`` has them."""
    ordered, order = weights.float().sort(dim=-1, descending=True, stable=True)
    return np.take_along_axis(ids, order.numpy(), 1).tolist(), ordered.tolist()
