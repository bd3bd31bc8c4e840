"""The cache that swaps within layers: hits counted by hand, and the stored rates against a new simulation."""

from __future__ import annotations

import numpy as np
import pytest

from traces.library import load_trace
from trilane.engines.strata.cache import RATES, SHARES, ReplayedTier, answered, hit_rate, profile, simulated, swapped

RANKING = np.array([0, 1, 4, 5, 2, 3, 6, 7])  # of 2 layers of 4 experts: the first two of each, then the others


def windows(tier: ReplayedTier, *ids: int) -> list[int]:
    """Hits of one-row windows that choose these experts of layer 0, and expert 0 of layer 1."""
    return [tier.window(np.array([[[one], [0]]], np.int16)) for one in ids]


def test_the_profile_fills_the_slots_and_a_layer_keeps_its_number() -> None:
    tier = ReplayedTier(RANKING, 4, 2, 4)
    assert tier.resident.tolist() == [[True, True, False, False]] * 2
    windows(tier, 3, 3, 3, 3)
    assert tier.resident.sum(axis=1).tolist() == [2, 2]


def test_an_expert_comes_in_after_four_windows_if_it_was_used_often_enough() -> None:
    tier = ReplayedTier(RANKING, 4, 2, 4)
    assert windows(tier, 3, 3, 0, 0) == [1, 1, 2, 2]
    assert windows(tier, 3, 1) == [2, 1]  # for expert 1, which was not used
    once = ReplayedTier(RANKING, 4, 2, 4)
    windows(once, 3, 0, 0, 0)
    assert not once.resident[0, 3]  # one use is too few


def test_uses_count_less_after_every_round() -> None:
    tier = ReplayedTier(RANKING, 4, 2, 4)
    windows(tier, 0, 0, 0, 0)
    assert tier.uses[0, 0] == pytest.approx(4 * 0.7)


def test_all_experts_hit_with_room_for_all() -> None:
    trace = load_trace("synthetic:qwen3.8-flash-next:2/2x4+12")
    ids = [trace.topk_ids[trace.sequence == number] for number in (0, 1)]
    ranking = profile(trace)
    assert answered(ids, ranking, ranking.size, trace.shape.experts, 3) == (1.0, 0.0)
    assert answered(ids, ranking, 0, trace.shape.experts, 3) == (0.0, 0.0)


def test_rates_grow_with_the_cache() -> None:
    for rows in (1.0, 2.5, 4.0):
        rates = [hit_rate(share, rows) for share in (0.0, *SHARES, 1.0)]
        assert rates == sorted(rates)
        assert (rates[0], rates[-1]) == (0.0, 1.0)
        assert all(hit_rate(share, rows, same_text=True) >= hit_rate(share, rows) for share in SHARES)


def test_swaps_are_counted_and_end_where_all_fit() -> None:
    tier = ReplayedTier(RANKING, 4, 2, 4)
    windows(tier, 3, 3, 0, 0)
    assert (tier.swaps, tier.windows) == (1, 4)
    assert swapped(0.0, 3) == swapped(1.0, 3) == 0
    assert 90 < swapped(0.2, 3) <= 96
    assert swapped(0.9, 3) < swapped(0.6, 3)


def test_stored_rates_are_those_of_the_simulation() -> None:
    (again,) = simulated([0.2], [3])
    line = f"3,0.2,{again.other_text},{again.same_text},{again.swaps}"
    assert line in RATES.read_text(encoding="utf-8").splitlines()
