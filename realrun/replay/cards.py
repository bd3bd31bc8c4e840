"""The steps of a replay on one GPU or several, each with a block of layers (twin of ``sim.timeline.cards``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise

from realrun.execution.cards import Boundary, rows_of, running
from realrun.execution.layer_execution import LayerSizes
from realrun.machine.lanes import Completion
from realrun.replay.replayed_layers import ReplayedLayers
from realrun.replay.step_routing import StepRouting
from sim.runs.demand import StepDemand
from sim.runs.spans import Row
from traces.batches import StepRows


class CardsReplay:
    """Plays a run step by step, one GPU at a time. ``sizes``: of the largest step."""

    def __init__(self, cards: Sequence[ReplayedLayers], sizes: LayerSizes) -> None:
        self._cards = cards
        self._executors = [card.executor for card in cards]
        self._boundaries = [Boundary(*pair, sizes) for pair in pairwise(self._executors)]
        self._first_with = {id(card.model): card for card in reversed(cards)}.values()  # GPUs may share a model

    def running(self) -> AbstractContextManager[None]:
        """See ``realrun.execution.cards.running``."""
        return running(self._executors)

    def step(self, demands: Sequence[StepDemand], rows: StepRows, routings: Sequence[StepRouting]) -> None:
        """Play one forward pass. ``demands``: those of each GPU, with its layers alone; ``routings``: the routing of
        the whole model, on each."""
        for card, demand, routing in zip(self._cards, demands, routings, strict=True):
            card.begin_step(demand, routing)
        for card in self._first_with:
            card.machine.gpu.submit(partial(card.model.begin_step, rows.tokens, rows.context))
        self._cards[0].machine.select()
        before: ReplayedLayers | None = None
        for number, card in enumerate(self._cards):
            entered = (self._cross(number),) if number else ()
            for layer in range(card.block.layers):
                launched = card.launch(layer, () if layer else entered)
                if before is not None:
                    before.executor.end_layer()  # of the layer before, while this one's attention runs
                card.play(launched)
                before = card
        self._cards[-1].play_head()
        for card in self._cards:
            card.executor.end_step()

    def _cross(self, number: int) -> Completion:
        """Hand over to GPU ``number`` from the one before it."""
        card, following, boundary = self._cards[number - 1], self._cards[number], self._boundaries[number - 1]
        there = boundary.cross(card.hidden, card.summed, card.block.layers - 1, card.tokens)
        following.enter(boundary.arrived[: card.tokens])
        return there

    def rows(self) -> list[Row]:
        """The spans of all GPUs."""
        return rows_of(self._executors, [card.block for card in self._cards])
