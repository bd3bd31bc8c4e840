"""Times of layers that are divided over several cards, in closed form: llama.cpp's split by layers.

Each card has a range of the model's blocks, with its part of the KV cache; the last one also has the head. While it
decodes one card is at work at a time, so that times add up, each at the rates of the layer's own card, or at a share of
them where cards that wait lower their clocks, and the hidden states are handed over at each change of card. Of the
first layers the host keeps the experts, whichever card they belong to.

Of a prompt, the first card computes all experts of the host, which cross its link (ggml-org/llama.cpp
ggml/src/ggml-backend.cpp, cause "1.off": the first device that takes the operation). Hidden states then go there and
back in each such layer of another card. Without experts on the host, pieces of the prompt follow one another through
the cards, where the engine has copies of its inputs (src/llama-context.cpp, pipeline_parallel): of m pieces that take
the same times, the last one is done after one's sum over all cards and m - 1 times the longest of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.costs.cost_table import CostTable, StepCosts
from sim.costs.engine import EngineError, FittedEngine, NumaMode
from sim.costs.fitted_costs import fitted_costs
from sim.costs.software import CardsWork
from sim.machine.devices import HostLink
from sim.machine.hardware import Hardware
from traces.models.shape import ExpertWork, ModelShape

Floats = npt.NDArray[np.float64]
ByCard = tuple[int, ...]  # blocks of each card, and with the last of them one more, the output layer: as -ts counts
_RESULT_BYTES = 4  # of an element of the hidden states


def splits_cards(engine: FittedEngine) -> bool:
    """True if an engine divides layers over several GPUs."""
    return engine.cards is not None and engine.splits == "layers" and not engine.measured


class CardLayers(NamedTuple):
    """Layers of one card: those with experts from ``first`` to before ``end``, others, and whether the head is here."""

    first: int
    end: int
    dense: int
    head: bool


def blocks_of(shape: ModelShape) -> int:
    """Blocks of the model's file."""
    return max(shape.layers, shape.expert_blocks[-1] + 1)


def layers_of(shape: ModelShape, by_card: ByCard) -> list[CardLayers]:
    """The layers of each card."""
    ends, blocks = [0, *accumulate(by_card)], blocks_of(shape)
    experts = [bisect_left(shape.expert_blocks, end) for end in ends]
    dense = [round((min(end, blocks) - few) * shape.dense_layers / max(blocks - shape.moe_layers, 1))
             for end, few in zip(ends, experts, strict=True)]
    return [
        CardLayers(*of_experts, others[1] - others[0], span[0] <= blocks < span[1])
        for of_experts, others, span in zip(pairwise(experts), pairwise(dense), pairwise(ends), strict=True)
    ]


class CardTimes(NamedTuple):
    """Times of some steps on one card, in ns."""

    attention_ns: float  # of a layer with experts
    mixture_ns: float  # the rest of it, without the routed experts
    dense_ns: float  # of a layer without experts
    head_ns: float
    experts_ns: Floats  # of the first layers: of none, of one, and so on


@dataclass(frozen=True)
class LayerSplit:
    """Steps of one size on several cards, however the layers are divided; times in ns, of all steps.

    Times of the host's layers are of the first ones, as ``CardTimes.experts_ns``. ``hand_overs_ns``: of the hidden
    states to each card from the one before it; ``returns_ns``: from each to the first card and back.
    """

    shape: ModelShape
    cards: tuple[CardTimes, ...]
    cpu_ns: Floats
    visits_ns: Floats
    copies_ns: Floats
    hand_overs_ns: tuple[float, ...]
    returns_ns: tuple[float, ...]
    turn_shares: tuple[float, ...]  # of each card's speed, where several decode in turns
    launches_ns: float  # where several do, without experts on the host
    copied: bool  # the host's experts are computed by the first card

    @classmethod
    def on(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, work: ExpertWork, rows: int,
        contexts: Sequence[Sequence[int]], *, threads: int | None, numa: NumaMode | None = None,
        head_rows: int | None = None, copied: bool = False,
    ) -> LayerSplit:
        """Steps of so many rows, one for each of ``contexts``: tokens in the KV cache of each sequence. ``head_rows``:
        of the head; None: one a sequence. Raises EngineError for an engine that takes one card."""
        if engine.cards is None or not splits_cards(engine):
            raise EngineError(f"engine {engine.name!r}: expected one GPU, got {len(hardware.cards)}")
        tables = [
            fitted_costs(shape, card, engine, work.most_rows, threads=threads, numa=numa) for card in hardware.cards
        ]
        steps = [[table.step(rows, context, head_rows) for context in contexts] for table in tables]
        links, count, own_ns = [card.link for card in hardware.cards], len(contexts), engine.cards.hand_over_ns.value
        hand_overs = [
            _crossing_ns(before.link, card.link, shape, rows, own_ns) if card.peer is None
            else card.peer.ns(rows * shape.hidden * _RESULT_BYTES) for before, card in pairwise(hardware.cards)
        ]
        returns = [sum(_crossing_ns(*pair, shape, rows, own_ns) for pair in ((links[0], one), (one, links[0])))
                   for one in links[1:]]
        everything = shape.experts if engine.prompt.copied_experts.value == "all" else work.active
        host = tables[0].experts
        return cls(
            shape, tuple(_card_times(*card, work, shape) for card in zip(tables, steps, strict=True)),
            count * _sums([work.ns(expert.cpu_ns) for expert in host]),
            count * _sums([expert.first_cpu_ns for expert in host]),
            count * _sums([everything * expert.copy_ns for expert in host]),
            (0.0, *(count * ns for ns in hand_overs)), (0.0, *(count * ns for ns in returns)),
            tuple(_turn_share(engine.cards, card) for card in hardware.cards),
            count * shape.layers * (engine.cards.launches_ns.value if engine.cards.launches_ns else 0.0), copied,
        )

    def stages_ns(self, cpu_layers: int, by_card: ByCard) -> Floats:
        """A row for each card: attention, all but routed experts, and the routed experts that it computes."""
        owned = layers_of(self.shape, by_card)
        rows = [self._stage(card, layers, cpu_layers) for card, layers in zip(self.cards, owned, strict=True)]
        stages = np.array(rows)
        if self.copied:
            stages[0, 2] += self.cards[0].experts_ns[cpu_layers]
        return stages

    def _stage(self, card: CardTimes, layers: CardLayers, cpu_layers: int) -> tuple[float, float, float]:
        count, first = layers.end - layers.first, min(max(layers.first, cpu_layers), layers.end)
        others = count * card.mixture_ns + layers.dense * card.dense_ns + layers.head * card.head_ns
        return count * card.attention_ns, others, float(card.experts_ns[layers.end] - card.experts_ns[first])

    def hand_over_ns(self, by_card: ByCard) -> float:
        """Hidden states from card to card."""
        return sum(ns for ns, blocks in zip(self.hand_overs_ns, by_card, strict=True) if blocks)

    def host_copies_ns(self, cpu_layers: int, by_card: ByCard) -> float:
        """Copies of the host's experts to the first card, and of hidden states in layers of the others."""
        owned = layers_of(self.shape, by_card)
        away = (max(min(layers.end, cpu_layers) - layers.first, 0) for layers in owned)
        returns = sum(count * ns for count, ns in zip(away, self.returns_ns, strict=True))
        return float(self.copies_ns[cpu_layers]) + returns

    def parts(self, cpu_layers: int, by_card: ByCard) -> list[float]:
        """The parts of a decode step, as ``DecodeTime`` has them."""
        in_turns = sum(map(bool, by_card)) > 1
        stages_ns = self.stages_ns(cpu_layers, by_card) / (np.array(self.turn_shares)[:, None] if in_turns else 1.0)
        handing_ns = float(self.visits_ns[cpu_layers]) + self.hand_over_ns(by_card)
        handing_ns += self.launches_ns if in_turns and not cpu_layers else 0.0
        return [*stages_ns.sum(axis=0), float(self.cpu_ns[cpu_layers]), handing_ns, 0.0]


@dataclass(frozen=True)
class PromptSplit:
    """A prompt on several cards: its pieces of one size, and what is left. ``overlapped``: pieces follow one another
    through the cards, if no experts are on the host."""

    pieces: tuple[LayerSplit, ...]
    counts: tuple[int, ...]
    overlapped: bool

    @classmethod
    def on(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, sizes: Sequence[tuple[int, Sequence[int]]],
        *, threads: int | None, numa: NumaMode | None = None,
    ) -> PromptSplit:
        """``sizes``: of pieces, each with the tokens in the KV cache after each of them."""
        prompt, pieces = engine.prompt, []
        for tokens, ends in sizes:
            copied = prompt.experts.value == "copied" and tokens >= prompt.copies_from_tokens.value
            work, contexts = ExpertWork.of(shape, tokens), [(end,) for end in ends]
            pieces.append(LayerSplit.on(
                shape, hardware, engine, work, tokens, contexts, threads=threads, numa=numa, copied=copied
            ))
        copies = engine.cards.copies.value if engine.cards else 1
        return cls(tuple(pieces), tuple(len(ends) for _, ends in sizes), copies > 1)

    def parts(self, cpu_layers: int, by_card: ByCard) -> list[float]:
        """The parts of ``PromptTime``; each of them shortened alike where cards are at work at the same time."""
        stages = sum((piece.stages_ns(cpu_layers, by_card) for piece in self.pieces), np.zeros((len(by_card), 3)))
        hand_overs = sum(piece.hand_over_ns(by_card) for piece in self.pieces)
        own = [*stages.sum(axis=0)]
        own[1] += hand_overs
        share = self._overlap(stages.sum(axis=1), hand_overs) if self.overlapped and not cpu_layers else 1.0
        cpu = sum(float(piece.cpu_ns[cpu_layers]) for piece in self.pieces if not piece.copied)
        copies = sum(piece.host_copies_ns(cpu_layers, by_card) for piece in self.pieces if piece.copied)
        return [*(share * ns for ns in own), cpu, copies]

    def _overlap(self, cards_ns: Floats, hand_overs_ns: float) -> float:
        """Time of all pieces over the sum of their times."""
        count, whole = sum(self.counts), float(cards_ns.sum()) + hand_overs_ns
        return (whole + (count - 1) * float(cards_ns.max())) / count / whole


def _crossing_ns(source: HostLink, target: HostLink, shape: ModelShape, rows: int, own_ns: float) -> float:
    """Time of hidden states from one card to another, through the host's memory."""
    size = rows * shape.hidden * _RESULT_BYTES
    return own_ns + size * (1 / source.d2h_bytes_per_s + 1 / target.h2d_bytes_per_s) * 1e9


def _turn_share(cards: CardsWork, card: Hardware) -> float:
    own = cards.turn_share.get(card.gpu.vendor or "")
    return own.value if own else 1.0


def _card_times(table: CostTable, steps: Sequence[StepCosts], work: ExpertWork, shape: ModelShape) -> CardTimes:
    return CardTimes(
        sum(step.attention_ns for step in steps), sum(step.mixture_ns for step in steps),
        sum(step.dense_ns for step in steps) / max(shape.dense_layers, 1), sum(step.head_ns for step in steps),
        len(steps) * _sums([work.ns(expert.gpu_ns) for expert in table.experts]),
    )


def _sums(times_ns: Sequence[float]) -> Floats:
    """Times of the first layers: of none, of one, and so on."""
    return np.cumsum([0.0, *times_ns])
