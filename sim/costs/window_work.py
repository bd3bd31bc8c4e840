"""Numbers of an engine whose steps are windows: a token and its drafts, verified together, with a pool of threads that
computes experts next to the GPU, layer by layer (formulas: ``trilane.engines.strata.window``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

from sim.costs.software import Ns, Rate, Share
from sim.machine.sourced import Sourced
from traces.models.attention import Attention
from traces.models.shape import ModelShape
from trilane.common.hints import at_least, between


class WindowWork(NamedTuple):
    """Times of one window, and its settings where none are chosen.

    A layer is planned by the host when its routing is there; then the GPU's part (shared expert, experts that it has,
    those that cross the link) and the pool's run side by side. ``layer_ns`` and the reads of weights are those of
    ``GpuWork``; times of the GPU that are stated here hold for the same card.
    """

    rows: Sourced[Annotated[int, between(1, 8)]]  # of a window: a token and its drafts
    min_draft_probability: Sourced[Annotated[float, between(0, 1)]]  # of a draft, for another one behind it
    pcie_share: Sourced[Annotated[float, between(0, 1)]]  # of missed experts, that cross the link
    share_bytes_per_s: Sourced[Rate]  # of the link, below which the share is smaller in proportion
    most_pcie_experts: Sourced[Annotated[int, at_least(1)]]  # of a layer
    row_ns: Sourced[Ns]  # of a layer on the GPU, for each row but the first
    handshake_ns: Sourced[Ns]  # of a layer: the routing to the host, the plan, flags back to the GPU
    group_ns: Sourced[Ns]  # of a grouped call for some experts, with those that quantise
    group_read_share: Sourced[Share]  # of the card's bandwidth, that such a call reaches
    group_row_share: Sourced[Annotated[float, between(0, 4)]]  # of an expert's time, for each row but the first
    fetch_share: Sourced[Share]  # of the link's rate, that a copying kernel reaches
    pool_ns: Sourced[Ns]  # of a layer with experts on the CPU: activations, jobs, barriers
    gate_up_share: Sourced[Share]  # of an expert's time in the pool, before its threads wait for one another
    barrier_ns: Sourced[Ns]  # of pool_ns, between the two phases
    draft_ns: Sourced[Ns]  # of each draft, in addition to reading its weights
    draft_bytes: Sourced[Annotated[float, between(0, 1e12)]]  # that each draft reads: its layer and its head
    prompt_token_ns: Sourced[Ns]  # of each token of a prompt's first piece: rows of the n-gram table
    borrowed_bytes: Sourced[Annotated[float, between(0, 1e12)]]  # of the cache, by a prompt, and filled again after it
    commit_ns: Sourced[Ns]  # of a window: states of the rows that are kept
    host_ns: Sourced[Ns]  # of a window: rows of the n-gram table, tokens
    selected_tokens: Sourced[Annotated[int, at_least(1)]]  # of the context, that sparse attention reads
    selection_ns: Sourced[Ns]  # of a layer of sparse attention, for each 1,024 tokens among which it selects
    repeated: Sourced[Annotated[float, between(0, 1)]]  # of a further row's experts, that earlier rows chose
    kv_tokens: Sourced[Annotated[int, at_least(0)]]  # whose keys and values the GPU has, the host all of them; 0: all
    kv_resolve_ns: Sourced[Ns]  # of a layer of sparse attention, to find those that it lacks
    kv_missed: Sourced[Annotated[float, between(0, 1)]]  # of selected tokens, with room for 8,192 of 131,072
    kv_missed_by_room: Sourced[Annotated[float, between(0, 4)]]  # exponent: as the room shrinks
    kv_missed_by_context: Sourced[Annotated[float, between(0, 4)]]  # exponent: as the context grows


def index_width(kind: Attention) -> int:
    """Elements a token and layer of the keys by which sparse attention selects."""
    return max(kind.kv_width - 2 * kind.head_dim * _kv_heads(kind), 0) if kind.reach == "full" else 0


def _kv_heads(kind: Attention) -> int:
    return kind.kv_width // (2 * kind.head_dim)


def kv_width(kind: Attention) -> int:
    """Elements a token and layer of the keys and values from which sparse attention selects."""
    return kind.kv_width - index_width(kind) if kind.reach == "full" else 0


def gpu_cache_bytes(shape: ModelShape, tokens: int, kv_tokens: int) -> int:
    """Bytes that a sequence keeps on a GPU that has the keys and values of ``kv_tokens`` tokens; 0: of all."""
    on_host = max(tokens - kv_tokens, 0) if kv_tokens else 0
    return shape.cache_bytes(tokens) - kv_bytes(shape, on_host)


def kv_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of so many tokens' keys and values from which sparse attention selects."""
    return round(tokens * shape.layers * shape.mean_of_layers(kv_width) * shape.cache_bits / 8)


def with_selected(shape: ModelShape, tokens: int) -> ModelShape:
    """The model with a window of so many tokens in place of its full attention."""
    kinds = tuple(
        replace(kind, reach="window", span=tokens, kv_width=kind.kv_width - index_width(kind))
        if kind.reach == "full" else kind
        for kind in shape.attention or ()
    )
    return replace(shape, attention=kinds or None)
