"""Strata on several cards in closed form: a range of layers each (``--layer-split``), one after the other in a window.

Each card has a cache of the experts of its own layers, and the pool computes what none holds. The residual streams
of a window's rows cross the host's pinned memory once between two cards; the last one has the head and the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.strata.cache import hit_rate, swapped
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.settings import cache_slots
from trilane.engines.strata.window import WindowCosts, WindowTime, window_time

MOST_TRIED = 4  # cards for which ``auto`` tries all ranges; of more they are in proportion to the slots
RESIDUAL_STREAMS = 4  # hyper-connections; estimate by "a few hundred KB" a window (docs/MULTI_GPU.md)
_BYTES = 4  # of an element that crosses


@dataclass(frozen=True)
class Stage:
    """A card with its layers, and the experts of these in its cache."""

    costs: WindowCosts
    layers: int
    slots: int

    @property
    def held_share(self) -> float:
        """Share of its layers' experts that it holds."""
        return min(self.slots / (self.layers * self.costs.shape.experts), 1.0)

    def counts(self, rows: float, drafts: float, *, same_text: bool = False) -> WindowCounts:
        """Counts of a window in one of its layers."""
        entries = rows * self.costs.shape.top_k
        hits = entries * hit_rate(self.held_share, rows, same_text=same_text)
        return WindowCounts(rows, drafts, hits, entries - hits, 0.0)


def split_time(
    stages: Sequence[Stage], rows: float, drafts: float, context: int, shares: Sequence[float], *,
    same_text: bool = False,
) -> WindowTime:
    """A window of so many rows; ``shares``: of each card's misses, over its own link. Swapped experts come to all cards
    at once."""
    parts = []
    for stage, share in zip(stages, shares, strict=True):
        counts = stage.counts(rows, drafts, same_text=same_text)
        swaps = swapped(stage.held_share, rows) * stage.layers / stage.costs.shape.moe_layers
        final = stage is stages[-1]
        parts.append(window_time(stage.costs, counts, context, share, swaps, layers=stage.layers, final=final))
    sums = {name: sum(getattr(part, name) for part in parts) for name in vars(parts[0])}
    sums["swaps_ns"] = max(part.swaps_ns for part in parts)
    sums["hand_over_ns"] = sum(hand_over_ns(giver.costs, taker.costs, rows) for giver, taker in pairwise(stages))
    return WindowTime(**sums)


def hand_over_ns(giver: WindowCosts, taker: WindowCosts, rows: float) -> float:
    """From one card to the next: a copy to the host, which sees its flag and starts the next graph, and one from it."""
    size = rows * RESIDUAL_STREAMS * giver.shape.hidden * _BYTES
    links = giver.hardware.link, taker.hardware.link
    copies = links[0].d2h_latency_ns + links[1].h2d_latency_ns
    copies_ns = copies + size / links[0].d2h_bytes_per_s * 1e9 + size / links[1].h2d_bytes_per_s * 1e9
    return copies_ns + giver.work.handshake_ns.value + giver.hardware.host.launch_ns


def hits_of(stages: Sequence[Stage], rows: float) -> float:
    """Share of all entries that hit."""
    layers = sum(stage.layers for stage in stages)
    return sum(stage.layers * hit_rate(stage.held_share, rows) for stage in stages) / layers


def card_slots(shape: ModelShape, cards: Sequence[Hardware], context: int, kv_tokens: int) -> tuple[int, ...]:
    """Experts for which each card has room; all hold the dense weights, and keys and values of the whole context."""
    last = len(cards) - 1
    return tuple(
        cache_slots(shape, card, context, kv_tokens, drafts=number == last) for number, card in enumerate(cards)
    )


def ranges(layers: int, slots: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of layers of each card, as ``auto`` tries them."""
    if len(slots) > MOST_TRIED:
        shares = [round(layers * sum(slots[:number]) / max(sum(slots), 1)) for number in range(len(slots) + 1)]
        yield tuple(after - before for before, after in pairwise(shares))
        return
    for ends in combinations(range(1, layers), len(slots) - 1):
        yield tuple(after - before for before, after in pairwise((0, *ends, layers)))


def best_range(
    layers: int, slots: Sequence[int], value: Callable[[int, int], float], fullest: Callable[[int, int], float]
) -> tuple[int, ...]:
    """The layers of each card with the least sum of ``value(card, layers)``; of equal ones, whose fullest card has the
    most room."""
    numbers, cards = range(layers + 1), range(len(slots))
    known = [[(value(card, number), fullest(card, number)) for number in numbers] for card in cards]

    def cost(split: tuple[int, ...]) -> tuple[float, float]:
        each = [known[card][number] for card, number in enumerate(split)]
        return round(sum(one for one, _ in each), 6), max(full for _, full in each)

    return min(ranges(layers, slots), key=cost)


def auto_layers(shape: ModelShape, slots: Sequence[int]) -> tuple[int, ...]:
    """The layers by ``--layer-split auto``: the most of the profile in the caches (docs/MULTI_GPU.md)."""
    def held(card: int, layers: int) -> float:
        return min(slots[card] / max(layers * shape.experts, 1), 1.0)

    return best_range(
        shape.moe_layers, slots, lambda card, layers: -layers * hit_rate(held(card, layers), 1.0),
        lambda card, layers: layers * shape.experts / max(slots[card], 1),
    )


def stages_of(costs: Sequence[WindowCosts], layers: Sequence[int], slots: Sequence[int]) -> tuple[Stage, ...]:
    """Stages, none of which holds more than its layers have."""
    return tuple(
        Stage(one, number, min(room, number * one.shape.experts))
        for one, number, room in zip(costs, layers, slots, strict=True)
    )
