"""Times of layers on several cards that work at the same time, in closed form: splits of tensors, and of rows.

Of a split of tensors (llama.cpp ``-sm tensor``, ik_llama.cpp ``-sm graph``) each card has a part of every layer: whole
groups of attention's heads, and of each expert and of the other matrices whole units of the inner dimension. What a
kernel takes besides its work is not divided, nor are the router and the sum over experts. A phase lasts as long as on
its slowest card. Two sums of all cards' results follow in each layer, one after attention and one after the mixture,
and one more where shared experts have their own. Experts on the host are computed by the CPU between two sums.

Of a split of rows (``-sm row``) cards have ranges of layers, as without, and rows of each dense matrix. A product's
input goes to all cards, and their results back to the layer's own, which computes all else (ggml_cuda_op_mul_mat in
ggml-org/llama.cpp ggml/src/ggml-cuda/ggml-cuda.cu). Its kernels start one by one, a prompt's rows are multiplied 128 at
a time, and its pieces do not overlap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import comb, floor, lcm
from typing import NamedTuple, TypeAlias

import numpy as np

from sim.costs.engine import EngineError, FittedEngine, LayerKind, NumaMode
from sim.costs.fitted_costs import fitted_costs
from sim.costs.processors import GpuProcessor, layer_kind
from sim.costs.roofline_costs import attention_work
from sim.costs.software import CardsWork, SplitMode, SumsWork
from sim.machine.hardware import Hardware
from traces.models.attention import Attention
from traces.models.codings import codings_of
from traces.models.names import parted
from traces.models.shape import ExpertWork, ModelShape
from trilane.engines.layer_split import ByCard, Floats, LayerSplit, PromptSplit

_UNIT = 128  # of an inner dimension, in whole blocks: get_split_granularity in ggml-org/llama.cpp src/llama-model.cpp
_SUPER_BLOCK = 256  # weights that share scales in k-quants and their like; 32 in others
_MOST_ROWS = 128  # of an input that products split by rows take at once (MUL_MAT_SRC1_COL_STRIDE in ggml-cuda.cu)
_INPUT_BYTES = 36 / 32  # of an element of a product's input: 8 bits, 32 of which share four bytes (ggml, block_q8_1)
_RESULT_BYTES = 4
_PRODUCTS: dict[LayerKind, int] = {"grouped": 4, "latent": 5, "state": 5}  # with weights: src/models of llama.cpp


class Shares(NamedTuple):
    """Share of each card of a layer's parts; a card may hold one that another one has, too."""

    attention: tuple[float, ...]
    experts: tuple[float, ...]
    others: tuple[float, ...]  # dense layers, shared experts, and the head

    @classmethod
    def of(cls, shape: ModelShape, proportions: Sequence[float]) -> Shares:
        """Shares in whole units, by proportions as ``-ts`` has them; what is left of a unit is the last card's."""
        heads = min((kind.heads if kind.latent else kind.kv_heads
                     for kind, _ in shape.attention_counts if kind.reach != "state"), default=1 << 16)
        unit = lcm(_UNIT, _SUPER_BLOCK if _in_super_blocks(shape) else 32)
        return cls(
            shares_in_units(heads, proportions),
            shares_in_units(-(-shape.expert_width // unit), proportions),
            tuple(part / sum(proportions) for part in proportions),
        )


def _in_super_blocks(shape: ModelShape) -> bool:
    """True for widths of whole super-blocks, in formats that have them."""
    weights = parted(shape.name).weights or ""
    k_quant = re.search(r"q\d_k|iq[1-4]_(?!nl)|kt$|ks|ud", weights) is not None
    return k_quant and shape.expert_width % _SUPER_BLOCK == 0


def shares_in_units(units: int, proportions: Sequence[float]) -> tuple[float, ...]:
    """Share of each card of so many units that are not divided, in whole ones; with fewer units than cards, all that
    have none do the work of the first."""
    if units < sum(part > 0 for part in proportions):
        return tuple(float(part > 0) / units for part in proportions)
    ends = [floor(units * until / sum(proportions) + 1e-9) for until in accumulate(proportions)]
    return tuple((end - start) / units for start, end in pairwise([0, *ends]))


@lru_cache(maxsize=1024)
def busiest_share(experts: int, active: int, cards: int) -> float:
    """Expected share of ``active`` of a layer's experts on the card that has most of them, where each has as many whole
    ones (expert parallelism) and all draws are equally likely."""
    own = [experts * (card + 1) // cards - experts * card // cards for card in range(cards)]
    more = 0.0  # the mean of the most is the sum of the chances that it is more than 0, than 1, and so on
    for most in range(active):
        ways = np.ones(1)
        for count in own:
            ways = np.convolve(ways, [float(comb(count, few)) for few in range(most + 1)])[: active + 1]
        more += 1 - (ways[active] / comb(experts, active) if len(ways) > active else 0.0)
    return more / active


class Sums(NamedTuple):
    """Sums of all cards' results over the links between them."""

    latency_ns: float
    ns_per_byte: float

    @classmethod
    def over(cls, cards: Sequence[Hardware], work: SumsWork) -> Sums:
        """Sums in a ring of 2 (cards - 1) steps, each with a part of the bytes; of one card none."""
        steps = 2 * (len(cards) - 1)
        peers = [card.peer for card in cards[1:] if card.peer]
        if peers and len(peers) == len(cards) - 1:
            rate = min(peer.bytes_per_s for peer in peers)
            return cls(steps * max(peer.latency_ns for peer in peers), steps / len(cards) / rate * 1e9)
        slots = max(1 / card.link.d2h_bytes_per_s + 1 / card.link.h2d_bytes_per_s for card in cards)
        per_byte = 1 / work.host_bytes_per_s.value + slots
        return cls(steps * work.step_ns.value, steps / len(cards) * per_byte * 1e9)

    def ns(self, size: float) -> float:
        return self.latency_ns + size * self.ns_per_byte


class PartTime(NamedTuple):
    """Time of a part on one card: what is divided, and what every card takes, in ns."""

    divided: float
    fixed: float = 0.0

    def ns(self, share: float) -> float:
        return self.fixed + share * self.divided if share else 0.0


class CardWork(NamedTuple):
    """Work of some steps on one card, had it all of it."""

    attention: PartTime  # of a layer
    mixture: PartTime  # the rest of one with experts, without the routed ones
    dense: PartTime  # of a layer without experts
    head: PartTime
    experts_ns: Floats  # of the first layers: of none, of one, and so on

    @classmethod
    def on(
        cls, shape: ModelShape, card: Hardware, engine: FittedEngine, work: ExpertWork, rows: int,
        contexts: Sequence[Sequence[int]], head_rows: int | None = None,
    ) -> CardWork:
        """Steps of so many rows, one for each of ``contexts``, as ``LayerSplit.on`` takes them."""
        table = fitted_costs(shape, card, engine, work.most_rows)
        steps, gpu = [table.step(rows, context, head_rows) for context in contexts], _processor(shape, card, engine)
        fixed = len(steps) * shape.mean_of_layers(lambda kind: gpu.attention_fixed_ns(layer_kind(kind)))
        fixed += sum(_latents_ns(shape, gpu, context) for context in contexts) if rows == len(contexts[0]) else 0.0
        shared, start = sum(step.shared_ns for step in steps), len(steps) * gpu.step_ns
        dense = sum(step.dense_ns for step in steps) / max(shape.dense_layers, 1)
        return cls(
            PartTime(sum(step.attention_ns for step in steps) - fixed, fixed),
            PartTime(shared, sum(step.mixture_ns for step in steps) - shared),
            PartTime(max(dense - fixed, 0.0), min(fixed, dense)),
            PartTime(sum(step.head_ns for step in steps) - start, start),
            len(steps) * np.cumsum([0.0, *(work.ns(expert.gpu_ns) for expert in table.experts)]),
        )


def _latents_ns(shape: ModelShape, gpu: GpuProcessor, context: Sequence[int]) -> float:
    """Reads of latents in a layer of a step of one token a sequence: every card has all of them."""
    def of(kind: Attention) -> float:
        read, _ = attention_work(kind, len(context), context)
        return gpu.cache_ns(read * kind.kv_width, shape.cache_bits, layer_kind(kind)) if kind.latent else 0.0

    return shape.mean_of_layers(of)


def _processor(shape: ModelShape, card: Hardware, engine: FittedEngine) -> GpuProcessor:
    return GpuProcessor(card.gpu, engine.gpu, codings_of(shape))


@dataclass(frozen=True)
class TensorSplit:
    """Steps of one size on several cards, each with a part of every layer; times in ns, of all steps.

    ``host``: the same steps with layers divided, for what the host takes, and copies to the first card. ``sum_ns``: of
    one sum of all rows. ``several``: sums after a mixture. ``copied``: the first card computes the host's experts.
    """

    shape: ModelShape
    cards: tuple[CardWork, ...]
    host: LayerSplit
    sum_ns: float
    several: int
    copied: bool

    @classmethod
    def on(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, work: ExpertWork, rows: int,
        contexts: Sequence[Sequence[int]], *, threads: int | None, numa: NumaMode | None = None,
        head_rows: int | None = None, copied: bool = False,
    ) -> TensorSplit:
        """Steps as ``LayerSplit.on`` takes them. Raises EngineError for an engine without sums."""
        sums = engine.cards and engine.cards.sums
        if not sums:
            raise EngineError(f"engine {engine.name!r}: expected layers divided over the GPUs: it has no other split")
        asked = shape, hardware, engine, work, rows, contexts
        element = sums.prompt_bytes if rows > len(contexts[0]) else sums.step_bytes
        size = rows * shape.hidden * element.value
        return cls(
            shape,
            tuple(CardWork.on(shape, card, engine, work, rows, contexts, head_rows) for card in hardware.cards),
            LayerSplit.on(*asked, threads=threads, numa=numa, head_rows=head_rows, copied=copied),
            len(contexts) * Sums.over(hardware.cards, sums).ns(size),
            1 + (sums.shared.value and shape.shared_params > 0), copied and sums.copied.value,
        )

    def parts(self, cpu_layers: int, by_card: ByCard) -> list[float]:
        """The parts of a decode step, as ``DecodeTime`` has them, with proportions of the cards."""
        visits = float(self.host.visits_ns[cpu_layers]) + self._sums_ns(cpu_layers, by_card)
        return [*self._own_ns(cpu_layers, by_card), float(self.host.cpu_ns[cpu_layers]), visits, 0.0]

    def prompt_parts(self, cpu_layers: int, by_card: ByCard) -> list[float]:
        """The parts of ``PromptTime``."""
        attention, others, experts = self._own_ns(cpu_layers, by_card)
        others += self._sums_ns(cpu_layers, by_card)
        cpu, copies = float(self.host.cpu_ns[cpu_layers]), float(self.host.copies_ns[cpu_layers])
        if self.copied:
            return [attention, others, experts + float(self.cards[0].experts_ns[cpu_layers]), 0.0, copies]
        return [attention, others, experts, cpu, 0.0]

    def _own_ns(self, cpu_layers: int, by_card: ByCard) -> tuple[float, float, float]:
        """Attention, all but routed experts, and the routed experts on the cards: of the slowest in each phase."""
        shape, shares = self.shape, Shares.of(self.shape, by_card)
        mixtures = [card.mixture.ns(share) for card, share in zip(self.cards, shares.others, strict=True)]
        experts = [share * float(card.experts_ns[-1] - card.experts_ns[cpu_layers])
                   for card, share in zip(self.cards, shares.experts, strict=True)]
        on_cards = shape.moe_layers - cpu_layers
        last = max(range(len(experts)), key=lambda number: on_cards * mixtures[number] + experts[number])
        others = on_cards * mixtures[last] + cpu_layers * max(mixtures)
        others += shape.dense_layers * self._slowest("dense", shares.others) + self._slowest("head", shares.others)
        return shape.moe_layers * self._slowest("attention", shares.attention), others, experts[last]

    def _slowest(self, part: str, shares: Sequence[float]) -> float:
        times: list[PartTime] = [getattr(card, part) for card in self.cards]
        return max(time.ns(share) for time, share in zip(times, shares, strict=True))

    def _sums_ns(self, cpu_layers: int, by_card: ByCard) -> float:
        """Sums after attention, and after what follows it; none on one card."""
        shape, few = self.shape, int(self.shape.shared_params > 0)
        mixtures = self.several * (shape.moe_layers - cpu_layers) + max(few, self.copied) * cpu_layers
        count = shape.layers + shape.dense_layers + mixtures
        return count * self.sum_ns if sum(map(bool, by_card)) > 1 else 0.0


class RowProducts(NamedTuple):
    """Products with dense weights of some steps, on one card: their times, undivided and with so many rows at once, and
    how many there are, with the elements of their results, in a part of a layer."""

    ns: float
    divided_ns: float
    products: int
    results: float


@dataclass(frozen=True)
class RowSplit:
    """Steps of one size on several cards, each with a range of layers and rows of each dense matrix.

    ``products``: of attention, of a mixture and of a dense layer's other part, and of the head, a tuple for each card.
    """

    layers: LayerSplit
    products: tuple[tuple[RowProducts, ...], ...]
    rows: int
    gather_ns: float
    ns_per_byte: float
    starts_ns: tuple[float, ...]  # of a layer's kernels that would else start together, on each card

    @classmethod
    def on(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, work: ExpertWork, rows: int,
        contexts: Sequence[Sequence[int]], *, threads: int | None, numa: NumaMode | None = None,
        head_rows: int | None = None, copied: bool = False,
    ) -> RowSplit:
        """Steps as ``LayerSplit.on`` takes them. Raises EngineError for an engine that does not split rows."""
        if not engine.cards or not engine.cards.gather_ns:
            raise EngineError(f"engine {engine.name!r}: expected layers divided over the GPUs: it splits no rows")
        asked, count = (shape, hardware, engine, work, rows, contexts), len(contexts)
        latency, per_byte = _gathers(hardware, engine.cards)
        starts_ns = engine.cards.row_starts_ns.value if engine.cards.row_starts_ns else 0.0
        return cls(
            LayerSplit.on(*asked, threads=threads, numa=numa, head_rows=head_rows, copied=copied),
            tuple(_row_products(shape, card, engine, rows, head_rows or len(contexts[0]), count)
                  for card in hardware.cards),
            count * rows, count * _turns(rows) * latency, per_byte,
            tuple(count * starts_ns * (card.gpu.launches != "single") for card in hardware.cards),
        )

    def parts(self, cpu_layers: int, by_card: ByCard) -> list[float]:
        """The parts of a decode step, as ``DecodeTime`` has them; ``by_card``: layers, and shares of rows."""
        return self._divided(by_card).parts(cpu_layers, by_card)

    def prompt_parts(self, cpu_layers: int, by_card: ByCard) -> list[float]:
        """The parts of ``PromptTime``: one card after another."""
        divided = self._divided(by_card)
        own = [*divided.stages_ns(cpu_layers, by_card).sum(axis=0)]
        own[1] += divided.hand_over_ns(by_card)
        if divided.copied:
            return [*own, 0.0, divided.host_copies_ns(cpu_layers, by_card)]
        return [*own, float(divided.cpu_ns[cpu_layers]), 0.0]

    def _divided(self, by_card: ByCard) -> LayerSplit:
        """The layers, with times of products that all cards compute."""
        if sum(map(bool, by_card)) < 2:
            return self.layers
        shares = [blocks / sum(by_card) for blocks in by_card]
        cards = []
        for number, (card, own) in enumerate(zip(self.layers.cards, self.products, strict=True)):
            saved = [self._saved(number, part, shares) for part in range(len(own))]
            cards.append(card._replace(
                attention_ns=card.attention_ns - saved[0] + self.starts_ns[number],
                mixture_ns=card.mixture_ns - saved[1], dense_ns=card.dense_ns - saved[0] - saved[2],
                head_ns=card.head_ns - saved[3],
            ))
        return replace(self.layers, cards=tuple(cards))

    def _saved(self, number: int, part: int, shares: Sequence[float]) -> float:
        """Time of a part's products on its own card, without what they take on all cards and between them."""
        own = self.products[number][part]
        slowest = max(share * card[part].divided_ns for share, card in zip(shares, self.products, strict=True))
        size = self.rows * own.results * _RESULT_BYTES * (1 - shares[number])
        others = sum(map(bool, shares)) - 1
        size += others * self.rows * own.products * self.layers.shape.hidden * _INPUT_BYTES
        return own.ns - slowest - own.products * self.gather_ns - size * self.ns_per_byte


def _turns(rows: int) -> int:
    return -(-rows // _MOST_ROWS)


def _gathers(hardware: Hardware, work: CardsWork) -> tuple[float, float]:
    """Latency of a product's way to the other cards and back, and the time of each byte between two of them."""
    peers = [card.peer for card in hardware.further if card.peer]
    if len(peers) == len(hardware.further):
        return 2 * max(peer.latency_ns for peer in peers), 1e9 / min(peer.bytes_per_s for peer in peers)
    slots = max(1 / card.link.d2h_bytes_per_s + 1 / card.link.h2d_bytes_per_s for card in hardware.cards)
    return (work.gather_ns.value if work.gather_ns else 0.0), slots * 1e9


def _row_products(
    shape: ModelShape, card: Hardware, engine: FittedEngine, rows: int, head_rows: int, count: int
) -> tuple[RowProducts, ...]:
    gpu, bits, hidden = _processor(shape, card, engine), shape.bits, shape.hidden

    def ns(weights: float, bits_each: float, own_rows: int) -> float:
        return gpu.matrix_ns(weights * bits_each / 8, bits_each, 2.0 * weights, own_rows)

    def of(products: int, *matrices: tuple[float, float, float], own_rows: int = rows) -> RowProducts:
        whole, divided = (
            count * sum(part * turns * ns(weights, bits_each, at_once) for weights, bits_each, part in matrices)
            for turns, at_once in ((1, own_rows), (_turns(own_rows), min(own_rows, _MOST_ROWS)))
        )
        return RowProducts(whole, divided, products, sum(part * weights for weights, _, part in matrices) / hidden)

    kinds = [(kind.params, bits.of_attention(kind), layers / shape.layers) for kind, layers in shape.attention_counts]
    shared = 4 if shape.shared_params else 0
    return (
        of(round(shape.mean_of_layers(lambda kind: _PRODUCTS[layer_kind(kind)])), *kinds),
        of(1 + shared, (hidden * shape.experts, bits.router, 1.0), (shape.shared_params, bits.shared, 1.0)),
        of(3, (shape.dense_ffn_params, bits.dense, 1.0)),
        of(1, (shape.vocab * hidden, bits.head, 1.0), own_rows=head_rows),
    )


AnySplit: TypeAlias = LayerSplit | RowSplit | TensorSplit
SPLITS: Mapping[SplitMode, type[AnySplit]] = {
    "layer": LayerSplit, "row": RowSplit, "tensor": TensorSplit, "graph": TensorSplit,
}


@dataclass(frozen=True)
class TogetherPrompt:
    """A prompt on cards that work at the same time: its pieces of one size, and what is left."""

    pieces: tuple[TensorSplit | RowSplit, ...]

    @classmethod
    def on(
        cls, mode: SplitMode, shape: ModelShape, hardware: Hardware, engine: FittedEngine,
        sizes: Sequence[tuple[int, Sequence[int]]], *, threads: int | None, numa: NumaMode | None = None,
    ) -> TogetherPrompt:
        """``sizes``: as ``PromptSplit.on`` takes them."""
        prompt, pieces = engine.prompt, list[TensorSplit | RowSplit]()
        kind = RowSplit if mode == "row" else TensorSplit
        for tokens, ends in sizes:
            copied = prompt.experts.value == "copied" and tokens >= prompt.copies_from_tokens.value
            pieces.append(kind.on(
                shape, hardware, engine, ExpertWork.of(shape, tokens), tokens, [(end,) for end in ends],
                threads=threads, numa=numa, copied=copied,
            ))
        return cls(tuple(pieces))

    def parts(self, cpu_layers: int, by_card: ByCard) -> list[float]:
        """The parts of ``PromptTime``."""
        pieces = (one.prompt_parts(cpu_layers, by_card) for one in self.pieces)
        return [sum(parts) for parts in zip(*pieces, strict=True)]


Divided: TypeAlias = AnySplit | PromptSplit | TogetherPrompt
