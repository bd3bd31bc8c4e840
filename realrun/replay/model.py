"""A model without its routed experts: real kernels of the real shapes, with random weights instead of a checkpoint.

Its decode steps may be recorded graphs: one for each layer and piece, batch and padded context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from realrun.errors import RefusedError
from realrun.machine.cuda_streams import CudaGraphs
from realrun.machine.lanes import Machine
from realrun.replay.attention import AttentionPart, RandomWeights, Rotary, StepPlaces, normalised, places_of
from traces.capture.router_forecast import Estimator
from traces.models.shape import ModelShape

if TYPE_CHECKING:
    from realrun.machine.cuda_lanes import CudaLanes


Chosen = tuple[Tensor, Tensor]  # ids int64 and weights float32, both [T, k]

ESTIMATOR_WIDTH = 0.65  # x hidden; the perceptron is 4 x as wide (for the source see sim.costs.roofline_costs)


class FeedForward:
    """A dense network: gate, up, SiLU, multiplication, down; 5 kernels."""

    def __init__(self, hidden: int, width: int, weights: RandomWeights) -> None:
        self._gate, self._up = weights.matrix(width, hidden), weights.matrix(width, hidden)
        self._down = weights.matrix(hidden, width)

    def __call__(self, normed: Tensor) -> Tensor:
        """Apply it: [T, H] -> [T, H]."""
        inner = functional.silu(functional.linear(normed, self._gate)) * functional.linear(normed, self._up)
        return functional.linear(inner, self._down)


class ReplayModel:
    """The kernels of a model. No method except the constructor waits for the device or reads a clock.

    All methods are work of one lane, including ``begin_step``, which applies to the calls after it. They may be called
    from any thread, one at a time, under ``torch.inference_mode()``. T is the number of tokens of the step, sequence by
    sequence; hidden states [T, H] have ``dtype``; ``layer`` counts the MoE layers. Every layer has its own weights and
    KV cache. A context that was never computed is random, so a decode step can be timed without its prefill.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        batch: int,
        context: int,
        estimator: bool = False,
        seed: int = 0,
    ) -> None:
        """Room for ``batch`` sequences of ``context`` tokens. Raises RefusedError for sizes without a model."""
        if batch < 1 or context < 1:
            raise RefusedError(f"replay of {shape.name}: expected batch and context >= 1, got {batch} and {context}")
        weights = RandomWeights(torch.device(device), dtype, seed)
        self.shape, self._weights, self._batch, self._context = shape, weights, batch, context
        self._attention = [AttentionPart(shape, batch, context, weights) for _ in range(shape.layers)]
        self._rotary = Rotary(self._attention[0].turning_width, context, weights)
        self._dense_ffn = [FeedForward(shape.hidden, shape.dense_width, weights) for _ in range(shape.dense_layers)]
        with_shared = shape.moe_layers if shape.shared_width else 0
        self._shared = [FeedForward(shape.hidden, shape.shared_width, weights) for _ in range(with_shared)]
        self._gates = [weights.matrix(shape.experts, shape.hidden) for _ in range(shape.moe_layers)]
        self._embedding = weights.matrix(max(shape.vocab, 1), shape.hidden)
        self._head = self._embedding if shape.tied_embeddings else weights.matrix(max(shape.vocab, 1), shape.hidden)
        self._norm = weights.ones(shape.hidden)
        self._estimator = _estimator(shape, weights) if estimator else None
        self.begin_step((1,), (0,))

    def begin_step(self, tokens: tuple[int, ...], context: tuple[int, ...]) -> None:
        """Begin a step with ``tokens[i]`` >= 1 new tokens of sequence i after ``context[i]`` earlier ones.

        It may have fewer sequences than the batch: the first ones. Raises RefusedError if the cache is too small.
        """
        sharing = self._attention[0].sharing
        self._places = places_of(tokens, context, sharing, self._batch, self._context, self._weights.device)
        self._turn = self._rotary.at(self._places.positions)

    def embed(self) -> Tensor:
        """Hidden states [T, H] for the first layer; the id of a token is its row in the cache."""
        return functional.embedding(self._places.cells % len(self._embedding), self._embedding)

    def dense(self, hidden: Tensor) -> Tensor:
        """Apply all dense layers, which come first: [T, H] -> [T, H]."""
        for part, feed_forward in zip(self._attention, self._dense_ffn, strict=False):
            residual, normed = part(hidden, self._places, self._rotary, self._turn)
            hidden = residual + feed_forward(normed)
        return hidden

    def dense_ffn(self, normed: Tensor) -> Tensor:
        """Apply the feed-forward part of the first dense layer. Raises RefusedError if there is none."""
        if not self._dense_ffn:
            raise RefusedError(f"replay of {self.shape.name}: expected a dense layer, the model has none")
        return self._dense_ffn[0](normed)

    def attention(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, normed), both [T, H]: what the experts' result is added to, and the experts' input."""
        part = self._attention[self.shape.dense_layers + layer]
        return part(hidden, self._places, self._rotary, self._turn)

    def gate(self, layer: int, normed: Tensor) -> Chosen:
        """Product, softmax, top-k (top-k before softmax if the weights sum to 1)."""
        logits = functional.linear(normed, self._gates[layer])
        if self.shape.norm_topk:
            best, ids = logits.topk(self.shape.top_k)
            return ids, best.softmax(-1, dtype=torch.float32)
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.shape.top_k)
        return ids, weights

    def speculate(self, layer: int, normed: Tensor) -> Chosen:
        """The next layer's gate on this layer's input; for the last layer, the first gate, so that it can be timed."""
        return self.gate((layer + 1) % self.shape.moe_layers, normed)

    def estimate(self, layer: int, normed: Tensor) -> Tensor:
        """Ids [T, k] from the learnt estimator's network for the next layer (for the last layer, as in layer 0).

        Raises RefusedError if the model was built without an estimator.
        """
        if self._estimator is None:
            raise RefusedError(f"replay of {self.shape.name}: expected a model built with estimator=True")
        logits: Tensor = self._estimator(normed, layer % len(self._estimator.position))
        return logits.topk(self.shape.top_k).indices

    def shared(self, layer: int, normed: Tensor) -> Tensor | None:
        """The output of the layer's shared experts [T, H]; None if the model has none."""
        return self._shared[layer](normed) if self._shared else None

    def combine(self, parts: Tensor, top_k: int, shared: Tensor | None, residual: Tensor) -> Tensor:
        """The layer's output [T, H] from the weighted results of its routed experts, ``parts`` [T * k, H]."""
        routed = parts.view(len(residual), top_k, -1).sum(1).to(residual.dtype)
        return (routed if shared is None else routed + shared) + residual

    def head(self, hidden: Tensor, *, every: bool = False) -> Tensor:
        """Next tokens int64 [sequences]: norm, product and argmax for the last row of ``hidden`` of every sequence;
        ``every``: of all rows, [T], as in a step that verifies drafts."""
        rows = hidden if every else torch.cat([hidden[row : row + 1] for row in self._places.last_rows])
        return functional.linear(normalised(rows, self._norm), self._head).argmax(-1)


def _estimator(shape: ModelShape, weights: RandomWeights) -> Estimator:
    """One network for all layers except the last, with random weights."""
    width = round(ESTIMATOR_WIDTH * shape.hidden)
    with torch.device("meta"):
        network = Estimator(max(shape.moe_layers - 1, 1), shape.hidden, shape.experts, width, 4 * width)
    drawn = {name: weights.matrix(*value.shape) for name, value in network.state_dict().items()}
    network.load_state_dict(drawn, assign=True)
    return network.requires_grad_(False)


T = TypeVar("T")
Turn: TypeAlias = tuple[Tensor, Tensor]

KEYS = 64  # a recorded step attends to a multiple of this number of keys, of which future ones are masked


@dataclass(frozen=True)
class FixedStep:
    """The inputs of recorded attention at fixed addresses: places with a mask, and rotation."""

    places: StepPlaces
    turn: Turn

    def become(self, places: StepPlaces, turn: Turn) -> None:
        """Copy another step's values."""
        for mine, its in zip(_tensors(self.places, self.turn), _tensors(places, turn), strict=True):
            mine.copy_(its)


class RecordedModel(ReplayModel):
    """A ``ReplayModel`` that records each piece of a decode step on first use, and replays it from then on.

    Prefill, embedding and head are launched kernel by kernel. Dense layers, attention, gate, forecasts and shared
    experts are separate graphs, so that each has a span. A graph's input is copied to a fixed buffer unless it is there
    already. Normed hidden states have two such buffers, used in turn by layer: those of a layer may still be on their
    way to the CPU when the next layer's attention runs, but not when that of the layer after it does.
    """

    def __init__(self, shape: ModelShape, graphs: CudaGraphs, *, batch: int, **given: Any) -> None:
        self.graphs = graphs
        self._graphs: dict[tuple[str | int, ...], Callable[[], Any]] = {}
        self._fixed: dict[tuple[int, int], FixedStep] = {}
        self._step: tuple[int, int] | None = None  # sequences and keys of a decode step; None: not recorded
        super().__init__(shape, batch=batch, **given)
        empty = torch.zeros(batch, shape.hidden, device=self._weights.device, dtype=self._weights.dtype)
        self._entering, self._normed = empty, (empty.clone(), empty.clone())

    def begin_step(self, tokens: tuple[int, ...], context: tuple[int, ...]) -> None:
        """As in ``ReplayModel``; the inputs of a decode step go to fixed addresses."""
        self._step = None
        if max(tokens) > 1 or not tokens:
            return super().begin_step(tokens, context)
        keys = min(-(-(max(context) + 1) // KEYS) * KEYS, self._context)
        sharing, device = self._attention[0].sharing, self._weights.device
        places = places_of(tokens, context, sharing, self._batch, self._context, device, least_keys=keys)
        turn = self._rotary.at(places.positions)
        self._step = len(tokens), keys
        fixed = self._fixed.setdefault(self._step, FixedStep(places, turn))
        fixed.become(places, turn)
        self._places, self._turn = fixed.places, fixed.turn
        return None

    def dense(self, hidden: Tensor) -> Tensor:
        if not self.shape.dense_layers:
            return hidden
        return self._replayed(("dense", *self._sizes()), hidden, self._entering, super().dense)

    def attention(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        attend, into = super().attention, self._normed[layer % 2] if self._step else None

        def attention(hidden: Tensor) -> tuple[Tensor, Tensor]:
            residual, normed = attend(layer, hidden)
            return residual, normed if into is None else into[: len(normed)].copy_(normed)

        return self._replayed(("attention", layer, *self._sizes()), hidden, self._entering, attention)

    def gate(self, layer: int, normed: Tensor) -> Chosen:
        return self._of_normed("gate", layer, normed, super().gate)

    def speculate(self, layer: int, normed: Tensor) -> Chosen:
        return self._of_normed("speculate", layer, normed, super().speculate)

    def estimate(self, layer: int, normed: Tensor) -> Tensor:
        return self._of_normed("estimate", layer, normed, super().estimate)

    def shared(self, layer: int, normed: Tensor) -> Tensor | None:
        return self._of_normed("shared", layer, normed, super().shared)

    def record_step(self, batch: int, context: int) -> None:
        """Record everything that a decode step of ``batch`` sequences and ``context`` keys may replay."""
        self.begin_step((1,) * batch, (context - 1,) * batch)
        hidden = self.dense(self.embed())
        for layer in range(self.shape.moe_layers):
            _, normed = self.attention(layer, hidden)
            self.gate(layer, normed)
            self.speculate(layer, normed)
            self.shared(layer, normed)
            if self._estimator is not None:
                self.estimate(layer, normed)

    def _of_normed(self, kind: str, layer: int, normed: Tensor, compute: Callable[[int, Tensor], T]) -> T:
        """A piece whose input is a layer's normed hidden states."""
        key = (kind, layer, len(normed))
        return self._replayed(key, normed, self._normed[layer % 2], lambda given: compute(layer, given))

    def _replayed(
        self, key: tuple[str | int, ...], given: Tensor, fixed: Tensor, compute: Callable[[Tensor], T]
    ) -> T:
        """``compute(given)``, from a graph if it is part of a decode step."""
        if self._step is None:
            return compute(given)
        place = fixed[: len(given)]
        if given.data_ptr() != place.data_ptr():
            place.copy_(given)
        if key not in self._graphs:
            self._graphs[key] = self._record(str(key[0]), lambda: compute(place))
        return cast(T, self._graphs[key]())

    def _record(self, kind: str, work: Callable[[], T]) -> Callable[[], T]:
        """Record a piece; the model's methods that it calls become part of its graph."""
        step, self._step = self._step, None
        try:
            return self.graphs.record(kind, work)
        finally:
            self._step = step

    def _sizes(self) -> tuple[int, ...]:
        return self._step or ()


def model_on(machine: Machine, shape: ModelShape, **given: Any) -> ReplayModel:
    """The model on a machine, in the runtime of its settings. Raises what ``ReplayModel`` raises."""
    if machine.kind == "cuda" and cast("CudaLanes", machine).settings.runtime == "graphs":
        return RecordedModel(shape, CudaGraphs(), device=machine.device, **given)
    return ReplayModel(shape, device=machine.device, **given)


def _tensors(places: StepPlaces, turn: Turn) -> list[Tensor]:
    [block] = places.blocks
    assert block.mask is not None
    return [places.positions, places.cells, block.mask, *turn]
