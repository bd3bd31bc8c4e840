"""Settings against exhaustive runs on a CPU (``docs/validation/llama.cpp/tune``): the one that is named is the best."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest

from tests.kit.overlay import ROOT
from trilane.engines.question import Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune
from trilane.engines.tune.tuned import Tuned

FILES = sorted((ROOT / "docs/validation/llama.cpp/tune").glob("*.csv"))
WITHIN = 0.05
PROFILE = str(ROOT / "docs/validation/llama.cpp/engine.yaml")  # of this machine
each_way = pytest.mark.parametrize(
    ("path", "engine"), [(path, engine) for path in FILES for engine in (None, PROFILE)],
    ids=[f"{path.stem}, {how}" for path in FILES for how in ("by parts", "by profile")],
)
CORES, RAM_GB = 2, 24  # of the machine: two cores of an EPYC that names no model


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def answer_ms(row: dict[str, str]) -> float:
    """The prompt, and a token after it for each but the first that was generated."""
    return float(row["prompt_ms"]) + (int(row["generated_tokens"]) - 1) * float(row["token_ms"])


@cache
def named(path: Path, engine: str | None) -> Tuned:
    """The setting that is best by the time until the last token, of those that were measured."""
    row = rows_of(path)[0]
    question = Question(
        model=row["model"], gpu="none", ram="ddr4-3200", cores=CORES, ram_gb=RAM_GB, engine=engine,
        prompt_tokens=int(row["prompt_tokens"]), generated=int(row["generated_tokens"]),
    )
    return tune(TuneQuestion(question, "both", ("f16", "q8_0", "q4_0"))).best


def test_there_are_three_models_in_all_combinations() -> None:
    assert len(FILES) == 3
    for path in FILES:
        rows = rows_of(path)
        settings = {(row["threads"], row["piece_tokens"], row["kv"]) for row in rows}
        assert len(rows) == len(settings) == 2 * 4 * 3


@each_way
def test_the_setting_that_is_named_is_within_5_percent_of_the_best(path: Path, engine: str | None) -> None:
    assert measured_ms(path, named(path, engine)) <= (1 + WITHIN) * min(map(answer_ms, rows_of(path)))


@each_way
def test_its_time_is_predicted_within_15_percent_and_within_5_with_the_machines_own_profile(
    path: Path, engine: str | None
) -> None:
    found = named(path, engine)
    assert found.answer_ms == pytest.approx(measured_ms(path, found), rel=0.15 if engine is None else 0.05)


def measured_ms(path: Path, tuned: Tuned) -> float:
    """The time that was measured with a setting."""
    setting = str(tuned.threads), str(tuned.piece_tokens), tuned.kv
    [own] = [row for row in rows_of(path) if (row["threads"], row["piece_tokens"], row["kv"]) == setting]
    return answer_ms(own)
