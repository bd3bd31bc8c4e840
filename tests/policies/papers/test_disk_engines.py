"""Policies made for a disk: who leaves a cache of the GPU that it fills, and what is read ahead of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from policies.mechanism.views import ExpertId, ResidencyView
from policies.papers.disk_engines import DecodeLru, LayersAhead
from policies.papers.flashmoe import ReuseCache, ReuseDistances
from tests.kit.views import NO_PLAN, costs, view

COST = costs((5,), (20,))
TURNS = np.array([0, 1, 0, 1], np.int16).reshape(4, 1, 1)  # two of four experts, in turn


def keys(*experts: int, layer: int = 0) -> list[ExpertId]:
    return [ExpertId(layer, expert) for expert in experts]


def test_the_time_until_the_next_use_is_the_mean_of_what_was_counted() -> None:
    """Cut at three tokens. Just used: 2, 2, and 3, 3 at the end; one token ago: 1, 1 and 3; else 1, and 8 times 3."""
    distances = ReuseDistances(TURNS, experts=4, window=2)
    assert distances.of(0, 1, 1) == 10 / 4
    assert distances.of(0, 2, 1) == pytest.approx(5 / 3)
    assert distances.of(0, 3, 0) == distances.of(0, 9, 0) == pytest.approx(25 / 9)
    assert distances.of(0, 1, 2) == 10 / 4  # never seen: the mean of its recency


def test_the_expert_that_is_expected_last_leaves_though_it_was_used_last() -> None:
    cache = ReuseCache(ReuseDistances(TURNS, experts=4, window=2), layers=1, experts=4)
    for key in keys(0, 1):
        cache.admitted(key, 0)
    for expert in (1, 0):
        cache.observe(view({expert: 1}, COST))
    assert cache.victim(ExpertId(0, 2), 0, ()) == ExpertId(0, 0)
    assert cache.victim(ExpertId(0, 2), 0, keys(0)) == ExpertId(0, 1)
    cache.evicted(ExpertId(0, 0), 0)
    cache.evicted(ExpertId(0, 1), 0)
    assert cache.victim(ExpertId(0, 2), 0, ()) is None


def test_prompts_evict_nothing_from_the_cache_that_decode_steps_share() -> None:
    cache = DecodeLru()
    for key in keys(0, 1):
        cache.admitted(key, 0)
    cache.observe(view({0: 1}, COST, phase="prefill"))
    assert cache.victim(ExpertId(0, 2), 0, ()) is None
    cache.observe(view({0: 1}, COST, phase="decode"))
    assert cache.victim(ExpertId(0, 2), 0, ()) == ExpertId(0, 1)


def test_the_next_layers_of_a_prompt_are_read_ahead_in_full_but_for_what_the_gpu_holds() -> None:
    looked = view({0: 1}, COST, phase="prefill")._replace(
        costs=[COST] * 4, residency=ResidencyView([(), (1,), (), ()], [()] * 4)
    )
    ahead = LayersAhead(2, experts=2)
    assert ahead.rank(looked, (), NO_PLAN) == [*keys(0, layer=1), *keys(0, 1, layer=2)]
    assert ahead.rank(looked._replace(layer=2), (), NO_PLAN) == keys(0, 1, layer=3)
    assert ahead.rank(looked._replace(phase="decode"), (), NO_PLAN) == ()
