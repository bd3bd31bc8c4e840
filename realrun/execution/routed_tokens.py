"""The rows of a step that each expert computes, from the ids that the router or a policy chose for every token; and
conversion of routing: from a model's own routers for the session, and from a policy with the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.mechanism.views import Routing
from policies.parts.routers import combine_weights
from policies.protocols import Needs
from traces.capture.record import LayerRecord, probabilities

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


# --- a model's own routing, and a policy's ----------------------------------------------------------------------------


Scores: TypeAlias = Sequence[Sequence[float]] | None  # [tokens][experts]


class OwnRouting(NamedTuple):
    """A layer's own routing of N tokens. As in a trace, sessions get weights and scores in 16 bits."""

    ids: NDArray[np.int64]  # [N, k], in the router's order
    tokens: RoutedTokens  # with the router's exact weights
    routing: Routing
    scores: Scores


def own_routing(ids: Tensor, weights: Tensor, scores: Tensor | None, needs: Needs) -> OwnRouting:
    """The routing from the experts' arguments, on the host: ``ids``, ``weights`` [N, k], ``scores`` [N, E] float16."""
    chosen = ids.numpy()
    tokens = routed(chosen, weights.clone())
    routing = routing_of(tokens)
    if needs.tokens:
        token_ids, token_weights = descending(chosen, weights.half())
        routing = routing._replace(token_ids=token_ids, token_weights=token_weights)
    return OwnRouting(chosen, tokens, routing, None if scores is None else scores.tolist())


def weighed_like(own: OwnRouting, norm_topk: bool) -> Weigh:
    """Weights for a policy's routing in place of ``own``.

    A token that keeps its experts keeps the router's weights. If the policy needs scores, its weights come from these
    and lack the model's further scaling (DeepSeek's ``routed_scaling_factor``, sums other than 1). They are scaled,
    token by token, by the ratio of the router's weights to the weights that the scores give for the router's choice.
    Without scores, a policy's weights come from the router's, which include the scaling.
    """
    weights = own.tokens.weights.view(own.tokens.tokens, -1).tolist()

    def of_token(token: int, ids: Sequence[int], shares: Sequence[float]) -> Sequence[float]:
        mine = dict(zip(own.ids[token].tolist(), weights[token], strict=True))
        if mine.keys() == set(ids):
            return [mine[expert] for expert in ids]
        if own.scores is None:
            return shares
        scale = scale_of(weights[token], own.scores[token], own.ids[token].tolist(), norm_topk)
        return [share * scale for share in shares]

    def weigh(routing: Routing) -> Routing:
        tokens = zip(routing.token_ids, routing.token_weights, strict=True)
        return routing._replace(token_weights=[of_token(n, *token) for n, token in enumerate(tokens)])

    return weigh


def scaled_by(scale: float) -> Weigh:
    """Weights for routing that was committed before the layer's router ran, by the scale that was probed before."""

    def weigh(routing: Routing) -> Routing:
        weights = [[share * scale for share in shares] for shares in routing.token_weights]
        return routing._replace(token_weights=weights)

    return weigh


def scale_of(weights: Sequence[float], scores: Sequence[float], ids: Sequence[int], norm_topk: bool) -> float:
    """The ratio of the router's weights of one token to those that its scores give for the same experts."""
    plain = sum(combine_weights(scores, ids, norm_topk))
    return sum(weights) / plain if plain > 0 else 1.0


def layer_scale(record: LayerRecord, rule: str, norm_topk: bool) -> float:
    """The mean scale of a layer over the tokens of one pass."""
    assert record.ids is not None
    assert record.weights is not None
    tokens = zip(record.weights.tolist(), probabilities(record.logits, rule).tolist(), record.ids.tolist(), strict=True)
    scales = [scale_of(weights, scores, ids, norm_topk) for weights, scores, ids in tokens]
    return sum(scales) / len(scales)
