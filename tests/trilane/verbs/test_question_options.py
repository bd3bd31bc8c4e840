"""Weights and lengths of a question: what was named, and the longest prompt."""

from __future__ import annotations

import pytest

from trilane.engines.question import Question
from trilane.fit.fit import with_longest_prompt
from trilane.verbs.options import OptionError, Workload

MACHINE = {"model": "deepseek-v2-lite:2", "gpu": "rtx-3060", "ram": "ddr4-3200"}


def test_what_was_named_is_the_question() -> None:
    asked = Workload("q8_0", "512", 16, 2).question(**MACHINE, trace="mini-deepseek:2")
    assert asked == Question(
        "deepseek-v2-lite:2", "rtx-3060", "ddr4-3200", weights="q8_0", prompt_tokens=512, generated=16, batch=2,
        trace="mini-deepseek:2",
    )
    assert Workload().question(**MACHINE) == Question(**MACHINE)


def test_max_is_the_longest_prompt_that_fits() -> None:
    asked = Workload(prompt="MAX").question(**MACHINE)
    assert asked == with_longest_prompt(Question(**MACHINE))
    assert asked.prompt_tokens > Question(**MACHINE).prompt_tokens


@pytest.mark.parametrize("prompt", ["0", "-1", "", "1.5", "most", "\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_any_other_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(OptionError, match=f"--prompt: expected a number of tokens, or max, got '{prompt[:20]}"):
        Workload(prompt=prompt)
