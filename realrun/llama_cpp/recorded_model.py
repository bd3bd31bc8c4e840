"""GGUF models that llama.cpp runs with their routing recorded: the input, output and choice of every router.

Tensors of the graph have the names of ``build_moe_ffn`` (ggml-org/llama.cpp, src/llama-graph.cpp), which its families
share.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realrun.llama_cpp.abi import library_version
from realrun.llama_cpp.model import GraphTensor, LlamaContext, LlamaModel
from traces.capture.settings import CaptureError, CaptureSettings
from traces.layout import DECODE, PREFILL
from traces.models.shape import ModelShape

_NAME = re.compile(r"ffn_moe_(logits|topk|weights|weights_softmax|weights_norm|weights_scaled)-(\d+)")
_WEIGHTS = ("weights_scaled", "weights_norm", "weights_softmax", "weights")  # the last of a graph comes first

Pieces = Mapping[str, Sequence[NDArray[Any]]]  # of one block, by kind: one array for each piece of a pass


@dataclass(frozen=True)
class BlockRouting:
    """One router in one pass over N tokens, with E experts of which a token gets k."""

    inputs: NDArray[np.float32]  # [N, H]
    logits: NDArray[np.float32]  # [N, E], without the router's bias: the sum has no name of its own in gpt-oss
    ids: NDArray[np.int32]  # [N, k], in the router's order
    weights: NDArray[np.float32]  # [N, k], that the experts' outputs are multiplied with


Routing = Mapping[int, BlockRouting]  # by block, in their order


class RoutingObserver:
    """Keeps the tensors of the routers of ``shape`` until ``take_pass``; ``where`` names the model in errors."""

    def __init__(self, where: Path, shape: ModelShape) -> None:
        self._where, self._shape = where, shape
        self._kept: dict[int, dict[str, list[NDArray[Any]]]] = defaultdict(lambda: defaultdict(list))

    def wants(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def take(self, tensor: GraphTensor) -> None:
        match = _NAME.fullmatch(tensor.name)
        assert match is not None
        kept = self._kept[int(match[2])]
        kept[match[1]].append(tensor.values())
        if match[1] == "logits":
            kept["inputs"].append(tensor.source(1).values())

    def take_pass(self, tokens: int) -> dict[int, BlockRouting]:
        """The routing of the pass that just ended, over ``tokens``, by block, in their order.

        Raises CaptureError for a graph without one of the tensors, with other sizes, or with other routers.
        """
        kept, self._kept = self._kept, defaultdict(lambda: defaultdict(list))
        routing = {block: self._routing(block, pieces, tokens) for block, pieces in sorted(kept.items())}
        if tuple(routing) != self._shape.expert_blocks:
            raise CaptureError(
                f"{self._where}: expected routers in blocks {list(self._shape.expert_blocks)}, llama.cpp's graph has "
                f"ffn_moe_logits and ffn_moe_topk in {list(routing)}; routing of this family is not supported"
            )
        return routing

    def _routing(self, block: int, pieces: Pieces, tokens: int) -> BlockRouting:
        def last(names: Sequence[str], width: int) -> NDArray[Any]:
            last_pieces = next((pieces[name] for name in names if name in pieces), [np.empty(0)])
            values = np.concatenate([piece.ravel() for piece in last_pieces])  # token by token in all of them
            if values.size != tokens * width:
                raise CaptureError(
                    f"{self._where}: expected ffn_moe_{names[-1]}-{block} of {tokens} tokens with {width} elements in "
                    f"llama.cpp's graph, found {values.size} elements; routing of this family is not supported"
                )
            return values.reshape(tokens, width)

        return BlockRouting(
            inputs=last(["inputs"], self._shape.hidden),
            logits=last(["logits"], self._shape.experts),
            ids=last(["topk"], self._shape.top_k),
            weights=last(_WEIGHTS, self._shape.top_k),
        )


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
