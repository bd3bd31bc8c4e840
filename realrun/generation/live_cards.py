"""A model whose layers are divided among GPUs: each of its calls reaches the GPU that has the layer.

Hidden states are handed over where a pass reaches the first decoder layer of a GPU (``execution.cards.Boundary``). All
else that the library gives a decoder layer, such as a mask or rotations, was made on the first GPU; it is copied once a
pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from policies.mechanism.views import Phase
from realrun.errors import RefusedError
from realrun.execution.cards import Boundary
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import LayerSizes
from realrun.generation.divided_model import Division
from realrun.generation.live_forecasts import LiveForecasts, LiveRecorder, MadeForecasts
from realrun.generation.live_layers import LiveLayers, RouterFacts
from sim.runs.cards import LayerBlock
from traces.capture.record import LayerRecord


def live_layers(
    executors: Sequence[Executor], blocks: Sequence[LayerBlock], recorder: LiveRecorder, forecasts: LiveForecasts,
    facts: RouterFacts, sizes: LayerSizes,
) -> LiveCards:
    """The layers of a model on one GPU or several, each with its executor and block. ``sizes``: of the longest step."""
    pairs = zip(executors, blocks, strict=True)
    cards = [LiveLayers(executor, recorder, forecasts, facts, block) for executor, block in pairs]
    return LiveCards(cards, recorder, forecasts, sizes)


class LiveCards:
    """Called by the model with every layer's routing; see ``hosted_model.ExpertsCall``."""

    def __init__(
        self, cards: Sequence[LiveLayers], recorder: LiveRecorder, forecasts: LiveForecasts, sizes: LayerSizes
    ) -> None:
        self._cards, self._recorder, self._forecasts, self._sizes = cards, recorder, forecasts, sizes
        self._boundaries = [Boundary(*pair, sizes) for pair in pairwise([card.executor for card in cards])]
        self._card_of = [card for card in cards for _ in range(card.block.layers)]
        self._copied: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}  # in this pass: by id; and the copied

    @property
    def blocks(self) -> list[LayerBlock]:
        """The layers of each GPU."""
        return [card.block for card in self._cards]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each GPU."""
        return [card.executor.machine.device for card in self._cards]

    def begin_step(self, index: int, phase: Phase, sequences: Sequence[int], tokens: Tensor) -> None:
        """Begin a forward pass over ``tokens`` [B, S] of ``sequences``."""
        self._forecasts.begin_pass(tokens)
        for card in self._cards:
            card.begin_step(index, phase, sequences, tokens.shape[1])
        self._cards[0].executor.machine.select()
        self._cards[0].enter()

    def __call__(self, place: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Execute the layer at a ``place`` in the model: hidden states [N, H] -> sum of its experts [N, H]."""
        card = self._card_of[place]
        return card.play(place - card.block.first, hidden, ids, weights)

    def end_pass(self, chosen: Tensor) -> Tensor:
        """End the step, for which the tokens ``chosen`` [B, 1] are on the last GPU; returns them on the host."""
        tokens = self._cards[-1].bring_chosen(chosen)
        for card in self._cards:
            card.executor.end_step()
        self._copied.clear()
        return tokens

    def records(self) -> list[LayerRecord]:
        """The records of the routers in the step that has ended."""
        return self._recorder.take()

    @property
    def made(self) -> list[MadeForecasts]:
        """The forecasts made at each layer of the model in the step at work."""
        return [made for card in self._cards for made in card.made]

    @contextmanager
    def handing_over(self, division: Division) -> Iterator[None]:
        """Let passes of the model in the block go from GPU to GPU."""
        with ExitStack() as stack:
            for number, decoders in list(enumerate(division.decoders))[1:]:
                for place, decoder in enumerate(decoders):
                    hook = partial(self._entering, number, place == 0)
                    stack.callback(decoder.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _entering(
        self, number: int, crosses: bool, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the arguments of a decoder layer to its GPU; ``crosses``: its hidden states, too."""
        named = {} if args else {"hidden_states": kwargs["hidden_states"]}
        hidden, *others = args or named.values()
        if crosses:
            hidden = self._cross(number, hidden)
        there = [hidden, *(self._copy(other, number) for other in others)]
        kept = {name: self._copy(value, number) for name, value in kwargs.items() if name not in named}
        return (tuple(there), kept) if args else ((), kept | {"hidden_states": hidden})

    def _cross(self, number: int, hidden: Any) -> Tensor:
        """Hand over hidden states [B, S, H] to a GPU from the one before it. Raises RefusedError for others."""
        card, following, boundary = self._cards[number - 1], self._cards[number], self._boundaries[number - 1]
        places, sizes = (card.tokens, self._sizes.hidden), self._sizes
        if not isinstance(hidden, Tensor) or hidden.dtype != sizes.dtype or hidden.numel() != places[0] * places[1]:
            got = f"{hidden.dtype} {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
            raise RefusedError(
                f"generate on several GPUs: expected a decoder layer to get hidden states in {sizes.dtype}, "
                f"{card.tokens} tokens of {sizes.hidden}, got {got}; this family generates on one GPU"
            )
        ready, unended = card.leave()
        there = boundary.cross(lambda: hidden.reshape(places), ready, card.block.layers - 1, card.tokens)
        following.enter((there,), unended)
        return boundary.arrived[: card.tokens].view(hidden.shape)

    def _copy(self, value: Any, number: int) -> Any:
        """An argument on a GPU: tensors, and those in tuples."""
        if isinstance(value, tuple):
            return tuple(self._copy(part, number) for part in value)
        device = self.devices[number]
        if not isinstance(value, Tensor) or value.device == device:
            return value
        key = id(value), device
        if key not in self._copied:
            self._copied[key] = value, value.to(device, non_blocking=True)  # the first keeps its id
        return self._copied[key][1]
