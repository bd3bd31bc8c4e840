"""How fast ``trilane recommend``, ``tune`` and ``fit`` answer: ``python -m benchmarks.fit_speed [--write]``.

Every question is asked three times on the command line, from the start of Python to the first part of the page and to
the end; the medians count. ``fit`` simulates the usual policies, so that its first part is the engine's. The thirty
questions are those of ``tests/trilane/fit/questions.yaml``, the ten machine-model pairs those of ``test_ten_pairs.py``
beside it; the others are of larger models or batches.
``--write`` keeps the figures beside this file, in ``fit.json`` and ``fit.md``. Quiet, please: whatever else runs on the
machine is measured too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.figures import Cell, Section, Target, measured_by, report
from tests.trilane.fit.test_ten_pairs import PAIRS, QUESTIONS

HERE = Path(__file__).parent
TIMES = 3
TUNE_S, TUNE_FIRST_S = 1.2, 0.8  # the slowest median: to the end, and to the first line
RECOMMEND_S = 5.0
FIT_S, FIT_FIRST_S = 4.0, 1.0
LARGER_FIT_S = 5.0
DESKTOP: dict[str, Any] = {"ram": "ddr5-5600", "cores": 16}
LARGER: dict[str, dict[str, Any]] = {
    "a batch of 8": {"model": "qwen3-30b-a3b", "gpu": "rtx-4080", **DESKTOP, "batch": 8},
    "GLM-4.5-Air": {"model": "glm-4.5-air", "gpu": "rtx-3090", **DESKTOP},
    "gpt-oss-120b": {"model": "gpt-oss-120b", "gpu": "rtx-5090", **DESKTOP},
    "MiniMax-M2": {"model": "minimax-m2", "gpu": "rtx-4090", **DESKTOP},
    "Qwen3-235B-A22B": {"model": "qwen3-235b-a22b", "gpu": "rtx-5090", **DESKTOP},
    "DeepSeek-V3": {"model": "deepseek-v3", "gpu": "rtx-5090", **DESKTOP},
}
MACHINES: dict[str, dict[str, Any]] = {
    "RTX 3060, DDR4": {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": 32},
    "RTX 5090, DDR5": {"gpu": "rtx-5090", "ram": "ddr5-5600", "cpu": "ryzen-9-9950x", "ram_gb": 192},
    "a server": {"gpu": "rtx-pro-6000-blackwell", "ram": "ddr5-4800-ecc", "cpu": "epyc-9354", "ram_gb": 768},
    "a Mac": {"gpu": "apple-m4-max"},
    "no GPU": {"gpu": "none", "ram": "ddr5-5600", "ram_gb": 64},
}
_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # kept after the first time, as Python does unless it is told not to
_CHOSEN = ("n_cpu_moe", "ubatch")  # settings that `tune` chooses
_OPTIONS = {"prompt_tokens": "prompt"}  # of the command line, where they have other names
COLUMNS = ("question", "median s", "slowest s", "first part, median s", "arguments")


class Seconds(NamedTuple):
    """Seconds of one answer from Python's start: until its first part is printed, and until its end."""

    first: float
    whole: float


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_speed", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write fit.json and fit.md")
    given = parser.parse_args()
    where = measured_by("benchmarks.fit_speed", sys.argv[1:])
    pairs = {name: pair.asked for name, pair in PAIRS.items()}
    thirty = {name: question["asked"] for name, question in QUESTIONS.items()}
    sections = [
        measure("tune", "Thirty questions", thirty, TUNE_FIRST_S, TUNE_S),
        measure("fit", "Thirty questions", thirty, FIT_FIRST_S, FIT_S),
        measure("fit", "Ten machine-model pairs", pairs, FIT_FIRST_S, LARGER_FIT_S),
        measure("fit", "Larger models and batches", LARGER, FIT_FIRST_S, LARGER_FIT_S),
        measure("recommend", "All models of a machine", MACHINES, RECOMMEND_S, RECOMMEND_S),
    ]
    report(where, sections, HERE / "fit", "Speed of tune and fit", given.write)


def measure(
    verb: str, title: str, questions: Mapping[str, Mapping[str, Any]], first_s: float, whole_s: float
) -> Section:
    """One row a question; of the medians, the slowest is asked for."""
    asked = {name: command_of(verb, question) for name, question in questions.items()}
    took = {name: [_ask(words) for _ in range(TIMES)] for name, words in asked.items()}
    first = {name: median(one.first for one in answers) for name, answers in took.items()}
    whole = {name: median(one.whole for one in answers) for name, answers in took.items()}
    rows: list[list[Cell]] = [
        [name, whole[name], max(one.whole for one in took[name]), first[name], " ".join(words)]
        for name, words in asked.items()
    ]
    what = f"{title}, {verb}"
    return Section(
        what, COLUMNS, rows,
        [Target(f"{what}: first part, slowest median", "s", first_s, max(first.values()), at_least=False),
         Target(f"{what}: slowest median", "s", whole_s, max(whole.values()), at_least=False)],
        [
            f"trilane ARGUMENTS, {TIMES} times each, one process a core; all from Python's start on",
            f"median of the questions {median(whole.values()):.2f} s",
        ],
    )


def command_of(verb: str, question: Mapping[str, Any]) -> list[str]:
    """A question as it is asked of a verb; ``tune`` chooses some of its settings itself."""
    if verb == "tune":
        left = {name: value for name, value in question.items() if name not in _CHOSEN}
        return ["tune", left.pop("model"), *arguments_of(left)]
    policies = ["--policies", "usual"] if verb == "fit" else []
    return [verb, *arguments_of(question), *policies]


def arguments_of(question: Mapping[str, Any]) -> list[str]:
    """A question as it is asked on the command line."""
    options = {_OPTIONS.get(name, name): value for name, value in question.items()}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _ask(arguments: Sequence[str]) -> Seconds:
    start = time.perf_counter()
    command = [sys.executable, "-m", "trilane", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | _BYTECODE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        first = time.perf_counter() - start
        running.stdout.read()
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return Seconds(first, time.perf_counter() - start)


if __name__ == "__main__":
    main()
