"""The page of ``trilane tune``: how differences between times are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.table import Table

from tests.kit.commands import ROOT
from trilane.engines.question import Question
from trilane.engines.tune.settings import Goal, TuneQuestion
from trilane.engines.tune.tune import Tuning, tune
from trilane.output.pages.caveats import limit_text
from trilane.output.pages.tune import tune_page


def tuned(goal: Goal = "both", gpu: str = "rtx-3050", ram_gb: int | None = None) -> Tuning:
    return tune(TuneQuestion(Question(
        model="deepseek-v2-lite:2", gpu=gpu, ram="ddr4-3200", cores=4, prompt_tokens=64, generated=8, ram_gb=ram_gb,
    ), goal, ("f16",)))


def facts(tuning: Tuning) -> dict[str, str]:
    """The answer's lines by their names."""
    answer = next(part for part in tune_page(tuning) if isinstance(part, Table))
    names, texts = ([str(cell) for cell in column.cells] for column in answer.columns[:2])
    return dict(zip(names, texts, strict=True))


def cells(tuning: Tuning) -> list[str]:
    """The texts of all tables of the page."""
    tables = [part for part in tune_page(tuning) if isinstance(part, Table)]
    return [str(cell) for table in tables for column in table.columns for cell in column.cells]


@pytest.mark.parametrize(("slower", "text"), [
    (-0.796, "4.9x as fast"), (-0.5, "2.0x as fast"), (-0.2, "25% faster"), (-0.001, "as fast"),
    (0.25, "25% slower"),
])
def test_less_time_is_told_as_more_speed(slower: float, text: str) -> None:
    tuning = tuned()
    other = tuning.others[0]
    rival = replace(other, reason=other.reason._replace(slower=slower))
    assert text in cells(replace(tuning, others=(rival,)))


def test_another_engine_that_is_faster_is_named_next_to_the_answer() -> None:
    tuning = tuned()
    fast, slow = (replace(other, reason=other.reason._replace(slower=slower))
                  for other, slower in zip(tuning.others, (-0.1, 0.1), strict=False))
    told = facts(replace(tuning, others=(slow, fast)))["other engines"]
    assert told.startswith(f"{fast.tuned.engine} is predicted to be 11% faster by the time until the last token")
    assert "other engines" not in facts(replace(tuning, others=(slow,)))
    assert facts(tuning)["engine"] == "llama.cpp: builds from November 2025 on, CUDA"


def test_what_was_chosen_must_save_is_told_as_far_as_there_was_a_choice() -> None:
    rule = (
        "chosen where it saves enough of that time: a setting 1%, a KV cache of fewer bits 5%, a cache of experts 10%"
    )
    found = tune(TuneQuestion(replace(tuned().question.fit, gpu="rtx-3050", model="deepseek-v2-lite"), "both"))
    assert rule in tune_page(found)
    assert rule.partition(",")[0] in tune_page(replace(found, other_kv=None, other_placement=None))


def test_a_setting_that_lacks_an_argument_of_the_best_is_told_by_that() -> None:
    found = tuned()
    other = replace(found.others[0], tuned=replace(found.best, tpot_ms=2 * found.best.tpot_ms))
    best = replace(found.best, arguments=(*found.best.arguments, "--load-mode none"))
    assert "without --load-mode none" in cells(replace(found, best=best, runner_up=other))


def test_times_that_were_measured_have_no_other_engines_parts_or_errors_next_to_them() -> None:
    measured = str(ROOT / "docs/validation/llama.cpp/engine.yaml")
    asked = replace(tuned(gpu="none").question, fit=replace(tuned(gpu="none").question.fit, engine=measured))
    found = tune(replace(asked, fit=replace(asked.fit, weights="q4_0")))
    assert (found.measured, found.others, found.gains, found.error) == (True, (), (), None)
    assert facts(found)["limit"].startswith("decode: not known: times that were measured as a whole")
    assert facts(found)["error to expect"].startswith("that of the engine's file on the machine")


def test_what_limits_decode_is_told_as_that_where_more_is_asked() -> None:
    text = limit_text(tuned("decode").gains)
    assert [facts(tuned(goal))["limit"] for goal in ("decode", "prompt", "both")] == [
        text, f"decode: {text}", f"decode: {text}"
    ]


def test_memory_that_was_not_named_has_no_size() -> None:
    assert " GB = weights" in facts(tuned(gpu="none"))["memory"]
    assert " GB of 34.4 = weights" in facts(tuned(gpu="none", ram_gb=32))["memory"]
    assert " GB of 8.6 = weights" in facts(tuned())["GPU memory"]
