"""How fast ``trilane fit`` and ``recommend`` answer: ``python -m benchmarks.fit_speed [--write]``.

Every question is asked three times on the command line, from the start of Python to the end; the median counts. The
thirty questions are those of ``tests/trilane/fit/questions.yaml``, the ten machine-model pairs those of
``test_ten_pairs.py`` beside it; the others are of larger models or batches.
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
from typing import Any

from benchmarks.figures import Cell, Section, Target, measured_by, report
from tests.trilane.fit.test_ten_pairs import PAIRS, QUESTIONS

HERE = Path(__file__).parent
SECONDS = 5.0
TIMES = 3
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
_OPTIONS = {"prompt_tokens": "prompt"}  # of the command line, where they have other names
COLUMNS = ("question", "median s", "fastest s", "slowest s", "arguments")


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_speed", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write fit.json and fit.md")
    given = parser.parse_args()
    where = measured_by("benchmarks.fit_speed", sys.argv[1:])
    pairs = {name: pair.asked for name, pair in PAIRS.items()}
    thirty = {name: question["asked"] for name, question in QUESTIONS.items()}
    sections = [measure("Thirty questions", thirty), measure("Ten machine-model pairs", pairs),
                measure("Larger models and batches", LARGER), measure("All models of a machine", MACHINES, "recommend")]
    report(where, sections, HERE / "fit", "Speed of fit", given.write)


def measure(title: str, questions: Mapping[str, Mapping[str, Any]], verb: str = "fit") -> Section:
    """One row a question; the slowest median is what is asked for."""
    seconds = {name: [_ask(verb, arguments_of(question)) for _ in range(TIMES)] for name, question in questions.items()}
    rows: list[list[Cell]] = [
        [name, median(took), min(took), max(took), " ".join(arguments_of(questions[name]))]
        for name, took in seconds.items()
    ]
    medians = [median(took) for took in seconds.values()]
    slowest = max(medians)
    return Section(
        title, COLUMNS, rows, [Target(f"{title}: slowest median", "s", SECONDS, slowest, at_least=False)],
        [
            f"trilane {verb} ARGUMENTS, {TIMES} times each, one process a core; all from Python's start on",
            f"median of the questions {median(medians):.2f} s, slowest of all answers "
            f"{max(map(max, seconds.values())):.2f} s",
        ],
    )


def arguments_of(question: Mapping[str, Any]) -> list[str]:
    """A question as it is asked on the command line."""
    options = {_OPTIONS.get(name, name): value for name, value in question.items()}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _ask(verb: str, arguments: Sequence[str]) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "trilane", verb, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | _BYTECODE)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
