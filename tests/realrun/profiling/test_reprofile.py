"""Which sizes a profile is measured at anew, for the settings that play them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realrun.profiling.profile import points_of
from tests.kit.tiny_bench import tiny_setting


def test_sizes_are_those_that_the_settings_play() -> None:
    points = points_of([tiny_setting(0.3, 1), tiny_setting(0.3, 2)])
    assert points.batches == (1, 2)
    assert points.prompts == (5,)
    assert points.contexts == (6, 9)  # four tokens behind a prompt of five


@pytest.mark.parametrize(
    ("phase", "prompts", "contexts"), [("decode", (1,), (6, 9)), ("prefill", (5,), (1,))], ids=str
)
def test_where_a_phase_is_not_played_one_token_stands_for_it(
    phase: str, prompts: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    whole = tiny_setting()
    part = replace(whole, steps=tuple(step for step in whole.steps if step.phase == phase))
    points = points_of([part])
    assert (points.prompts, points.contexts) == (prompts, contexts)
    assert max(points.tokens) >= 1
