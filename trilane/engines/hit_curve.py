"""Hit rates of caches of experts by their size, on the routing that answers a question.

They are those of an LRU cache (``trilane.engines.routing`` has the routing). 45, 61, 79, 88 and 90 % were logged on an
R9700 with room for 4.3, 8.5, 17, 26 and 30 % of the experts of 41 layers of Qwen3.8-Flash-Next (512 experts, 10 a
token; repository audiagentic/bigcherry, patch 1337, docs/planning BCOP39). The synthetic routing of Qwen3-Next-80B,
which has as many experts and chooses as many, gives 44, 65, 82, 86 and 88 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from traces.batches import LayerUse, layer_uses
from traces.trace import Trace
from trilane.engines.question import Question
from trilane.engines.routing import routing_for
from trilane.engines.split_speed import Floats

_SHARES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)  # of the experts that the host keeps


@dataclass(frozen=True)
class HitCurve:
    """Hit rates of decode steps, by the share of the experts for which there is room; straight lines in between."""

    known_shares: tuple[float, ...]
    known_rates: tuple[float, ...]

    def rates(self, held: Floats) -> Floats:
        """The hit rates with room for these shares; 0 without room."""
        return np.interp(held, (0.0, *self.known_shares), (0.0, *self.known_rates))


def hit_curve(question: Question) -> HitCurve:
    """Return the hit rates of the routing that answers a question. Raises TraceError."""
    return _replayed(routing_for(question).trace)


@lru_cache(maxsize=4)
def _replayed(trace: Trace) -> HitCurve:
    """Hit rates of a trace, whatever the machine and the goal are."""
    shape, uses = trace.shape, list(layer_uses(trace))
    least = max(shape.expert_bytes_by_layer)
    sizes = [max(round(share * shape.routed_bytes), least) for share in _SHARES]
    return HitCurve(_SHARES, tuple(lru_hit_rate(uses, shape.expert_bytes_by_layer, size) for size in sizes))


def lru_hit_rate(uses: Iterable[LayerUse], expert_bytes: Sequence[int], cache_bytes: int) -> float:
    """Share of the experts of decode steps that are in an LRU cache, empty at first, when their layer needs them.

    ``expert_bytes``: of an expert, by layer. A layer's experts are looked up together, and none of them makes room for
    another. (``trilane cache-curve`` has this cache among others; a test compares them.)
    """
    held: OrderedDict[tuple[int, int], None] = OrderedDict()  # least recently used first
    hits = lookups = 0
    free_bytes = cache_bytes
    for use in uses:
        keys = [(use.layer, expert) for expert in use.active]
        present = [key for key in keys if key in held]
        if use.phase == "decode":
            hits, lookups = hits + len(present), lookups + len(keys)
        missing = [key for key in keys if key not in held]
        for key in present:
            held.move_to_end(key)
        for key in missing:
            free_bytes = _admit(held, key, {*keys}, expert_bytes, free_bytes)
    return hits / lookups if lookups else 0.0


def _admit(
    held: OrderedDict[tuple[int, int], None], key: tuple[int, int], kept: set[tuple[int, int]],
    expert_bytes: Sequence[int], free_bytes: int,
) -> int:
    """Put an expert into the cache in place of the oldest, unless ``kept`` leave no room; return the free bytes."""
    size, victims, room = expert_bytes[key[0]], [], free_bytes
    for other in held:
        if room >= size:
            break
        if other not in kept:
            victims.append(other)
            room += expert_bytes[other[0]]
    if room < size:
        return free_bytes
    for victim in victims:
        del held[victim]
    held[key] = None
    return room - size
