"""The questions of the speed benchmark, as they are asked on the command line."""

from __future__ import annotations

from typer.testing import CliRunner

from benchmarks.fit_speed import LARGER, arguments_of
from tests.trilane.fit.test_thirty_questions import QUESTIONS
from trilane.cli import app_of


def test_a_question_is_asked_by_its_options() -> None:
    asked = {"model": "qwen3-30b-a3b", "n_cpu_moe": 22, "prompt_tokens": 512}
    assert arguments_of(asked) == ["--model", "qwen3-30b-a3b", "--n-cpu-moe", "22", "--prompt", "512"]


def test_the_command_line_has_every_option_of_the_questions() -> None:
    questions = [*LARGER.values(), *(question["asked"] for question in QUESTIONS.values())]
    words = {word for question in questions for word in arguments_of(question) if word.startswith("--")}
    shown = CliRunner().invoke(app_of(), ["fit", "--help"], env={"COLUMNS": "200"}).output
    assert not {word for word in words if f"{word} " not in shown}
