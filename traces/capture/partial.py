"""Partial computation (SMoE): the next layer's attention and gate on the output of the resident experts alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from traces.capture.record import Hooks, LayerRecord
from traces.capture.residual_stream import DecoderLayer, ResidualStream, alike, first_tensor
from traces.capture.settings import CaptureError


class PartialPass(Hooks):
    """Runs every layer's attention once more, just before the model does, on the partial state of the layer before:

    r_l + shared(h_l) + the sum of g_e * E_e(h_l) over chosen experts that are ``resident`` [L, E]; nothing is
    renormalised (SMoE, Section IV-C, does not say; docs/readings.md). It attends to a copy of the key-value cache, so
    that what it writes there is lost.
    """

    def __init__(self, stream: ResidualStream, resident: Tensor) -> None:
        """Raises CaptureError where a dense layer lies between two mixtures."""
        self._stream, self._resident = stream, resident
        self._states: dict[int, Tensor] = {}
        for one, other in zip(stream.parts, stream.parts[1:], strict=False):
            _check_adjacent(one.path, other.path)

    def _register(self) -> Iterator[Any]:
        for number, part in list(enumerate(self._stream.parts))[1:]:
            yield part.attention.register_forward_pre_hook(partial(self._run_ahead_of, number), with_kwargs=True)

    def state(self, number: int) -> Tensor:
        """The gate input [N, H] of layer ``number`` + 1 that layer ``number`` expected in the pass that just ran."""
        return self._states[number]

    def check(self, records: list[LayerRecord]) -> None:
        """After a pass with all experts resident: raise CaptureError unless every state is what the gate then saw."""
        for number, record in enumerate(records[1:]):
            if not alike(self.state(number), record.gate_input):
                raise CaptureError(
                    f"{self._stream.parts[number + 1].path}: forecast partial@1 expects attention that can run again "
                    "with the same result, this one gives another; capture with --forecasts gate@1,residual@1"
                )

    def _run_ahead_of(self, number: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = self._stream.after(number - 1, partial(self._resident_only, number - 1))
        self._states[number - 1] = gate_input_after(self._stream.parts[number], state, args, kwargs)

    def _resident_only(
        self, number: int, own: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        here = self._resident[number].to(ids.device)[ids]
        return own(hidden, ids, torch.where(here, weights, 0))


def gate_input_after(part: DecoderLayer, stream: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the gate of a layer would see [N, H], were ``stream`` [B, S, H] the layer's input; the other arguments of
    its attention are ``args`` and ``kwargs``, whose cache stays as it is.
    """
    args, kwargs = _on_other_input(part.attention_norm.forward(stream), args, kwargs)
    attended = stream + first_tensor(part.attention.forward(*args, **kwargs))
    seen: Tensor = part.mixture_norm.forward(attended)
    return seen.flatten(0, -2)


def _on_other_input(
    hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention call, with ``hidden`` for its hidden states and a copy of its cache."""
    named = {name: _shadow(value) for name, value in kwargs.items()}
    if args:
        return (hidden, *map(_shadow, args[1:])), named
    return (), {**named, "hidden_states": hidden}


def _shadow(value: Any) -> Any:
    """A cache whose layers may grow independently of the original: they replace tensors and never write into them."""
    if not isinstance(value, Cache):
        return value
    shadow = copy.copy(value)
    shadow.layers = [copy.copy(layer) for layer in value.layers]
    return shadow


def _check_adjacent(one: str, other: str) -> None:
    first, second = (path.rpartition(".")[2] for path in (one, other))
    if not (first.isdigit() and second.isdigit() and int(second) == int(first) + 1):
        raise CaptureError(
            f"{other}: forecast partial@1 expects a mixture in the decoder layer before, the last one is in {one}; "
            "capture without it: --forecasts gate@1,residual@1,quasi_hidden@1"
        )
