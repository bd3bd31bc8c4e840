"""The residual stream around each mixture after attention, and mixtures run again with other experts.

The partial pass of SMoE runs the next layer's attention and gate on the output of the resident experts alone.

A decoder layer that this serves computes r = x + attention(norm(x)), then r + mixture(norm'(r)). Its parts are found by
the names that most families share, and then tried on one prompt: run again, they must give what the model computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from traces.capture.layers import MoeLayer
from traces.capture.record import Hooks, LayerRecord, RouterRecorder
from traces.capture.settings import CaptureError

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm")
TOLERANCE = 1e-3  # of the norm; the same operations in the same order give no difference

# (own forward, hidden [N, H], ids [N, k], weights [N, k]) -> what the experts add up to, [N, H]
Experts: TypeAlias = Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderLayer:
    """The decoder layer around one mixture, and its parts."""

    path: str
    mixture: MoeLayer
    whole: nn.Module
    attention_norm: nn.Module
    attention: nn.Module
    mixture_norm: nn.Module


class ResidualStream(Hooks):
    """Keeps the post-attention residual [B, S, H] of every layer in the pass that runs."""

    def __init__(self, model: nn.Module, recorder: RouterRecorder, forecast: str) -> None:
        """``forecast`` names, in errors, what needs the stream. Raises CaptureError where parts have other names."""
        self.recorder, self.forecast = recorder, forecast
        self.parts = [_decoder_layer(model, mixture, forecast) for mixture in recorder.layers]
        self.residuals: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def _register(self) -> Iterator[Any]:
        for number, part in enumerate(self.parts):
            yield part.mixture_norm.register_forward_pre_hook(partial(self._keep_residual, number))
            yield part.whole.register_forward_hook(partial(self._keep_output, number))

    def after(self, number: int, experts: Experts) -> Tensor:
        """The stream [B, S, H] after a layer, had ``experts`` been its experts; shared experts, scaling and router are
        the model's own.
        """
        part, residual = self.parts[number], self.residuals[number]
        with self.recorder.muted(), _replaced(part.mixture.experts, experts):
            added = first_tensor(part.mixture.block.forward(part.mixture_norm.forward(residual)))
        return residual + added.view_as(residual)

    def check(self, records: list[LayerRecord]) -> None:
        """Raise CaptureError if a layer computed something else in the pass that just ran."""
        for number, (part, record) in enumerate(zip(self.parts, records, strict=True)):
            if not self._computes_the_same(number, record):
                raise CaptureError(
                    f"{part.path}: forecast {self.forecast} expects a layer that computes r + mixture(norm(r)), "
                    "this one gives another result; capture with --forecasts gate@1,residual@1"
                )

    def _computes_the_same(self, number: int, record: LayerRecord) -> bool:
        """True if a layer that is run again from its residual gives its recorded gate input and output."""
        try:
            seen = self.parts[number].mixture_norm.forward(self.residuals[number])
            again = self.after(number, lambda own, *call: own(*call))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # its parts are called in another way: several streams, a router with arguments of its own
        return alike(seen, record.gate_input) and alike(again, self._outputs[number])

    def _keep_residual(self, number: int, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.residuals[number] = args[0]

    def _keep_output(self, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._outputs[number] = first_tensor(output)


def alike(a: Tensor, b: Tensor) -> bool:
    """True if the elements of two tensors, of any shape, are equal up to rounding."""
    first, second = a.flatten().double(), b.flatten().double()
    return len(first) == len(second) and bool((first - second).norm() <= TOLERANCE * second.norm())


def first_tensor(output: Any) -> Tensor:
    """The tensor that a module returned, alone or as the first of several."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _decoder_layer(model: nn.Module, mixture: MoeLayer, forecast: str) -> DecoderLayer:
    path = mixture.path.rpartition(".")[0]
    whole = model.get_submodule(path)
    children = dict(whole.named_children())
    missing = [name for name in PARTS if name not in children]
    if missing:
        raise CaptureError(
            f"{path}: forecast {forecast} expects {', '.join(PARTS)} in a decoder layer, found {sorted(children)}; "
            "capture with --forecasts gate@1,residual@1"
        )
    return DecoderLayer(path, mixture, whole, *(children[name] for name in PARTS))


@contextmanager
def _replaced(module: nn.Module, experts: Experts) -> Iterator[None]:
    """The experts module computes ``experts`` within the block; ``forward`` is shadowed on the instance."""
    own, shadow = module.forward, vars(module).get("forward")

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts(own, hidden, ids, weights)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if shadow is not None:
            module.forward = shadow


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
        resident = self._resident[number].to(ids.device)[ids]
        return own(hidden, ids, torch.where(resident, weights, 0))


def gate_input_after(part: DecoderLayer, stream: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The gate input [N, H] of a layer, were ``stream`` [B, S, H] the layer's input; the other arguments of its
    attention are ``args`` and ``kwargs``, whose cache stays as it is.
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
