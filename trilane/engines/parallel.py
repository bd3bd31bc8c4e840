"""Engines whose cards work together on every layer: vLLM, and SGLang with KTransformers.

Tensor parallelism divides attention's heads, each expert's width, and the head of the model by the number of cards;
kernels take their fixed times on all of them. Two sums of all cards' results follow in each layer
(``trilane.engines.tensor_split.Sums``). With expert parallelism (``--enable-expert-parallel``) a card has whole experts
instead, and a step waits for the card that has most of those that it chose. It is taken where the width cannot be
divided: formats with blocks or groups of 128 weights need whole ones on each card (vllm-project/vllm
vllm/model_executor/layers/quantization/fp8.py, gptq_marlin.py); those of four-bit floats have blocks of at most 32, and
are filled up (mxfp4.py there). Heads must be divided evenly (vllm-project/vllm issues 2652, 11797). What the host keeps
of the experts is copied in equal parts over the cards' links, as quickly as its memory is read; of KTransformers the
CPU computes it for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.costs.engine import EngineError, FittedEngine
from sim.costs.fitted_costs import copy_bytes_per_s, fitted_costs
from sim.machine.hardware import Hardware
from traces.models.codings import codings_of
from traces.models.shape import ExpertWork, ModelShape
from trilane.engines.tensor_split import CardWork, Shares, Sums, busiest_share

_GROUP = 128  # weights of a width, of which a card has whole ones
_WIDE_BITS = 16
_DIALECTS = ("vllm-serve", "sglang")


def takes_cards(engine: FittedEngine) -> bool:
    """True if several cards work together on every layer of an engine."""
    return engine.dialect in _DIALECTS and engine.cards is not None and engine.cards.sums is not None


def together(engine: FittedEngine, hardware: Hardware) -> bool:
    """True if several cards of a machine do."""
    return bool(hardware.further) and takes_cards(engine)


def expert_parallel(shape: ModelShape, cards: int) -> bool:
    """True if cards have whole experts, since their width cannot be divided."""
    in_groups = shape.weight_bits < _WIDE_BITS and "table" not in codings_of(shape).experts
    return in_groups and shape.expert_width % (_GROUP * cards) != 0


def divides_heads(shape: ModelShape, cards: int) -> bool:
    """True if all cards have as many heads, and as many of keys and values, or each of these as many cards."""
    kinds = [kind for kind, _ in shape.attention_counts if kind.reach != "state"]
    few = [(kind.kv_heads, cards) for kind in kinds if not kind.latent]
    return all(kind.heads % cards == 0 for kind in kinds) and all(max(pair) % min(pair) == 0 for pair in few)


class CardsStep(NamedTuple):
    """All but the routed experts of some steps, in ns."""

    attention_ns: float
    others_ns: float  # with the sums

    @classmethod
    def on(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, work: ExpertWork, rows: int,
        contexts: Sequence[Sequence[int]], head_rows: int | None = None,
    ) -> CardsStep:
        """Steps of so many rows, one for each of ``contexts``: tokens in the KV cache of each sequence. Raises
        EngineError for an engine of one card."""
        sums = engine.cards and engine.cards.sums
        if not sums:
            raise EngineError(f"engine {engine.name!r}: expected one GPU, got {len(hardware.cards)}")
        shares, count = shares_of(shape, len(hardware.cards)), shape.layers + shape.moe_layers + shape.dense_layers
        cards = [CardWork.on(shape, card, engine, work, rows, contexts, head_rows) for card in hardware.cards]
        element = sums.prompt_bytes if rows > len(contexts[0]) else sums.step_bytes
        sums_ns = len(contexts) * count * Sums.over(hardware.cards, sums).ns(rows * shape.hidden * element.value)
        others = shape.moe_layers * max(one.mixture.ns(shares.others[0]) for one in cards)
        others += shape.dense_layers * max(one.dense.ns(shares.others[0]) for one in cards)
        others += max(one.head.ns(shares.others[0]) for one in cards)
        return cls(shape.moe_layers * max(one.attention.ns(shares.attention[0]) for one in cards), others + sums_ns)


def shares_of(shape: ModelShape, cards: int) -> Shares:
    """Shares of equal parts: of the largest, where heads are not divided evenly."""
    shares = Shares.of(shape, (1,) * cards)
    return shares._replace(attention=(max(shares.attention),) * cards)


class ExpertFactors(NamedTuple):
    """Times of routed experts over those on the first card alone: of computing them there, and of copying them."""

    gpu: float
    copies: float

    @classmethod
    def of(cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, work: ExpertWork) -> ExpertFactors:
        """Factors of a step's work; 1 on one card."""
        cards = len(hardware.cards)
        if not together(engine, hardware):
            return cls(1.0, 1.0)
        share = busiest_share(shape.experts, max(round(work.active), 1), cards) if expert_parallel(shape, cards) \
            else 1 / cards
        times = [_experts_ns(shape, card, engine, work) for card in hardware.cards]
        links = hardware.with_numbers({"link.h2d_bytes_per_s": cards * hardware.link.h2d_bytes_per_s})
        one, all_links = (copy_bytes_per_s(machine, engine.prompt) for machine in (hardware, links))
        return cls(share * max(times) / times[0], one / all_links)


def _experts_ns(shape: ModelShape, card: Hardware, engine: FittedEngine, work: ExpertWork) -> float:
    return float(work.ns(fitted_costs(shape, card, engine, work.most_rows).experts[0].gpu_ns))
