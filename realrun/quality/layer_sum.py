"""The sum of a layer's experts under a plan: substitutes, dropped experts, results from the layer before or for the
next one, and narrow copies.

Nothing here depends on where an expert runs, only on which experts run, with which weights and on which activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from policies.mechanism.views import Plan
from realrun.execution.routed_tokens import RoutedTokens
from realrun.experts.ffn import compute_into
from realrun.generation.hosted_model import HostedModel

GROUP = 32  # weights that share a scale in a narrow copy, along a row


@dataclass
class LayerSums:
    """Computes one layer after the other. ``narrow_bits``: of a weight in a narrow copy, if the policy has any."""

    model: HostedModel
    narrow_bits: int | None = None
    _before: Tensor | None = None  # activations of the layer before
    _later: Tensor | None = None  # [N, H], results that the layer before has deferred
    _narrow: dict[tuple[int, int], Mapping[str, Tensor]] = field(default_factory=dict)

    def begin_pass(self) -> None:
        """Begin a forward pass."""
        self._before = self._later = None

    def of_plan(self, plan: Plan, hidden: Tensor, tokens: RoutedTokens) -> Tensor:
        """The output [N, H] of a layer for its activations ``hidden`` [N, H]."""
        now = [e for e in tokens.choices if e not in plan.deferred and e not in plan.precomputed]
        total = self._sum(plan.layer, now, hidden, tokens)
        if plan.precomputed:
            assert self._before is not None
            total = total + self._sum(plan.layer, plan.precomputed, self._before, tokens)
        if self._later is not None:
            total = total + self._later
        self._later = self._sum(plan.layer, plan.deferred, hidden, tokens) if plan.deferred else None
        self._before = hidden
        return total.to(hidden.dtype)

    def of_experts(self, layer: int, experts: list[int], hidden: Tensor, tokens: RoutedTokens) -> Tensor:
        """The sum [N, H] of some of a layer's experts."""
        return self._sum(layer, experts, hidden, tokens).to(hidden.dtype)

    def _sum(
        self, layer: int, experts: list[int] | tuple[int, ...], hidden: Tensor, tokens: RoutedTokens
    ) -> Tensor:
        parts = torch.zeros(tokens.tokens * tokens.top_k, hidden.shape[1], dtype=self.model.sum_dtype)
        kernel = self.model.loaded.layers[layer].experts
        for expert in experts:
            views = self._weights(layer, expert)
            compute_into(parts, kernel, views, hidden, tokens.choices[expert], tokens.weights, tokens.top_k)
        return parts.view(tokens.tokens, tokens.top_k, -1).sum(1)

    def _weights(self, layer: int, expert: int) -> Mapping[str, Tensor]:
        store, wide = self.model.store, expert % self.model.shape.experts
        views = store.layouts[layer].views(store.buffer(layer, wide))
        if expert == wide:
            return views
        assert self.narrow_bits is not None
        if (layer, expert) not in self._narrow:
            self._narrow[layer, expert] = {name: narrowed(view, self.narrow_bits) for name, view in views.items()}
        return self._narrow[layer, expert]


def narrowed(weights: Tensor, bits: int) -> Tensor:
    """Weights [rows, columns] rounded to ``bits`` each: the nearest of evenly spaced values, with a scale for every
    ``GROUP`` of a row, as round-to-nearest quantisation has it. Biases [rows] stay."""
    if weights.ndim < 2:
        return weights
    columns, largest = weights.shape[-1], 2 ** (bits - 1) - 1
    groups = weights.float().reshape(-1, GROUP if columns % GROUP == 0 else columns)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    rounded: Tensor = (groups / scale).round().clamp(-largest - 1, largest) * scale
    return rounded.reshape(weights.shape).to(weights.dtype)
