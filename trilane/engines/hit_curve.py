"""Hit rates of caches of experts by their size, on the routing that answers a question.

They are those of an LRU cache (``trilane.engines.routing`` has the routing). 45, 61, 79, 88 and 90 % were logged on an
R9700 with room for 4.3, 8.5, 17, 26 and 30 % of the experts of 41 layers of Qwen3.8-Flash-Next (512 experts, 10 a
token; repository audiagentic/bigcherry, patch 1337, docs/planning BCOP39). Its synthetic routing is fitted to these
rates; a short answer from an empty cache hits 39, 56, 72, 81 and 84 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from traces.batches import LayerUse, layer_uses
from traces.trace import Trace
from trilane.engines.question import Question
from trilane.engines.routing import routing_for
from trilane.engines.split_speed import Floats

_SHARES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)  # of the experts that the host keeps


@dataclass(frozen=True)
class HitCurve:
    """Hit rates of decode steps, by the share of the experts for which there is room; straight lines in between.

    ``first_uses``: share of the experts of these steps that were not used before.
    """

    known_shares: tuple[float, ...]
    known_rates: tuple[float, ...]
    first_uses: float = 0.0

    def rates(self, held: Floats) -> Floats:
        """The hit rates with room for these shares; 0 without room."""
        return np.interp(held, (0.0, *self.known_shares), (0.0, *self.known_rates))


def hit_curve(question: Question) -> HitCurve:
    """Return the hit rates of the routing that answers a question. Raises TraceError."""
    return replayed(routing_for(question).trace)


@lru_cache(maxsize=4)
def replayed(trace: Trace) -> HitCurve:
    """Hit rates of a trace, whatever the machine and the goal are."""
    shape, uses = trace.shape, [*layer_uses(trace)]
    least = max(shape.expert_bytes_by_layer)
    sizes = [max(round(share * shape.routed_bytes), least) for share in _SHARES]
    rates = lru_hit_rates(uses, shape.expert_bytes_by_layer, sizes)
    return HitCurve(_SHARES, tuple(rates), _first_uses(uses))


def _first_uses(uses: Iterable[LayerUse]) -> float:
    used, first, lookups = set[tuple[int, int]](), 0, 0
    for use in uses:
        keys = {(use.layer, expert) for expert in use.active}
        if use.phase == "decode":
            first, lookups = first + len(keys - used), lookups + len(keys)
        used |= keys
    return first / lookups if lookups else 0.0


class _Lookup(NamedTuple):
    """Experts that a layer looks up together: a number of its own each."""

    experts: tuple[int, ...]
    expert_bytes: int
    counts: bool  # of a decode step


def lru_hit_rates(uses: Iterable[LayerUse], expert_bytes: Sequence[int], cache_sizes: Iterable[int]) -> list[float]:
    """Share of the experts of decode steps that are in LRU caches of these sizes, empty at first, when a layer needs
    them.

    ``expert_bytes``: of an expert, by layer. A layer's experts are looked up together, and none of them makes room for
    another. Those that hit are used before those that miss, so that the order depends on the size, and no pass of stack
    distances gives all sizes at once. (``trilane cache-curve`` has this cache among others; a test compares them.)
    """
    numbers: dict[tuple[int, int], int] = {}
    lookups = [
        _Lookup(
            tuple(numbers.setdefault((use.layer, expert), len(numbers)) for expert in use.active),
            expert_bytes[use.layer], use.phase == "decode",
        )
        for use in uses
    ]
    bytes_of = [expert_bytes[layer] for layer, _ in numbers]
    total = sum(len(one.experts) for one in lookups if one.counts)
    return [_hits(lookups, bytes_of, size) / total if total else 0.0 for size in cache_sizes]


def _hits(lookups: Sequence[_Lookup], bytes_of: Sequence[int], cache_bytes: int) -> int:
    """Number of hits of those lookups that count."""
    held: OrderedDict[int, None] = OrderedDict()  # least recently used first
    hits, free_bytes = 0, cache_bytes
    for experts, size, counts in lookups:
        present = [expert for expert in experts if expert in held]
        hits += len(present) * counts
        for expert in present:
            held.move_to_end(expert)
        room = cache_bytes // size - len(present)  # for others, if all but these make room
        for expert in [expert for expert in experts if expert not in held][:room]:
            while free_bytes < size:
                free_bytes += bytes_of[held.popitem(last=False)[0]]
            held[expert], free_bytes = None, free_bytes - size
    return hits
