"""A model for replays whose decode steps are recorded graphs: one for each layer and piece, batch and padded context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from realrun.machine.cuda_graphs import CudaGraphs
from realrun.machine.lanes import Machine
from realrun.replay.model import Chosen, ReplayModel
from realrun.replay.step_places import StepPlaces, places_of
from traces.models.shape import ModelShape

if TYPE_CHECKING:
    from realrun.machine.cuda_lanes import CudaLanes

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
