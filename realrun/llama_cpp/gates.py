"""The routers of a GGUF model: their gate matrices, the experts that they choose, and rows of a trace made with them;
and models that llama.cpp runs with the input, output and choice of every router recorded.

The rule of choice is that of ggml-org/llama.cpp src/llama-graph.cpp, ``build_moe_ffn``, which names the tensors of the
graph for all families. Weights are read with the package ``gguf`` in whatever format the file has them; nothing else of
the file is read.

The forecasts are those of capture from PyTorch (``traces.capture.router_forecast``): ``gate@d`` applies the router of
layer l + d to the input of layer l's, ``residual@1`` adds the mean change between the two first (DALI, eq. 10-11).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from realrun.errors import RefusedError
from realrun.llama_cpp.abi import INSTALL, library_version
from realrun.llama_cpp.model import GraphTensor, LlamaContext, LlamaModel
from traces.capture.settings import CaptureError, CaptureSettings
from traces.layout import DECODE, PREFILL, ForecastKey
from traces.models.gguf_reader import GgufKeys, Tensor, read_gguf_header
from traces.models.shape import MOST_EXPERTS, ModelShape, ShapeError
from trilane.common.quoting import quoted

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


# --- routers as the model runs ----------------------------------------------------------------------------------------


Floats = NDArray[np.float32]
Scoring = Literal["softmax", "sigmoid", "logits", "sqrt_softplus"]

_GATE = re.compile(r"blk\.(\d{1,4})\.(ffn_gate_inp\.weight|ffn_gate_inp\.bias|exp_probs_b\.bias|exp_probs_b)")
_SCORING: Mapping[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "logits", 4: "sqrt_softplus"}  # expert_gating_func
_OF_FAMILY: Mapping[str, int] = {"ernie4_5-moe": 1, "deepseek4": 4}  # fixed in src/models of llama.cpp


@dataclass(frozen=True)
class Gate:
    """The router of one block, E experts on H elements; ``selection_bias`` changes the choice, not the weights."""

    weight: Floats  # [E, H]
    bias: Floats | None = None  # [E]
    selection_bias: Floats | None = None  # [E]

    def logits(self, inputs: Floats) -> Floats:
        """[N, E] of router inputs [N, H]."""
        return self.biased(inputs @ self.weight.T)

    def biased(self, products: Floats) -> Floats:
        """Products [N, E] of inputs and weights, with the bias where there is one."""
        return products if self.bias is None else products + self.bias


@dataclass(frozen=True)
class Gates:
    """All routers of a model, by the number of their block (the N of llama.cpp's ``ffn_moe_logits-N``)."""

    by_block: Mapping[int, Gate]
    top_k: int
    scoring: Scoring
    groups: int = 1  # of experts, of which ``groups_used`` are looked at
    groups_used: int = 1

    def ranked(self, block: int, inputs: Floats, count: int) -> NDArray[np.int64]:
        """The ``count`` first experts [N, count] of router inputs [N, H], best first; the first ``top_k`` are those
        that the router chooses. Of equal ones the lower number comes first."""
        gate = self.by_block[block]
        scores = scores_of(gate.logits(inputs), self.scoring)
        if gate.selection_bias is not None:
            scores = scores + gate.selection_bias
        order = np.argsort(-scores, axis=1, kind="stable")
        if self.groups > 1:
            left_out = np.take_along_axis(~self._in_used_groups(scores), order, axis=1)
            order = np.take_along_axis(order, np.argsort(left_out, axis=1, kind="stable"), axis=1)
        return order[:, :count]

    def _in_used_groups(self, scores: Floats) -> NDArray[np.bool_]:
        """Mask [N, E] of the experts in the groups with the largest sums of their two best scores."""
        by_group = scores.reshape(len(scores), self.groups, -1)
        sums = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
        used = np.argsort(-sums, axis=1, kind="stable")[:, : self.groups_used]
        chosen = np.zeros(sums.shape, bool)
        np.put_along_axis(chosen, used, True, axis=1)
        return np.repeat(chosen, by_group.shape[2], axis=1)


def read_gates(path: Path) -> Gates:
    """The gates of a model in a GGUF file, or in all parts of one; layers that predict several tokens are left out.

    Raises ShapeError for a file that is damaged or has no gates, RefusedError where the package gguf is missing.
    """
    header = read_gguf_header(path)
    keys = GgufKeys(header.metadata, str(path))
    experts, hidden = keys.count("expert_count", default=0), keys.count("embedding_length", least=1)
    tensors_by_block = _gate_tensors(header.tensors, keys.layers)
    if not tensors_by_block or not 1 <= experts <= MOST_EXPERTS:
        raise ShapeError(f"{path}: expected gates (blk.N.ffn_gate_inp) of 1 to {MOST_EXPERTS:,} experts, got none")
    by_block = {block: _gate(tensors, hidden, experts) for block, tensors in sorted(tensors_by_block.items())}
    groups = max(keys.count("expert_group_count", default=1), 1)
    if experts % groups:
        raise ShapeError(f"{path}: expected groups of equal size, got {experts} experts in {groups} groups")
    return Gates(
        by_block, keys.count("expert_used_count", least=1), _scoring(keys, by_block), groups,
        max(keys.count("expert_group_used_count", default=groups), 1),
    )


def _gate_tensors(tensors: Iterable[Tensor], blocks: int) -> Mapping[int, Mapping[str, Tensor]]:
    """Tensors of gates by block, and by name without ``.bias``."""
    gates: dict[int, dict[str, Tensor]] = {}
    for tensor in tensors:
        if (match := _GATE.fullmatch(tensor.name)) and int(match[1]) < blocks:
            gates.setdefault(int(match[1]), {})[match[2].removesuffix(".bias")] = tensor
    return gates


def scores_of(logits: Floats, scoring: Scoring) -> Floats:
    """Scores [N, E] by which a router chooses, from its logits [N, E]."""
    scores: Floats = logits
    if scoring == "sigmoid":
        scores = np.exp(-np.logaddexp(0, -logits), dtype=np.float32)
    if scoring == "sqrt_softplus":
        scores = np.sqrt(np.logaddexp(0, logits), dtype=np.float32)
    if scoring == "softmax":
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = np.divide(powers, powers.sum(axis=1, keepdims=True), dtype=np.float32)
    return scores


def _scoring(keys: GgufKeys, by_block: Mapping[int, Gate]) -> Scoring:
    """The scoring rule of the file's key, else of its family: sigmoid if the choice has a bias of its own."""
    biased = any(gate.selection_bias is not None for gate in by_block.values())
    usual = _OF_FAMILY.get(keys.architecture, 2 if biased else 1)
    number = keys.count("expert_gating_func", default=0) or usual
    if number not in _SCORING:
        raise ShapeError(f"{keys.where}: expert_gating_func: expected 1 to {len(_SCORING)}, got {number}")
    return _SCORING[number]


def _gate(tensors: Mapping[str, Tensor], hidden: int, experts: int) -> Gate:
    weight = tensors.get("ffn_gate_inp.weight")
    if weight is None:
        tensor = next(iter(tensors.values()))
        raise ShapeError(f"{tensor.file}: expected a gate matrix next to {quoted(tensor.name)}, there is none")
    biases = [
        _values(tensors[name], (experts,)) if name in tensors else None for name in ("ffn_gate_inp", "exp_probs_b")
    ]
    return Gate(_values(weight, (hidden, experts)), *biases)


def _values(tensor: Tensor, shape: tuple[int, ...]) -> Floats:
    """The weights of a tensor, rows first. Raises ShapeError for another shape, RefusedError without ``gguf``."""
    if tensor.shape != shape:
        raise ShapeError(
            f"{tensor.file}: {quoted(tensor.name)}: expected sizes {list(shape)}, those of the hidden states and the "
            f"experts, got {list(tensor.shape)}"
        )
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise RefusedError(
            f"gate matrices are read with the package gguf, which is not installed; {INSTALL}"
        ) from None
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        rows = np.frombuffer(file.read(tensor.size_bytes), np.uint8)
    try:
        values = dequantize(rows.reshape(*reversed(shape[1:]), -1), GGMLQuantizationType(tensor.type_number))
    except (NotImplementedError, ValueError):
        raise ShapeError(
            f"{tensor.file}: {quoted(tensor.name)} is in {tensor.type.name}, which the package gguf does not read"
        ) from None
    return np.ascontiguousarray(values, np.float32).reshape(*reversed(shape))


def routing_rows(routing: Routing) -> dict[str, NDArray[Any]]:
    """Ids and weights [N, L, k] by descending weight; equal weights stay in the router's order."""
    weights = np.stack([router.weights for router in routing.values()], axis=1).astype(np.float16)
    ids = np.stack([router.ids for router in routing.values()], axis=1).astype(np.int16)
    order = np.argsort(-weights, axis=-1, kind="stable")
    return {
        "topk_ids": np.take_along_axis(ids, order, axis=-1),
        "topk_weights": np.take_along_axis(weights, order, axis=-1),
    }


def score_rows(routing: Routing, gates: Gates) -> NDArray[np.float16]:
    """Probabilities of all experts [N, L, E]; of routers that choose by logits, their softmax."""
    rule: Scoring = "softmax" if gates.scoring == "logits" else gates.scoring
    logits = [gates.by_block[block].biased(router.logits) for block, router in routing.items()]
    return np.stack([scores_of(of_router, rule) for of_router in logits], axis=1).astype(np.float16)


@dataclass(frozen=True)
class GateForecasts:
    """Forecasts of ``count`` (m) experts a token; ``change`` [L - 1, H]: what residual@1 adds at each layer."""

    gates: Gates
    keys: Sequence[ForecastKey]
    count: int
    change: NDArray[np.float32] | None = None

    def rows(self, routing: Routing) -> dict[str, NDArray[np.int16]]:
        """Ids [N, L, m] by the tensors' names; -1 where no layer is that far ahead."""
        return {key.ids_name: self._ids(key, routing) for key in self.keys}

    def _ids(self, key: ForecastKey, routing: Routing) -> NDArray[np.int16]:
        blocks = list(routing)
        ids = np.full((len(routing[blocks[0]].ids), len(blocks), self.count), -1, np.int16)
        for at, target in enumerate(blocks[key.lookahead :]):
            seen = routing[blocks[at]].inputs
            if key.kind == "residual":
                assert self.change is not None
                seen = seen + self.change[at]
            ids[:, at] = self.gates.ranked(target, seen, self.count)
        return ids


def mean_change(passes: Iterable[Routing]) -> NDArray[np.float32]:
    """The mean change [L - 1, H] of the routers' inputs from each layer to the next, over calibration text."""
    total, tokens = np.zeros(()), 0
    for routing in passes:
        inputs = np.stack([router.inputs for router in routing.values()]).astype(np.float64)  # [L, N, H]
        total = total + np.diff(inputs, axis=0).sum(axis=1)
        tokens += inputs.shape[1]
    return np.asarray(total / tokens, np.float32)
