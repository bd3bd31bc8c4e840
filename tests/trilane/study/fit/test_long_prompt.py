"""Long prompts repeat short routing: the same experts, more tokens, nothing lost but a remainder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Forecast, Routing
from sim.runs.demand import StepDemand
from traces.library import load_trace
from trilane.study.fit.answer_steps import most_steps
from trilane.study.fit.long_prompt import PROMPT_ROWS, lengths_of, repeated
from trilane.study.fit.question import Question

PARTS: dict[str, Any] = {"model": "mini-moe", "gpu": "rtx-4080", "ram": "ddr5-5600"}
PREFILL = StepDemand(
    0, "prefill", 3, (3,), (Routing((1, 4), (2, 4)), Routing((0,), (6,))),
    ((Forecast(1, "gate", (0, 2), (5, 1)),), ()), None,
)  # fmt: skip


def test_a_repeated_prefill_has_the_same_experts_and_so_many_times_the_tokens() -> None:
    assert repeated(PREFILL, 4) == StepDemand(
        0, "prefill", 12, (12,), (Routing((1, 4), (8, 16)), Routing((0,), (24,))),
        ((Forecast(1, "gate", (0, 2), (20, 4)),), ()), None,
    )  # fmt: skip


def test_a_decode_step_and_a_prompt_that_is_not_repeated_stay_as_they_are() -> None:
    decode = PREFILL._replace(phase="decode")
    assert repeated(decode, 4) is decode
    assert repeated(PREFILL, 1) is PREFILL


@given(st.integers(1, 200_000), st.integers(1, 4))
def test_what_is_played_is_the_prompt_but_for_a_remainder(context: int, batch: int) -> None:
    prompt, times, _ = lengths_of(load_trace("mini-moe"), Question(**PARTS, context=context, batch=batch))
    assert 1 <= prompt * batch <= PROMPT_ROWS
    assert 0 <= context - prompt * times < times


@pytest.mark.parametrize(("generated", "played"), [(1, 1), (7, 7), (1000, most_steps(1))])
def test_no_more_steps_are_played_than_generated(generated: int, played: int) -> None:
    asked = Question(**PARTS, generated=generated)
    assert lengths_of(load_trace("mini-moe"), asked).steps == played
    assert lengths_of(load_trace("mini-moe"), replace(asked, context=4)).steps == played
