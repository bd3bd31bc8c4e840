"""Records of router inputs and choices in one forward pass, taken by hooks that change nothing, and the probabilities
that they stand for.

Ids and weights are what the experts were called with, never recomputed from logits: correction biases, group limits and
custom gates make the two differ in half of the families, and routers return them in different orders. The function of a
family's gate is determined from a pass (``scoring_rule``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from traces.capture.layers import MoeLayer
from traces.capture.settings import CaptureError

# How logits [N, E] become what the chosen weights are proportional to.
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
}
TOLERANCE = 0.02  # bfloat16 weights are within 0.4 %; the wrong function is off by much more


@dataclass
class LayerRecord:
    """One MoE layer in one pass over N tokens."""

    gate_input: Tensor  # [N, H], input of the router
    logits: Tensor  # [N, E], its output for all experts: logits, or probabilities
    batched: bool  # whether the router was called with [B, S, H]
    extra_args: tuple[Any, ...] = ()  # its other arguments
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    ids: Tensor | None = None  # [N, k] int64, in the order of the experts' call
    weights: Tensor | None = None  # [N, k]


class Hooks(ABC):
    """Base of what watches a model through hooks. Use as a context manager: on exit, they are removed."""

    _handles: tuple[Any, ...] = ()

    @abstractmethod
    def _register(self) -> Iterator[Any]:
        """Put the hooks on; yields their handles."""

    def __enter__(self) -> Self:
        self._handles = tuple(self._register())
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()


class RouterRecorder(Hooks):
    """Hooks on all MoE layers of a model."""

    def __init__(self, layers: list[MoeLayer]) -> None:
        self.layers = layers
        self._records: dict[int, LayerRecord] = {}
        self._muted = False

    def _register(self) -> Iterator[Any]:
        for number, layer in enumerate(self.layers):
            yield layer.router.register_forward_hook(partial(self._keep_routing, number), with_kwargs=True)
            yield layer.experts.register_forward_pre_hook(partial(self._keep_choice, number), with_kwargs=True)

    def take(self) -> list[LayerRecord]:
        """The records of the pass that just ended, in layer order. Raises CaptureError if a layer has none."""
        records, self._records = self._records, {}
        silent = [layer.path for n, layer in enumerate(self.layers) if n not in records or records[n].ids is None]
        if silent:
            raise CaptureError(
                f"expected router and experts of every layer to run as modules, but {silent[0]} did not; "
                "load the model without fused kernels (use_kernels=False) and without quantised expert blocks"
            )
        return [records[n] for n in range(len(self.layers))]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Within the block, routers and experts may be called without being recorded."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def _keep_routing(
        self, number: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._muted:
            return
        hidden, rest, named = gate_input(args, kwargs)
        logits = find_logits(output, self.layers[number].experts_count, self.layers[number].path)
        flat = hidden.detach().reshape(-1, hidden.shape[-1]).clone()
        self._records[number] = LayerRecord(flat, logits, hidden.ndim == 3, rest, named)

    def _keep_choice(self, number: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._muted:
            return
        values = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        ids = [v for v in values if not v.is_floating_point()]
        weights = [v for v in values[1:] if v.is_floating_point()]
        if len(ids) != 1 or len(weights) != 1 or ids[0].shape != weights[0].shape or number not in self._records:
            raise CaptureError(
                f"{self.layers[number].path}: expected the experts to be called with (hidden states, ids, weights) "
                f"after their router, got {[tuple(v.shape) for v in values]}; this family is not supported"
            )
        self._records[number].ids = ids[0].detach().clone()
        self._records[number].weights = weights[0].detach().clone()


def reading(record: LayerRecord, tokens: Tensor) -> LayerRecord:
    """The record with ``tokens`` [B, S] where its router was called with those of another pass (DeepSeek-V4 chooses by
    them in some layers). No router of the library takes other integers."""

    def now(value: Any) -> Any:
        return tokens if isinstance(value, Tensor) and not value.is_floating_point() else value

    args, kwargs = tuple(map(now, record.extra_args)), {name: now(v) for name, v in record.extra_kwargs.items()}
    return replace(record, extra_args=args, extra_kwargs=kwargs)


def gate_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Split a router's call into the hidden states and everything else."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {k: v for k, v in kwargs.items() if k != name}


def find_logits(output: Any, experts: int, where: str) -> Tensor:
    """The scores of all experts [N, E] in the output of a router, at any position. Raises CaptureError.

    Where it has a class more than experts, for skipping the mixture (Zaya: a softmax over all), they are probabilities.
    """
    values = output if isinstance(output, tuple) else (output,)
    floats = [v.detach() for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    for value in floats:
        if value.shape[-1] == experts:
            return value.reshape(-1, experts).clone()
    for value in floats:
        if value.shape[-1] == experts + 1:
            return value.softmax(-1)[..., :experts].reshape(-1, experts)
    kinds = [f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__ for v in values]
    raise CaptureError(f"{where}: expected the router to return a tensor [tokens, {experts}], got {kinds}")


def find_ids(output: Any) -> Tensor | None:
    """The chosen ids [N, k] in the output of a router; None where the block, not the router, chooses."""
    values = output if isinstance(output, tuple) else (output,)
    for value in values:
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
            return value.detach().reshape(-1, value.shape[-1])
    return None


def scoring_rule(records: list[LayerRecord]) -> tuple[str, bool]:
    """(name in RULES, certain): the function under which the weights of the first layer are proportional to scores.

    Where none fits (sparse mixers, capped or custom gates) it is softmax, and not certain.
    """
    record = records[0]
    assert record.ids is not None
    assert record.weights is not None
    kept = record.weights.sum(-1) != 0  # without tokens that skip the mixture
    logits, ids, weights = record.logits[kept].float(), record.ids[kept], record.weights[kept].float()
    misfits = {name: _misfit(name, logits, ids, weights) for name in RULES}
    best = min(misfits, key=lambda name: misfits[name])
    return (best, True) if misfits[best] <= TOLERANCE else ("softmax", False)


def probabilities(logits: Tensor, rule: str) -> Tensor:
    """Router probabilities [N, E] in float32."""
    return RULES[rule](logits.float())


def _misfit(rule: str, logits: Tensor, ids: Tensor, weights: Tensor) -> float:
    """Largest relative deviation of weight / score within a token (or, with one expert a token, between tokens)."""
    if rule == "identity" and not bool(((logits >= 0) & (logits <= 1)).all()):
        return float("inf")
    ratio = weights / RULES[rule](logits).gather(1, ids).clamp_min(1e-30)
    mean = ratio.mean(1, keepdim=True) if ids.shape[1] > 1 else ratio.mean()
    return float((ratio / mean - 1).abs().max().nan_to_num(torch.inf))
