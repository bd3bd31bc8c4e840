"""A GGUF model that llama.cpp runs with its routing recorded: passes over prompts and what follows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realrun.llama_cpp.context import LlamaContext
from realrun.llama_cpp.library import library_version
from realrun.llama_cpp.model import LlamaModel
from realrun.llama_cpp.routing_observer import RoutingObserver
from realrun.llama_cpp.routing_rows import Routing
from traces.capture.settings import CaptureSettings
from traces.layout import DECODE, PREFILL
from traces.models.shape import ModelShape


@dataclass(frozen=True)
class RoutedPass:
    """One pass that has just run: ``tokens`` [N] of a sequence from position ``start`` on, and their routing."""

    tokens: Sequence[int]
    start: int
    phase: int
    routing: Routing


@dataclass(frozen=True)
class RoutedModel:
    """A model in memory with a context for one sequence; ``observer`` sees its routers."""

    model: LlamaModel
    context: LlamaContext
    observer: RoutingObserver
    settings: CaptureSettings

    def tokens_of(self, text: str) -> list[int]:
        """The token ids of a text. Raises RefusedError for a file without a vocabulary."""
        return [int(token) for token in self.model.tokens_of(text)]

    def passes(self, prompt: Sequence[int], sequence: int) -> Iterator[RoutedPass]:
        """The prompt, then one token after another; none of them ends the sequence. Raises CaptureError."""
        self.context.keep(0)
        tokens, start = list(prompt), 0
        for step in range(self.settings.generated_tokens + 1):
            self.context.decode(tokens, every_output=True)
            yield RoutedPass(tokens, start, DECODE if step else PREFILL, self.observer.take_pass(len(tokens)))
            start += len(tokens)
            tokens = [draw(self.context.logits(), self.settings, sequence, step)]

    def describe(self) -> dict[str, Any]:
        """For the provenance of a trace: what ran, and on which software."""
        return {
            "model": self.model.path.stem,
            "model_class": self.model.metadata("general.architecture") or "unknown",
            "versions": {**library_version(), "numpy": np.__version__},
        }


@contextmanager
def open_routed(
    path: Path, shape: ModelShape, settings: CaptureSettings, *, threads: int, gpu_layers: int
) -> Iterator[RoutedModel]:
    """Load a model. ``threads`` of the CPU; ``gpu_layers``: how many the GPU computes, -1 for all. Raises RefusedError.
    """
    observer, length = RoutingObserver(path, shape), settings.prompt_tokens + settings.generated_tokens
    with (
        LlamaModel(path, gpu_layers=gpu_layers) as model,
        LlamaContext(model, context=length, threads=threads, observer=observer) as context,
    ):
        yield RoutedModel(model, context, observer, settings)


def draw(logits: NDArray[np.float32], settings: CaptureSettings, sequence: int, step: int) -> int:
    """The next token; the draw depends on seed, sequence and step alone. Temperature 0 takes the likeliest."""
    if settings.temperature == 0:
        return int(logits.argmax())
    scaled = (logits.astype(np.float64) - float(logits.max())) / settings.temperature
    shares = np.exp(scaled).cumsum()
    point = np.random.default_rng((settings.seed, sequence, step)).random() * shares[-1]
    return min(int(np.searchsorted(shares, point)), len(logits) - 1)
