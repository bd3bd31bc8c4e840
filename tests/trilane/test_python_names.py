"""Answers in Python: the records that the verbs print."""

from __future__ import annotations

import json
from typing import Any

import pytest

import trilane
from tests.kit.commands import ROOT
from tests.kit.questions import MACHINE, MODEL, WEIGHTS
from trilane.engines.question import Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune
from trilane.study.leaderboard.standings import read_entries, standings
from trilane.study.pays import gain_map as playing

SMALL: dict[str, Any] = {"gpu": "rtx-3050", "ram": "ddr4-3200", "prompt_tokens": 64, "generated": 8}


def test_tune_is_the_answer_of_its_verb() -> None:
    found = trilane.tune("deepseek-v2-lite:2", "decode", **SMALL)
    assert found == tune(TuneQuestion(Question("deepseek-v2-lite:2", **SMALL), "decode"))
    assert found.to_dict()["command"] == found.best.command


def test_recommend_is_a_table_of_records() -> None:
    found = trilane.recommend(models=["olmoe-1b-7b"], gpu="rtx-3060", ram="ddr4-3200")
    assert json.dumps(found.to_dict())
    assert [one.model for one in found.runs] == ["olmoe-1b-7b"]


def test_accuracy_scores_the_bundled_rows_or_a_file() -> None:
    rows = ROOT / "trilane/engines/accuracy/measured_speeds.csv"
    assert trilane.accuracy().rows == trilane.accuracy(rows).rows


def test_leaderboard_ranks_the_entries_that_come_with_the_program() -> None:
    assert trilane.leaderboard() == standings(read_entries())


def test_pays_asks_the_question_of_its_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("trilane.answers.gain_map", lambda question, jobs: asked.append((question, jobs)))
    trilane.pays("cache", MODEL, draws=1, jobs=2, weights=WEIGHTS, **MACHINE)
    question = playing.PaysQuestion("cache", Question(MODEL, weights=WEIGHTS, **MACHINE), 1)
    assert asked == [(question, 2)]
