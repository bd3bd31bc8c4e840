"""Windows: steps whose drafts end early or are recorded, and the experts of drafts that are rejected."""

from __future__ import annotations

from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.runs.prepare import prepare
from sim.runs.sampling import tokens_a_step
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate
from traces.batches import StepRows
from traces.windows import (
    Window,
    drawn_windows,
    offered_shares,
    recorded_windows,
    tokens_per_step,
    verifying_steps,
)

MINI: dict[str, Any] = {"trace": "mini-moe", "model": None, "cached_share": 0.25, "prompt_tokens": 8}


def decode_of(tokens: int) -> list[StepRows]:
    """Steps of one token each, whose rows are 100, 101, ..., after a prompt of 4 tokens and a prefill."""
    return [StepRows(1 + i, "decode", np.array([100 + i]), (0,), (1,), (4 + i,)) for i in range(tokens)]


# --- how long a window is ---------------------------------------------------------------------------------------------


def test_without_shares_of_offered_drafts_every_window_has_all_of_them() -> None:
    assert {window.drafted for window in islice(drawn_windows((0.7, 0.4), 3), 100)} == {2}


def test_windows_have_the_stated_shares_of_drafts_made_and_accepted() -> None:
    offered, accepted = (1.0, 0.8, 0.6), (0.7, 0.5, 0.4)
    windows = list(islice(drawn_windows(accepted, 5, offered), 10_000))
    for place in range(3):
        assert fmean(w.drafted > place for w in windows) == pytest.approx(offered[place], abs=1e-3)
        assert fmean(w.accepted > place for w in windows) == pytest.approx(accepted[place], abs=1e-3)


def test_a_draft_that_is_not_made_is_not_accepted() -> None:
    assert all(w.accepted <= w.drafted for w in islice(drawn_windows((1.0, 1.0, 1.0), 1, (1.0, 0.5, 0.2)), 500))


def test_one_number_is_the_chance_of_another_draft_behind_the_first() -> None:
    assert offered_shares(3, 0.5) == (1.0, 0.5, 0.25)
    assert offered_shares(2, (0.9, 0.4, 0.1)) == (0.9, 0.4)


def test_a_recorded_series_begins_again_after_its_last_window() -> None:
    assert list(islice(recorded_windows([(3, 2), (1, 0)]), 3)) == [Window(3, 2), Window(1, 0), Window(3, 2)]


def test_steps_follow_a_recorded_series() -> None:
    steps = verifying_steps(decode_of(9), 6, recorded_windows([(3, 2), (1, 0)]), seed=0)
    assert [(s.rows.tolist(), s.drafted, s.generated) for s in steps] == [
        ([100, 101, 102, 103], 3, 3), ([103, 104], 1, 1), ([104, 105, 106, 107], 3, 3),
    ]


# (tokens, accepted, offered, look-ups with experts read over PCIe, windows) of single requests on one machine, from
# Strata's logs: Niko1221/Strata, bench/results/, as in `trilane accuracy --requests`. A row looks up 10 experts of 48
# layers.
LOGGED = [
    (211, 128, 155, 109_681 + 4_559, 83), (153, 104, 113, 74_623 + 3_137, 49), (309, 195, 217, 153_158 + 6_202, 115),
]


@pytest.mark.parametrize(("tokens", "accepted", "offered", "lookups", "windows"), LOGGED)
def test_a_rejected_draft_is_a_row_like_others_as_look_ups_of_logs_say(
    tokens: int, accepted: int, offered: int, lookups: int, windows: int
) -> None:
    """With windows that have the log's drafts in all. Without rejected rows there would be ``tokens`` rows."""
    series = [Window(offered // windows + (i < offered % windows), 0) for i in range(windows)]
    left = accepted
    for i, window in enumerate(series):
        kept = min(window.drafted, left)
        series[i], left = window._replace(accepted=kept), left - kept
    made = sum(1 + window.accepted for window in series)
    steps = verifying_steps(decode_of(made + 8), made, recorded_windows(series), seed=0, rejected="drawn")
    assert len(steps) == windows
    assert sum(len(step.rows) for step in steps) * 48 * 10 == lookups
    assert abs(made - tokens) <= 3, "the token limit cuts the last window"
    assert tokens * 48 * 10 < lookups


# --- the experts of rejected drafts -----------------------------------------------------------------------------------


def test_rejected_drafts_have_the_experts_of_other_tokens_if_they_are_drawn() -> None:
    recorded, drawn = (
        verifying_steps(decode_of(40), 30, recorded_windows([(3, 1)]), seed=2, rejected=rule)
        for rule in ("recorded", "drawn")
    )
    for one, other in zip(recorded, drawn, strict=True):
        kept = one.generated
        assert other.rows[:kept].tolist() == one.rows[:kept].tolist()
        assert not set(other.rows[kept:].tolist()) & set(one.rows.tolist())
        assert (other.context, other.drafted, other.generated) == (one.context, one.drafted, kept)


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1), st.integers(0, 2**32))
def test_every_token_of_the_answer_is_kept_once_whatever_the_rejected_ones_are(
    answer: int, series: list[tuple[int, int]], seed: int
) -> None:
    windows = [(max(pair), min(pair)) for pair in series]
    steps = verifying_steps(decode_of(answer), answer, recorded_windows(windows), seed, rejected="drawn")
    kept = [row for step in steps for row in step.rows[: step.generated].tolist()]
    assert kept == [100 + token for token in range(answer)]
    assert all(len(step.rows) == step.tokens[0] == 1 + step.drafted for step in steps)
    assert all(100 <= row < 100 + answer for step in steps for row in step.rows)


def test_drawn_experts_are_those_of_the_seed() -> None:
    def rows(seed: int) -> list[list[int]]:
        steps = verifying_steps(decode_of(40), 30, recorded_windows([(3, 1)]), seed, rejected="drawn")
        return [step.rows.tolist() for step in steps]

    assert rows(1) == rows(1) != rows(2)


def test_an_answer_within_one_window_has_no_other_token_to_draw() -> None:
    [step] = verifying_steps(decode_of(3), 1, recorded_windows([(2, 0)]), seed=0, rejected="drawn")
    assert step.rows.tolist() == [100, 101, 102]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_drawn_experts_of_rejected_drafts_are_no_forecast_of_the_next_window() -> None:
    """A rejected draft with the experts of the token in its place brings them to a cache one window early."""
    scenario = Scenario(
        **MINI, policy="mixtral-offloading", generated_tokens=48, draft_tokens=3, draft_acceptance=0.0, draft_layers=0.0
    )
    runs = [simulate(scenario.with_(rejected_drafts=rule)) for rule in ("recorded", "drawn")]
    hits = [run.metrics.to_dict()["decode_resident_hit_rate"] or 0 for run in runs]
    assert hits[0] > hits[1] + 0.05


def test_a_run_of_windows_of_several_lengths() -> None:
    scenario = Scenario(
        **MINI, policy="fiddler", generated_tokens=20, draft_tokens=3, draft_acceptance=(0.7, 0.5, 0.4),
        draft_offered=0.8, rejected_drafts="drawn",
    )
    steps = [step for step in prepare(scenario).steps if step.phase == "decode"]
    assert {step.drafted for step in steps[:-3]} == {1, 2, 3}, "the last ones have fewer, as the answer lacks no more"
    assert sum(step.generated for step in steps) == 20
    run = simulate(scenario)
    assert run.bounds["lower_bound_tpot_ms"] <= (run.metrics.tpot_ms or 0)
    assert tokens_a_step(scenario) == pytest.approx(1 + 0.7 + 0.5 + 0.4)


def test_tokens_a_step_of_a_recorded_series_are_its_mean() -> None:
    scenario = Scenario(**MINI, draft_tokens=3, draft_windows=((3, 2), (1, 0)))
    assert tokens_a_step(scenario) == 2.0
    assert tokens_a_step(scenario.with_(draft_again=True)) == 2.0 / 2, "every window is computed again"
    assert tokens_a_step(Scenario(**MINI)) is None


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_tokens_a_step_count_the_steps_that_compute_again(accepted: list[float], offered: list[float]) -> None:
    """A window whose few drafts are all accepted computes nothing again."""
    accepted, offered = sorted(accepted, reverse=True), sorted(offered, reverse=True)
    windows = list(islice(drawn_windows(accepted, 7, offered), 4000))
    steps = sum(1 + (window.accepted < window.drafted) for window in windows)
    made = sum(1 + window.accepted for window in windows)
    assert tokens_per_step(3, accepted, True, offered) == pytest.approx(made / steps, rel=0.01)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "message"), [
    ({"draft_tokens": 2, "draft_windows": [[3, 1]]}, r"draft_windows: expected .* draft_tokens \(2\), got \[3, 1\]"),
    ({"draft_tokens": 3, "draft_windows": [[1, 2]]}, r"accepted <= drafted .*, got \[1, 2\]"),
    ({"draft_offered": (0.5, 0.6)}, r"draft_offered: expected shares that do not rise .* got 0\.5, 0\.6"),
    ({"rejected_drafts": "none"}, "rejected_drafts: expected 'recorded' or 'drawn', got 'none'"),
])
def test_windows_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        Scenario(**keys)


def test_each_draft_has_a_share_of_windows_that_make_it() -> None:
    scenario = Scenario(**MINI, generated_tokens=4, draft_tokens=3, draft_acceptance=0.5, draft_offered=(1.0, 0.5))
    with pytest.raises(ScenarioError, match="draft_tokens 3: expected as many shares in draft_offered, got 2"):
        prepare(scenario)
