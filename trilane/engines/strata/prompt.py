"""The time of a prompt in Strata, in closed form: pieces, whose missing experts come over the link while others run."""

from __future__ import annotations

from itertools import accumulate

from sim.costs.window_costs import streamed_ns
from sim.costs.window_work import index_width
from trilane.engines.split_speed import StaticSplit, prompt_time
from trilane.engines.strata.cache import hit_rate
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.window import WindowCosts, window_time

LEAST_PIECE = 512  # tokens, where the cache is too small for the buffers of more
INDEX_HEADS = 4  # of queries by which sparse attention selects: indexer_n_heads of config.json


def prompt_ms(costs: WindowCosts, tokens: int, before: int, held_share: float, pcie_share: float) -> float:
    """Time of ``tokens`` of a prompt after ``before`` others, with a share of all experts in the cache, which lends its
    slots to the buffers of a piece: a small one takes small pieces.

    Very short ones are read through windows, of whose misses ``pcie_share`` crosses the link.
    """
    if tokens < costs.engine.prompt.copies_from_tokens.value:
        return _through_windows(costs, tokens, before, held_share, pcie_share)
    piece = piece_of(costs, held_share * costs.shape.routed_bytes, tokens)
    borrowed = borrowed_bytes(costs, held_share * costs.shape.routed_bytes, piece)
    held = held_share - borrowed / costs.shape.routed_bytes
    start_ns = piece * costs.work.prompt_token_ns.value
    refill_ns = borrowed / costs.hardware.link.h2d_bytes_per_s * 1e9
    return (pieces_ns(costs, tokens, before, piece, held) + start_ns + refill_ns) / 1e6


def piece_of(costs: WindowCosts, cache_bytes: float, tokens: int) -> int:
    """Tokens of a piece, whose buffers a cache of that size lends."""
    most = costs.engine.prompt.piece_tokens.value
    room = int(cache_bytes * most / costs.work.borrowed_bytes.value)
    return min(tokens, most, max(room, LEAST_PIECE))


def borrowed_bytes(costs: WindowCosts, cache_bytes: float, piece: int) -> float:
    """Bytes of a cache that the buffers of a piece take."""
    most = costs.engine.prompt.piece_tokens.value
    return min(piece * costs.work.borrowed_bytes.value / most, cache_bytes)


def pieces_ns(costs: WindowCosts, tokens: int, before: int, piece: int, held: float) -> float:
    """Pieces of a prompt through all layers, with a share of the experts in the cache."""
    split = StaticSplit(costs.shape.moe_layers, round(held * costs.shape.experts), costs.threads, piece)
    time = prompt_time(costs.sparse, costs.hardware, costs.engine, split, tokens, before)
    return time.total_ns + _index_ns(costs, tokens, before) + _kv_ns(costs, tokens, before, piece)


def _through_windows(costs: WindowCosts, tokens: int, before: int, held_share: float, pcie_share: float) -> float:
    rows = costs.work.rows.value
    entries = float(rows * costs.shape.top_k)
    hits = entries * hit_rate(held_share, rows)
    window = WindowCounts(float(rows), 0.0, hits, entries - hits, 0.0)
    return -(-tokens // rows) * window_time(costs, window, before + tokens, pcie_share).total_ns / 1e6


def _kv_ns(costs: WindowCosts, tokens: int, before: int, piece: int) -> float:
    """Copies of earlier keys and values from the host, of one layer after another in each piece."""
    lengths = [min(first + piece, tokens) - first for first in range(0, tokens, piece)]
    ends = accumulate(lengths, initial=before)
    return costs.shape.layers * sum(
        streamed_ns(costs.shape, costs.hardware, costs.work, length, end + length)
        for length, end in zip(lengths, ends, strict=False)
    )


def _index_ns(costs: WindowCosts, tokens: int, before: int) -> float:
    """Scores of all earlier keys, by which the blocks are selected."""
    pairs = tokens * (before + tokens / 2)
    width = costs.shape.mean_of_layers(index_width) * costs.shape.layers
    rate = costs.hardware.gpu.effective_flops_per_s * costs.engine.gpu.attention_share.value
    return 2.0 * INDEX_HEADS * width * pairs / rate * 1e9
