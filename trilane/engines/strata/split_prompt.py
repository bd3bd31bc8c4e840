"""The time of a prompt on several cards: its pieces follow one another through the cards, each with its own layers."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.engines.strata.prompt import borrowed_bytes, piece_of, pieces_ns
from trilane.engines.strata.split import Stage, split_time


def split_prompt_ms(stages: Sequence[Stage], tokens: int, before: int, shares: Sequence[float]) -> float:
    """Time of ``tokens`` of a prompt after ``before`` others; very short ones are read through windows.

    Each card's cache lends its slots to the buffers of a piece; all are filled again at once.
    """
    costs = stages[0].costs
    if tokens < costs.engine.prompt.copies_from_tokens.value:
        rows = costs.work.rows.value
        return -(-tokens // rows) * split_time(stages, float(rows), 0.0, before + tokens, shares).total_ns / 1e6
    caches = [stage.slots * stage.costs.expert_bytes for stage in stages]
    piece = min(piece_of(stage.costs, size, tokens) for stage, size in zip(stages, caches, strict=True))
    lent = [borrowed_bytes(stage.costs, size, piece) for stage, size in zip(stages, caches, strict=True)]
    lending, end = list(zip(stages, lent, strict=True)), before + tokens
    times = [
        [_piece_ns(stage, size, first, min(piece, end - first)) for stage, size in lending]
        for first in range(before, end, piece)
    ]
    refill_ns = max(size / stage.costs.hardware.link.h2d_bytes_per_s * 1e9 for stage, size in lending)
    return (pipelined_ns(times) + piece * costs.work.prompt_token_ns.value + refill_ns) / 1e6


def _piece_ns(stage: Stage, lent: float, before: int, tokens: int) -> float:
    """A piece through the layers of a card, whose cache lends so many bytes."""
    shape = stage.costs.shape
    held = max(stage.slots - lent / stage.costs.expert_bytes, 0.0) / (stage.layers * shape.experts)
    return pieces_ns(stage.costs, tokens, before, tokens, min(held, 1.0)) * stage.layers / shape.moe_layers


def pipelined_ns(times: Sequence[Sequence[float]]) -> float:
    """The end of pieces that go through stages in turn, with the times of each in each: a piece waits for the one
    before it, and a stage for the piece."""
    ends = [0.0] * len(times[0])
    for piece in times:
        ready = 0.0
        for stage, ns in enumerate(piece):
            ready = ends[stage] = max(ready, ends[stage]) + ns
    return ends[-1]
