"""The questions of the speed benchmark, as they are asked on the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.decision_cost import TABLE
from benchmarks.fit_speed import LARGER, arguments_of, command_of
from sim.machine.plan_costs import load_plan_costs
from tests.kit.commands import ROOT
from tests.trilane.fit.test_ten_pairs import QUESTIONS
from trilane.cli import app_of


def test_a_question_is_asked_by_its_options() -> None:
    asked = {"model": "qwen3-30b-a3b", "n_cpu_moe": 22, "prompt_tokens": 512}
    assert arguments_of(asked) == ["--model", "qwen3-30b-a3b", "--n-cpu-moe", "22", "--prompt", "512"]


@pytest.mark.parametrize("verb", ["fit", "tune"])
def test_the_command_line_has_every_option_of_the_questions(verb: str) -> None:
    questions = [*LARGER.values(), *(question["asked"] for question in QUESTIONS.values())]
    words = {word for question in questions for word in command_of(verb, question) if word.startswith("--")}
    shown = CliRunner().invoke(app_of(), [verb, "--help"], env={"COLUMNS": "200"}).output
    assert not {word for word in words if f"{word} " not in shown}


# --- what a command loads ---------------------------------------------------------------------------------------------


MOST_LINES = 19_900  # 18,700 before splits of tensors, rows of tables, and cards that work together (vLLM)
ASKED = ("qwen3-30b-a3b", "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--cpu", "ryzen-5-5600", "--ram-gb", "32")


def test_tune_loads_neither_policies_nor_the_simulator() -> None:
    command = [sys.executable, "-m", "benchmarks.loaded_lines", "tune", *ASKED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr
    lines = {line.split()[-1]: int(line.split()[0].replace(",", "")) for line in printed.splitlines()}
    assert lines["trilane/engines"] < lines["all"] <= MOST_LINES
    assert not {"policies/papers", "policies/parts", "sim/runs", "sim/timeline", "trilane/fit"} & {*lines}


# --- Costs of decisions are written where the simulator reads them ----------------------------------------------------


def test_the_table_that_is_written_is_the_one_that_is_read() -> None:
    assert load_plan_costs(TABLE) == load_plan_costs()
