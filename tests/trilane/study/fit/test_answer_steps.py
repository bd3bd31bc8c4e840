"""Few decode steps stand for a long answer: at the right places, with the right weights."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.hardware import load_hardware
from sim.runs.spans import Row, Span
from traces.batches import compose
from traces.library import load_trace
from trilane.study.fit.answer_steps import mean_of_answer, most_steps, one_by_one, spread
from trilane.study.fit.asked import resolved
from trilane.study.fit.policy_result import bounds_beside, play_policy, times_of
from trilane.study.fit.question import Question
from trilane.study.fit.routing import routing_for

PARTS: dict[str, Any] = {"model": "mini-moe", "gpu": "rtx-4080", "ram": "ddr5-5600"}
SMALL = ("mixtral-offloading@impl", "dali", "best-exact", "oracle")


def places(generated: int, played: int) -> list[int]:
    asked = Question(**PARTS, context=1000, generated=generated, batch=2)
    steps = compose(load_trace("mini-moe"), batch=2, prompt_tokens=8, generated_tokens=played)
    prefill, *decode = (step.context for step in spread(steps, asked))
    assert prefill == (0, 0)
    assert all(one == other for one, other in decode)
    return [one - 1000 for one, _ in decode]


@pytest.mark.parametrize(
    ("generated", "played", "before"),
    [(4, 4, [0, 1, 2, 3]), (10, 4, [0, 1, 5, 9]), (46, 6, [0, 1, 2, 17, 31, 45]), (5, 1, [4]), (1, 1, [0])],
)
def test_the_first_half_comes_one_by_one_and_the_other_is_spread_to_the_last_token(
    generated: int, played: int, before: list[int]
) -> None:
    assert places(generated, played) == before


def test_a_step_of_many_sequences_tells_more() -> None:
    assert [most_steps(batch) for batch in (1, 2, 7, 8, 100)] == [56, 32, 32, 24, 24]


def test_the_other_half_stands_for_all_the_rest() -> None:
    assert mean_of_answer(30.0, 20.0, played=4, generated=10) == (2 * 30 + 8 * 20) / 10
    assert mean_of_answer(30.0, 0.0, played=10, generated=10) == 30.0
    assert mean_of_answer(0.0, 20.0, played=1, generated=10) == 20.0


@given(st.integers(1, 64), st.integers(1, 1000), st.floats(0.001, 1e3))
def test_a_steady_answer_has_the_time_of_its_steps(played: int, generated: int, ms: float) -> None:
    played = min(played, generated)
    early = ms if one_by_one(played, generated) else 0.0
    late = ms if one_by_one(played, generated) < played else 0.0
    assert mean_of_answer(early, late, played, generated) == pytest.approx(ms)


def test_a_cold_cache_is_not_taken_for_a_warm_one() -> None:
    """Two steps of 30 ms, two of 20 ms: in an answer of ten tokens the fast ones stand for eight."""
    ends = {"prefill": [100], "decode": [130, 160, 180, 200]}
    rows = [wait(phase, end) for phase, found in ends.items() for end in found]
    assert times_of(rows, 4) == (100.0, 25.0)
    assert times_of(rows, 10) == (100.0, 22.0)


@pytest.mark.parametrize("policy", SMALL)
@pytest.mark.parametrize("generated", [24, 1000])
def test_no_policy_beats_the_bound_of_the_same_mean(policy: str, generated: int) -> None:
    asked = Question("mini-moe", gpu="rtx-3060", ram="ddr4-3200", trace="mini-moe", context=32, generated=generated)
    ready = resolved(asked, routing_for(asked)).on(_small_card())
    played = play_policy(ready, ready.ready(policy))
    assert bounds_beside(ready, played)["lower_bound_tpot_ms"] <= played.answer.tpot_ms


def wait(phase: str, end_ms: int) -> Row:
    """The host has the tokens of a step."""
    nothing = dict.fromkeys(Span._fields, -1)
    return tuple(Span(**{**nothing, "kind": "wait", "phase": phase, "end_ns": end_ms * 1_000_000}))


def _small_card() -> Any:
    return load_hardware("rtx-3060+ddr4-3200", {"gpu.memory_bytes": 1_700_000_000})
