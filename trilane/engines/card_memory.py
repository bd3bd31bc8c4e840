"""Memory of several cards, each with a range of the model's blocks, and the division that fills the quickest first.

Of a division with the experts of the first layers on the host, a share for each card by its memory would leave the
first one empty and the last one without room (ggml-org/llama.cpp issues 15136, 15263). So the cards, quickest first,
take as many blocks as they have room for: no other division gives the quickest more. A second one is compared with it
where all experts are on the cards, by the cards' arithmetic, so that the pieces of a prompt take as long on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.costs.software import SplitMode
from sim.machine.hardware import Hardware
from traces.models.attention import Attention
from traces.models.shape import ModelShape
from trilane.engines.layer_split import ByCard, blocks_of
from trilane.engines.load_memory import ComputeBuffer, LoadSetting, kv_cache_bytes, layer_cache_bytes
from trilane.engines.split_modes import PROPORTIONS
from trilane.engines.tensor_split import Shares

_INTEGER_RATIO = 2  # 8-bit integer operations over 16-bit ones, of a card that does not state them


class CardMemory(NamedTuple):
    """Memory of one card, in bytes. ``blocks``: with the output layer, as -ts counts them; 0: nothing is on it.
    ``part``: of each of them; 0: whole ones."""

    name: str
    blocks: int
    gpu_bytes: int
    every_token_bytes: int
    kv_bytes: int
    compute_bytes: int
    reserve_bytes: int
    experts_bytes: int
    part: float = 0.0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name, as ``SplitMemory.gpu_parts`` has them."""
        return {
            "weights that every token needs": self.every_token_bytes, "KV cache": self.kv_bytes,
            "compute buffers": self.compute_bytes, "reserve": self.reserve_bytes, "experts": self.experts_bytes,
        }

    @property
    def missing_bytes(self) -> int:
        """Bytes that it lacks; at most 0 where all of it fits."""
        return sum(self.parts.values()) - self.gpu_bytes

    @property
    def share(self) -> float:
        """Share of it that is used, without what is kept free."""
        return (sum(self.parts.values()) - self.reserve_bytes) / self.gpu_bytes


@dataclass(frozen=True)
class CardsMemory:
    """Memory of a model on several cards, with one setting. ``copies``: of the inputs of pieces, where these follow one
    another through the cards."""

    shape: ModelShape
    hardware: Hardware
    setting: LoadSetting  # with no experts on the host
    copies: int
    margin_bytes: int = 0  # of each card's reserve that need not be kept free

    def filled(self, cpu_layers: int) -> ByCard:
        """Blocks of each card, as many as it has room for; the last one takes the rest. All of them on the first card,
        where they have room: it then needs no copies of inputs."""
        if self._memory(0, cpu_layers, 0, self._blocks + 1, several=False).missing_bytes <= 0:
            return self._blocks + 1, *[0] * (len(self._cards) - 1)
        needs, counts, start = self._needs(cpu_layers), list[int](), 0
        for number, card in enumerate(self._cards[:-1]):
            buffers = self._compute(number, cpu_layers, head=False, several=True)
            room = card.gpu.memory_bytes - self._reserve(card) - buffers
            end = int(np.searchsorted(needs, needs[start] + room, side="right")) - 1
            counts.append(max(end, start) - start)
            start = max(end, start)
        return self._with_head(cpu_layers, (*counts, self._blocks - start))

    def _with_head(self, cpu_layers: int, blocks: ByCard) -> ByCard:
        """Put the output layer behind the last block, or where it has no room there, on the next card."""
        last = max(number for number, count in enumerate(blocks) if count)
        start, several = sum(blocks[:last]), sum(map(bool, blocks)) > 1
        full = self._memory(last, cpu_layers, start, self._blocks + 1, several=several).missing_bytes > 0
        return _one_more(blocks, last + (full and last + 1 < len(blocks)))

    @property
    def even(self) -> ByCard:
        """Blocks of each card by its arithmetic: of equal cards as many, as the engine itself divides them."""
        rates = [one.gpu.integer_ops_per_s or _INTEGER_RATIO * one.gpu.flops_per_s for one in self._cards]
        ends = [ceil((self._blocks + 1) * until / sum(rates) - 1e-9) for until in accumulate(rates)]
        return tuple(end - start for start, end in pairwise([0, *ends]))

    @cached_property
    def proportions(self) -> list[ByCard]:
        """Parts of every layer that cards may have: as many, by their bandwidth, and by their memory, in percent."""
        rates = [one.gpu.bandwidth_bytes_per_s for one in self._cards]
        rooms = [float(one.gpu.memory_bytes - self._reserve(one)) for one in self._cards]
        unlike = [tuple(max(round(100 * part / sum(parts)), 1) for part in parts) for parts in (rates, rooms)]
        return [*dict.fromkeys([(1,) * len(rates), *(one for one in unlike if len({*one}) > 1)])]

    def memories(self, cpu_layers: int, by_card: ByCard, mode: SplitMode = "layer") -> tuple[CardMemory, ...]:
        """Memory of each card."""
        if mode in PROPORTIONS:
            return tuple(self._part(number, cpu_layers, by_card, mode) for number in range(len(by_card)))
        memories = self._of_layers(cpu_layers, by_card)
        if mode == "layer" or sum(map(bool, by_card)) < 2:
            return memories
        dense = sum(one.every_token_bytes for one in memories)
        return tuple(
            one._replace(every_token_bytes=round(dense * one.blocks / sum(by_card))) for one in memories
        )

    def _part(self, number: int, cpu_layers: int, by_card: ByCard, mode: SplitMode) -> CardMemory:
        """Memory of a card with a part of every layer. Units that do not divide evenly are other cards' in other
        layers; norms and routers are on all cards, as are latents."""
        card, shares = self._cards[number].gpu, Shares.of(self.shape, by_card)
        part, attention = by_card[number] / sum(by_card), shares.attention[number]
        own, router = self._attention_bytes, self.shape.hidden * self.shape.experts * self.shape.bits.router / 8
        mirrored = self.shape.moe_layers * router
        others = max(float(self._weights.sum()) - own - mirrored, 0.0) + self._head_bytes
        latent = any(kind.latent for kind, _ in self.shape.attention_counts)
        held = self._experts[self._host_end(cpu_layers):].sum()
        copied = 0 if number or mode == "tensor" else cpu_layers
        return CardMemory(
            card.name, self._blocks + 1, card.memory_bytes, round(own * attention + mirrored + others * part),
            round(float(self._kv.sum()) * (1.0 if latent else attention)), self._buffer(copied, True)[0],
            self._reserve(self._cards[number]), round(held * part), part,
        )

    @property
    def _attention_bytes(self) -> float:
        return sum(kind.params * self.shape.bits.of_attention(kind) / 8 for kind, _ in self._kinds)

    def _of_layers(self, cpu_layers: int, by_card: ByCard) -> tuple[CardMemory, ...]:
        several, ends = sum(map(bool, by_card)) > 1, [0, *accumulate(by_card)]
        return tuple(
            self._memory(number, cpu_layers, *span, several=several) for number, span in enumerate(pairwise(ends))
        )

    def _memory(self, number: int, cpu_layers: int, start: int, end: int, *, several: bool) -> CardMemory:
        card = self._cards[number].gpu
        if start == end:
            return CardMemory(card.name, 0, card.memory_bytes, 0, 0, 0, 0, 0)
        head, own = end > self._blocks, slice(start, min(end, self._blocks))
        host = max(min(self._host_end(cpu_layers), own.stop) - start, 0)  # blocks whose experts are there
        return CardMemory(
            card.name, end - start, card.memory_bytes,
            round(self._weights[own].sum()) + head * self._head_bytes, round(self._kv[own].sum()),
            self._compute(number, cpu_layers, head=head, several=several), self._reserve(self._cards[number]),
            round(self._experts[own][host:].sum()),
        )

    def _needs(self, cpu_layers: int) -> npt.NDArray[np.float64]:
        """Bytes of the first blocks on a card: of none, of one, and so on."""
        held = np.arange(self._blocks) >= self._host_end(cpu_layers)
        return np.cumsum([0.0, *(self._weights + self._kv + self._experts * held)])

    def _host_end(self, cpu_layers: int) -> int:
        """The first block whose experts are not on the host."""
        return self.shape.expert_blocks[cpu_layers - 1] + 1 if cpu_layers else 0

    def _compute(self, number: int, cpu_layers: int, *, head: bool, several: bool) -> int:
        """Compute buffers of a card. Where pieces follow one another there are more inputs."""
        size, inputs = self._buffer(0 if number else cpu_layers, head)
        more = self.copies - 1 if several and not cpu_layers else 0
        return size + more * inputs

    def _buffer(self, copied_layers: int, head: bool) -> tuple[int, int]:
        """Bytes of a card's buffer and of its inputs. Only the first card receives copies of experts; logits are where
        the head is."""
        if (copied_layers, head) not in self._buffers:
            setting = replace(self.setting, cpu_layers=copied_layers, output=head)
            buffer = ComputeBuffer(self.shape, setting)
            self._buffers[copied_layers, head] = buffer.size, buffer.inputs
        return self._buffers[copied_layers, head]

    def _reserve(self, card: Hardware) -> int:
        return max(card.gpu.reserve_bytes - self.margin_bytes, 0)

    @cached_property
    def _cards(self) -> tuple[Hardware, ...]:
        return self.hardware.cards

    @cached_property
    def _buffers(self) -> dict[tuple[int, bool], tuple[int, int]]:
        return {}

    @cached_property
    def _blocks(self) -> int:
        return blocks_of(self.shape)

    @property
    def _head_bytes(self) -> int:
        return round(self.shape.vocab * self.shape.hidden * self.shape.bits.head / 8)

    @cached_property
    def _weights(self) -> npt.NDArray[np.float64]:
        """Bytes of each block without routed experts; what a file has in addition, such as norms, is shared alike."""
        shape, bits = self.shape, self.shape.bits
        mixture = shape.hidden * shape.experts * bits.router + shape.shared_params * bits.shared
        own = np.array([
            (kind.params * bits.of_attention(kind) + (mixture if experts else shape.dense_ffn_params * bits.dense)) / 8
            for kind, experts in self._kinds
        ])
        table = 0 if shape.tied_embeddings else shape.embedding_bytes
        rest = shape.non_expert_bytes - table - self._head_bytes
        return own * rest / own.sum() if own.sum() else own

    @cached_property
    def _kv(self) -> npt.NDArray[np.float64]:
        """Bytes of each block's keys, values and states, of all sequences."""
        own = np.array([layer_cache_bytes(self.shape, kind, self.setting) for kind, _ in self._kinds])
        return own * kv_cache_bytes(self.shape, self.setting) / own.sum() if own.sum() else own

    @cached_property
    def _experts(self) -> npt.NDArray[np.float64]:
        """Bytes of each block's routed experts."""
        sizes = dict(zip(self.shape.expert_blocks, self.shape.expert_bytes_by_layer, strict=True))
        return np.array([float(sizes.get(block, 0) * self.shape.experts) for block in range(self._blocks)])

    @cached_property
    def _kinds(self) -> list[tuple[Attention, bool]]:
        """Attention of each block, and whether it has experts; blocks beyond the known layers are like the first."""
        kinds, numbers = [kind for kind, _ in self.shape.attention_counts], self.shape.attention_layers or ()
        numbers = (*numbers, *[0] * (self._blocks - len(numbers)))
        blocks: Mapping[int, bool] = dict.fromkeys(self.shape.expert_blocks, True)
        return [(kinds[number], blocks.get(block, False)) for block, number in enumerate(numbers)]


def _one_more(blocks: ByCard, number: int) -> ByCard:
    return tuple(count + (place == number) for place, count in enumerate(blocks))
