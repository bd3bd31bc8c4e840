"""Memory and splits of engines whose cards work together on every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trilane.engines.card_memory import CardMemory
from trilane.engines.layer_split import blocks_of
from trilane.engines.load_memory import Copied
from trilane.engines.memory import SplitMemory, Splitter, shortages
from trilane.engines.parallel import shares_of
from trilane.engines.shortage import Shortage
from trilane.engines.vllm_memory import PROGRAM_BYTES, UTILIZATION, VllmSplitter


@dataclass(frozen=True)
class ParallelSplitter(Splitter):
    """Splits of which each card holds a part: of experts, of other weights, and of keys and values as many heads as it
    has, or all latents. Buffers and what is kept free are each card's own."""

    def _memory_of(self, cpu_layers: int, gpu_experts: int, copied: Copied) -> SplitMemory:
        one = super()._memory_of(cpu_layers, gpu_experts, copied)
        count = len(self.hardware.cards)
        latent = any(kind.latent for kind, _ in self.shape.attention_counts)  # which all cards have
        kv_share = 1.0 if latent else shares_of(self.shape, count).attention[0]
        cards = tuple(
            CardMemory(
                card.gpu.name, blocks_of(self.shape), card.gpu.memory_bytes, -(-one.every_token_bytes // count),
                round(one.kv_bytes * kv_share), one.compute_bytes, self._kept_free(number),
                -(-one.experts_bytes // count), part=1 / count,
            )
            for number, card in enumerate(self.hardware.cards)
        )
        return replace(
            one, cards=cards, gpu_bytes=sum(card.gpu_bytes for card in cards),
            kv_bytes=sum(card.kv_bytes for card in cards), compute_bytes=count * one.compute_bytes,
            reserve_bytes=sum(card.reserve_bytes for card in cards),
        )

    def _kept_free(self, number: int) -> int:
        return self.hardware.cards[number].gpu.reserve_bytes

    def _short(self, memory: SplitMemory) -> tuple[Shortage, ...]:
        cards = [Shortage("GPU", f"each card, {card.name},", card.gpu_bytes, card.parts)
                 for card in memory.cards if card.missing_bytes > 0]
        return (*cards[:1], *shortages(self.hardware, memory.ram_bytes, {}, memory.host_parts))


@dataclass(frozen=True)
class ParallelVllmSplitter(ParallelSplitter, VllmSplitter):
    """Splits in vLLM, of whose cards a share is its own."""

    def _kept_free(self, number: int) -> int:
        return round((1 - UTILIZATION) * self.hardware.cards[number].gpu.memory_bytes) + PROGRAM_BYTES
