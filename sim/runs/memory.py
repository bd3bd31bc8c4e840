"""The division of the GPU's memory, and what is left of it for cached experts."""

from __future__ import annotations

from dataclasses import dataclass

from sim.costs.window_work import gpu_cache_bytes
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.units import GB


class BudgetError(TrilaneError):
    """The GPU memory is too small; the message says by how many GB."""


@dataclass(frozen=True)
class MemoryPlan:
    """GPU memory divided, in bytes. ``slots`` are experts of average size over all layers; 0 is legal."""

    gpu_memory_bytes: int
    reserve_bytes: int  # context, workspace
    non_expert_bytes: int  # attention, gates, shared experts, dense layers, embeddings; layers that draft
    kv_bytes: int
    staging_bytes: int
    cache_bytes: int  # room that cached experts take or may take
    slots: int

    @property
    def fixed_bytes(self) -> int:
        """All that is not the expert cache."""
        return self.reserve_bytes + self.non_expert_bytes + self.kv_bytes + self.staging_bytes


def plan_memory(
    shape: ModelShape,
    total: int,
    *,
    reserve: int = 0,
    batch: int,
    tokens: int,
    demand_slots: int = 2,
    prefetch_slots: int = 0,
    cached_share: float | None = None,
    draft_layers: float = 0,
    kv_tokens: int = 0,
) -> MemoryPlan:
    """Divide the GPU memory.

    ``total``: its bytes, ``reserve``: those that are kept free. ``tokens``: prompt + generated, of a sequence.
    ``demand_slots`` and ``prefetch_slots``: staging slots, each of the largest expert. ``cached_share``: cache
    round(share x layers x experts) slots instead of as many as fit. ``draft_layers``: MoE layers that draft tokens, all
    of which is on the GPU (their KV cache is left out). ``kv_tokens``: whose keys and values it has; 0: of all.
    Raises BudgetError saying how many GB are missing.
    """
    _check(batch, tokens, demand_slots, prefetch_slots, cached_share)
    kv = batch * gpu_cache_bytes(shape, tokens, kv_tokens)
    staging = (demand_slots + prefetch_slots) * max(shape.expert_bytes_by_layer)
    non_expert = shape.non_expert_bytes + round(draft_layers * shape.moe_layer_bytes)
    room = total - reserve - non_expert - kv - staging
    if room < 0:
        raise _too_small(total, reserve, non_expert, kv, staging)
    return MemoryPlan(total, reserve, non_expert, kv, staging, *_cache(shape, room, cached_share))


def _cache(shape: ModelShape, room: int, share: float | None) -> tuple[int, int]:
    """Bytes and slots of the expert cache."""
    experts = shape.moe_layers * shape.experts
    if share is None:
        cache = min(room, shape.routed_bytes)
        return cache, cache * experts // shape.routed_bytes
    slots = int(share * experts + 0.5)
    cache = -(-shape.routed_bytes * slots // experts)
    if cache > room:
        largest = room * experts // shape.routed_bytes * 1000 // experts / 1000
        raise BudgetError(
            f"{shape.name}: a cached share of {share:g} is {slots} of {experts} experts and takes {cache / GB:.2f} GB, "
            f"but {room / GB:.2f} GB are free: {max((cache - room) / GB, 0.01):.2f} GB are missing; "
            f"the largest share that fits is {largest:.3f}"
        )
    return cache, slots


def _too_small(total: int, reserve: int, non_expert: int, kv: int, staging: int) -> BudgetError:
    need = reserve + non_expert + kv + staging
    return BudgetError(
        f"the GPU memory of {total / GB:.2f} GB is below what runs without any cached expert, {need / GB:.2f} GB "
        f"(non-expert weights {non_expert / GB:.2f}, KV cache {kv / GB:.2f}, staging slots {staging / GB:.2f}, "
        f"reserve {reserve / GB:.2f}): {max((need - total) / GB, 0.01):.2f} GB are missing; use a smaller batch, "
        f"fewer tokens, fewer staging slots or a larger GPU"
    )


def _check(batch: int, tokens: int, demand: int, prefetch: int, share: float | None) -> None:
    """Raise BudgetError for counts and shares out of range."""
    for name, value, low in (
        ("batch", batch, 1), ("tokens", tokens, 1), ("demand_slots", demand, 0), ("prefetch_slots", prefetch, 0),
    ):
        if value < low:
            raise BudgetError(f"{name} must be >= {low}, got {value}")
    if share is not None and not 0 <= share <= 1:
        raise BudgetError(f"cached_share must be within 0..1 of all experts, got {share}")
