"""Settings against exhaustive runs on a CPU (``docs/validation/llama.cpp/tune``): the one that is named is the best."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.kit.overlay import ROOT
from trilane.study.fit.question import Question
from trilane.study.tune.question import TuneQuestion
from trilane.study.tune.tune import tune
from trilane.study.tune.tuned import Tuned

FILES = sorted((ROOT / "docs/validation/llama.cpp/tune").glob("*.csv"))
WITHIN = 0.05
CORES, RAM_GB = 2, 24  # of the machine: two cores of an EPYC that names no model


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def answer_ms(row: dict[str, str]) -> float:
    """The prompt, and a token after it for each but the first that was generated."""
    return float(row["prompt_ms"]) + (int(row["generated_tokens"]) - 1) * float(row["token_ms"])


def named(row: dict[str, str]) -> Tuned:
    """The setting that is best by the time until the last token, of those that were measured."""
    question = Question(
        model=row["model"], gpu="none", ram="ddr4-3200", cores=CORES, ram_gb=RAM_GB,
        context=int(row["prompt_tokens"]), generated=int(row["generated_tokens"]),
    )  # fmt: skip
    return tune(TuneQuestion(question, "both", ("f16", "q8_0", "q4_0"))).best


def test_there_are_three_models_in_all_combinations() -> None:
    assert len(FILES) == 3
    for path in FILES:
        rows = rows_of(path)
        settings = {(row["threads"], row["piece_tokens"], row["kv"]) for row in rows}
        assert len(rows) == len(settings) == 2 * 4 * 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_setting_that_is_named_is_within_5_percent_of_the_best(path: Path) -> None:
    rows = rows_of(path)
    found = named(rows[0])
    [own] = [row for row in rows if (row["threads"], row["piece_tokens"], row["kv"]) == _of(found)]
    assert answer_ms(own) <= (1 + WITHIN) * min(map(answer_ms, rows))


def _of(tuned: Tuned) -> tuple[str, str, str]:
    return str(tuned.threads), str(tuned.piece_tokens), tuned.kv
