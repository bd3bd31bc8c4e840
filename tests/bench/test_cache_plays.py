"""The two ways of playing a cache that the simulator does not have: without time, and with a perfect prefetch."""

from __future__ import annotations

import pytest

from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from tests.bench import without_time
from tests.bench.perfect_prefetch import with_depth

SCENARIO = Scenario(
    trace="synthetic:olmoe-1b-7b/1x8+24/none", model="olmoe-1b-7b", hardware="rtx-5070+ddr5-5600",
    policy="llama-cache-lru", engine="llama.cpp-uploads", cached_share=0.5, prompt_tokens=8, generated_tokens=24,
)  # fmt: skip


@pytest.fixture(autouse=True)
def two_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_time, "TEXTS", 2)
    monkeypatch.setattr(without_time, "PROMPT", 8)
    monkeypatch.setattr(without_time, "ANSWER", 8)


def test_without_time_a_slower_link_changes_nothing() -> None:
    slow = SCENARIO.with_(hardware_overrides={"link.h2d_bytes_per_s": 1e9})
    assert without_time.replayed(slow) == without_time.replayed(SCENARIO)
    assert play(prepare(slow)).metrics.decode_served_hit_rate < play(prepare(SCENARIO)).metrics.decode_served_hit_rate


def test_without_time_a_stricter_admission_uploads_less() -> None:
    second = SCENARIO.with_(parameters={"admits": "second"})
    every, few = without_time.replayed(SCENARIO), without_time.replayed(second)
    assert 0 < few["uploads_per_token"] < every["uploads_per_token"] <= 2 * 16, "two a layer and step"


def test_a_prefetch_of_no_depth_is_the_policy_itself() -> None:
    alone, with_none = (play(each).metrics for each in (prepare(SCENARIO), with_depth(SCENARIO, 0)))
    assert (alone.tpot_ms, alone.decode_served_hit_rate) == (with_none.tpot_ms, with_none.decode_served_hit_rate)


def test_what_the_next_token_uses_hits_more_often() -> None:
    rates = [play(with_depth(SCENARIO, depth)).metrics.decode_served_hit_rate for depth in (0, 1, 2)]
    assert rates == sorted(rates)
    assert rates[0] < rates[2]
