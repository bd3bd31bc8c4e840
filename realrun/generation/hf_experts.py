"""Calls of the library's experts modules, redirected to our function through its registry of experts functions.

A module's own code computes router, shared experts and scaling; our function gets the arguments of the experts: hidden
states [N, H], ids [N, k] and weights [N, k] (transformers/integrations/moe.py, 5.17 to 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from realrun.errors import RefusedError
from realrun.execution.routed_tokens import choices_of
from realrun.experts.ffn import check_kernel, compute_into
from realrun.experts.store import ExpertStore
from traces.capture.layers import MoeLayer

NAME = "trilane"

ExpertsCall: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, hidden, ids, weights) -> [N, H]


def check_layers(layers: Sequence[MoeLayer]) -> None:
    """Raises RefusedError for experts that the library does not dispatch, and for layers of different sizes."""
    for layer in layers:
        check_kernel(layer.experts)
    sizes = sorted({(layer.experts_count, layer.expert_elements) for layer in layers})
    if len(sizes) > 1:
        raise RefusedError(
            f"{type(layers[0].experts).__name__}: expected as many experts of one size in every layer, got (experts, "
            f"weights of one) {sizes}; all slots have one size, so such models can only be simulated"
        )


@contextmanager
def routed_through(layers: Sequence[MoeLayer], call: ExpertsCall) -> Iterator[None]:
    """In the block, ``call`` computes the routed experts of every layer; afterwards the modules are as before."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, lambda experts, hidden, ids, weights: experts.trilane(hidden, ids, weights))
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.enter_context(_bound(layer.experts, partial(call, number)))
        yield


def computed_in_place(layers: Sequence[MoeLayer], store: ExpertStore) -> ExpertsCall:
    """Experts computed on the device of the hidden states, directly from the store: to probe a model before a run."""

    def call(layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        kernel, layout = layers[layer].experts, store.layouts[layer]
        count, top_k = ids.shape
        dtype = torch.result_type(hidden, weights)
        parts = torch.zeros(count * top_k, hidden.shape[1], dtype=dtype, device=hidden.device)
        for expert, choices in choices_of(ids.cpu().numpy()).items():
            views = layout.views(store.buffer(layer, expert).to(hidden.device))
            compute_into(parts, kernel, views, hidden, choices.to(hidden.device), weights.reshape(-1), top_k)
        return parts.view(count, top_k, -1).sum(1).to(hidden.dtype)

    return call


@contextmanager
def _bound(experts: Any, call: Callable[..., Tensor]) -> Iterator[None]:
    """In the block, the module is computed by ``call``, even an emptied one, whose ``forward`` refuses to run."""
    implementation, forward = experts.config._experts_implementation, vars(experts).pop("forward", None)
    experts.trilane, experts.config._experts_implementation = call, NAME
    try:
        yield
    finally:
        experts.config._experts_implementation = implementation
        del experts.trilane
        if forward is not None:
            experts.forward = forward
