"""Hit rates of LRU caches: against a list that is searched from its end, and what must hold of any such cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.batches import LayerUse
from trilane.engines.hit_curve import HitCurve, lru_hit_rates

LAYERS, EXPERTS = 3, 5
USES = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.sampled_from(["prefill", "decode"]),
              st.sets(st.integers(0, EXPERTS - 1), min_size=1)),
    max_size=25,
).map(lambda drawn: [
    LayerUse(step, layer, phase, tuple(sorted(experts)), (1,) * len(experts))
    for step, (layer, phase, experts) in enumerate(drawn)
])
SIZES = st.lists(st.integers(1, 4), min_size=LAYERS, max_size=LAYERS)


def slowly(uses: Sequence[LayerUse], expert_bytes: Sequence[int], cache_bytes: int) -> float:
    """The same cache as a list, least recently used first."""
    held: list[tuple[int, int]] = []
    hits = lookups = 0
    for use in uses:
        asked = [(use.layer, expert) for expert in use.active]
        present = [key for key in asked if key in held]
        if use.phase == "decode":
            hits, lookups = hits + len(present), lookups + len(asked)
        held = [*(key for key in held if key not in present), *present]
        for key in asked:
            if key not in present:
                held = _with(held, key, asked, expert_bytes, cache_bytes)
    return hits / lookups if lookups else 0.0


def _with(
    held: list[tuple[int, int]], key: tuple[int, int], asked: list[tuple[int, int]], sizes: Sequence[int], room: int
) -> list[tuple[int, int]]:
    """The cache with one more expert, in place of the oldest that are not asked for; unchanged where these are not
    enough."""
    others, kept = [one for one in held if one not in asked], [one for one in held if one in asked]
    while True:
        if sum(sizes[layer] for layer, _ in (*others, *kept, key)) <= room:
            return [*others, *kept, key]
        if not others:
            return held
        others = others[1:]


@given(USES, SIZES, st.lists(st.integers(4, 80), min_size=1, max_size=3))
def test_rates_are_those_of_a_list(uses: list[LayerUse], sizes: list[int], rooms: list[int]) -> None:
    assert lru_hit_rates(uses, sizes, rooms) == [slowly(uses, sizes, room) for room in rooms]


@given(USES, SIZES)
def test_with_room_for_all_only_first_uses_miss(uses: list[LayerUse], sizes: list[int]) -> None:
    places = [[(use.layer, expert) for expert in set(use.active)] for use in uses]
    first = {key: uses[index].phase for index in reversed(range(len(uses))) for key in places[index]}
    misses = sum(phase == "decode" for phase in first.values())
    lookups = sum(len(keys) for use, keys in zip(uses, places, strict=True) if use.phase == "decode")
    [rate] = lru_hit_rates(uses, sizes, [LAYERS * EXPERTS * max(sizes)])
    assert rate == (pytest.approx(1 - misses / lookups) if lookups else 0.0)


def test_a_prompt_fills_the_cache_and_does_not_count() -> None:
    uses = [LayerUse(0, 0, "prefill", (0, 1), (1, 1)), LayerUse(1, 0, "decode", (0, 2), (1, 1))]
    assert lru_hit_rates(uses, (1,), [3, 1]) == [0.5, 0.5]  # of a prompt that is too large the first experts stay
    assert lru_hit_rates(uses[:1], (1,), [3]) == [0.0]


def test_between_known_shares_are_straight_lines_from_nothing_on() -> None:
    curve = HitCurve((0.5, 1.0), (0.6, 0.8))
    assert curve.rates(np.array([0.0, 0.25, 0.5, 0.75, 1.0, 2.0])) == pytest.approx([0.0, 0.3, 0.6, 0.7, 0.8, 0.8])
