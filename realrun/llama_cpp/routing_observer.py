"""The routing of one pass of llama.cpp: what every router saw, gave and chose, from the tensors of the graph.

The names are those of ``build_moe_ffn`` (ggml-org/llama.cpp, src/llama-graph.cpp), which its families share.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realrun.llama_cpp.tensor_callback import GraphTensor
from traces.capture.settings import CaptureError
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
            found = next((pieces[name] for name in names if name in pieces), [np.empty(0)])
            values = np.concatenate([piece.ravel() for piece in found])  # token by token in all of them
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
