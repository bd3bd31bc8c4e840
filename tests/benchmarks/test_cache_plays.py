"""Ways of playing a cache that the simulator does not have: without time, answers in a row, a perfect prefetch."""

from __future__ import annotations

import pytest

from benchmarks import cache_plays
from benchmarks.cache_plays import Play, answers_in_a_row, by_formula, rerouted, with_depth, without_the_first
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.library import load_trace

SCENARIO = Scenario(
    trace="synthetic:olmoe-1b-7b/1x8+24/none", model="olmoe-1b-7b", hardware="rtx-5070+ddr5-5600",
    policy="llama-cache-lru", engine="llama.cpp-uploads", cached_share=0.5, prompt_tokens=8, generated_tokens=24,
)


@pytest.fixture(autouse=True)
def two_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_plays, "TEXTS", 2)
    monkeypatch.setattr(cache_plays, "ANSWER", 8)


def test_without_time_a_slower_link_changes_nothing() -> None:
    slow = SCENARIO.with_(hardware_overrides={"link.h2d_bytes_per_s": 1e9})
    assert cache_plays.replayed(slow, 8) == cache_plays.replayed(SCENARIO, 8)
    assert play(prepare(slow)).metrics.decode_served_hit_rate < play(prepare(SCENARIO)).metrics.decode_served_hit_rate


def test_without_time_a_stricter_admission_uploads_less() -> None:
    second = SCENARIO.with_(parameters={"admits": "second"})
    every, few = cache_plays.replayed(SCENARIO, 8), cache_plays.replayed(second, 8)
    assert 0 < few["uploads_per_token"] < every["uploads_per_token"] <= 2 * 16, "two a layer and step"


def test_a_prefetch_of_no_depth_is_the_policy_itself() -> None:
    alone, with_none = (play(each).metrics for each in (prepare(SCENARIO), with_depth(SCENARIO, 0)))
    assert (alone.tpot_ms, alone.decode_served_hit_rate) == (with_none.tpot_ms, with_none.decode_served_hit_rate)


def test_what_the_next_token_uses_hits_more_often() -> None:
    rates = [play(with_depth(SCENARIO, depth)).metrics.decode_served_hit_rate for depth in (0, 1, 2)]
    assert rates == sorted(rates)
    assert rates[0] < rates[2]


def test_answers_in_a_row_are_those_of_the_texts() -> None:
    texts = load_trace("synthetic:olmoe-1b-7b/2x8+24/none")
    trace = answers_in_a_row("synthetic:olmoe-1b-7b", (1, 0, 1), 8, 24)
    assert (len(trace), set(trace.sequence), list(trace.position)) == (80, {0}, list(range(80)))
    answers = [texts.topk_ids[(texts.sequence == text) & (texts.phase == 1)].tolist() for text in (0, 1)]
    found = trace.topk_ids[8:].reshape(3, 24, *trace.topk_ids.shape[1:]).tolist()
    assert found == [answers[1], answers[0], answers[1]]


def test_the_first_answer_warms_the_cache() -> None:
    assert without_the_first({"tokens_per_s": 20.0, "q": 1.0}, {"tokens_per_s": 10.0, "q": 2.0}, 3) == {
        "tokens_per_s": 40.0, "q": 1.0,
    }
    again, once = Play(SCENARIO, answers=(0, 0)).facts(), Play(SCENARIO, answers=()).facts()
    assert again["tokens_per_s"] > once["tokens_per_s"]
    assert again["hit_rate"] > once["hit_rate"], "of both answers"


def test_a_change_of_text_costs_hits() -> None:
    change, same = (Play(SCENARIO, answers=texts).facts()["hit_rate"] for texts in ((0, 1), (0, 0)))
    assert change < same


def test_routing_that_repeats_itself_and_that_does_not() -> None:
    trace = load_trace(SCENARIO.trace)
    same, other = rerouted(trace, "same").topk_ids[8:], rerouted(trace, "other").topk_ids[8:]
    assert (same == trace.topk_ids[8]).all()
    assert 0.05 < (other[:-1, :, :, None] == other[1:, :, None, :]).any(-1).mean() < 0.2, "8 of 64"
    facts = {how: Play(SCENARIO, routed=how).facts()["hit_rate"] for how in ("same", None, "other")}
    assert facts["same"] > facts[None] > facts["other"]


def test_speed_by_the_formula() -> None:
    facts = by_formula({"hit_rate": 0.91, "uploads_per_token": 23.6, "tokens_per_s": 1.0})
    assert facts["tokens_per_s"] == pytest.approx(109.3, abs=0.1), "its own fit"
