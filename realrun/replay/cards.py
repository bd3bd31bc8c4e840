"""The steps of a replay on one GPU or several, each with a block of layers (twin of ``sim.timeline.cards``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from realrun.execution.layer_execution import LayerSizes
from realrun.machine.lanes import Completion
from realrun.replay.replayed_layers import ReplayedLayers
from realrun.replay.step_routing import StepRouting
from sim.runs.cards import rows_of_card
from sim.runs.demand import StepDemand
from sim.runs.spans import Row
from traces.batches import StepRows


class Boundary:
    """The way of hidden states from one GPU to the next: down the link of the one, up that of the other."""

    def __init__(self, card: ReplayedLayers, following: ReplayedLayers, sizes: LayerSizes) -> None:
        self._card, self._following, places = card, following, (sizes.tokens, sizes.hidden)
        self._on_host = card.machine.host_tensor(places, sizes.dtype)
        self._arrived = following.machine.gpu_tensor(places, sizes.dtype)

    def cross(self) -> Completion:
        """Hand over the output of the last layer of the one, which is the input of the other when this has ended."""
        card, following, tokens = self._card, self._following, self._card.tokens
        sent, arrived = self._on_host[:tokens], self._arrived[:tokens]
        down = card.machine.d2h.submit(lambda: sent.copy_(card.hidden(), non_blocking=True), (card.summed,))
        card.recorder.add("d2h", down, "hand_over", card.block.layers - 1, -1, tokens, sent.nbytes)
        down.wait()
        up = following.executor.copying.send_result(lambda: arrived.copy_(sent, non_blocking=True))
        following.recorder.add("h2d", up, "hand_over", 0, -1, tokens, sent.nbytes)
        following.enter(arrived)
        return up


class CardsReplay:
    """Plays a run step by step, one GPU at a time. ``sizes``: of the largest step."""

    def __init__(self, cards: Sequence[ReplayedLayers], sizes: LayerSizes) -> None:
        self._cards = cards
        self._boundaries = [Boundary(*pair, sizes) for pair in pairwise(cards)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """A run: see ``Executor.running``. Its clock starts when the residents of all GPUs are in their slots."""
        with ExitStack() as stack:
            for card in self._cards:
                stack.enter_context(card.executor.running())
            for card in self._cards:
                card.recorder.zero_ns = self._cards[-1].recorder.zero_ns
            yield

    def step(self, demands: Sequence[StepDemand], rows: StepRows, routing: StepRouting) -> None:
        """Play one forward pass. ``demands``: those of each GPU, with its layers alone."""
        first, last = self._cards[0], self._cards[-1]
        for card, demand in zip(self._cards, demands, strict=True):
            card.begin_step(demand, routing)
        first.machine.gpu.submit(lambda: first.model.begin_step(rows.tokens, rows.context))
        before: ReplayedLayers | None = None
        for card, entry in zip(self._cards, (None, *self._boundaries), strict=True):
            entered = () if entry is None else (entry.cross(),)
            for layer in range(card.block.layers):
                launched = card.launch(layer, () if layer else entered)
                if before is not None:
                    before.executor.end_layer()  # of the layer before, while this one's attention runs
                card.play(launched)
                before = card
        last.play_head()
        for card in self._cards:
            card.executor.end_step()

    def rows(self) -> list[Row]:
        """The spans of all GPUs."""
        return [row for number, card in enumerate(self._cards)
                for row in rows_of_card(card.recorder.rows, number, card.block.first)]
