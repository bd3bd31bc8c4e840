"""The residual stream around each mixture after attention, and mixtures run again with other experts.

A decoder layer that this serves computes r = x + attention(norm(x)), then r + mixture(norm'(r)). Its parts are found by
the names that most families share, and then tried on one prompt: run again, they must give what the model computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

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
        """Whether a layer that is run again from its residual gives its recorded gate input and output."""
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
    """Whether the elements of two tensors, of any shape, are equal up to rounding."""
    first, second = a.flatten().double(), b.flatten().double()
    return len(first) == len(second) and bool((first - second).norm() <= TOLERANCE * second.norm())


def first_tensor(output: Any) -> Tensor:
    """The tensor that a module returned, alone or as the first of several."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


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
