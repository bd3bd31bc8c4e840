"""What a command loads: ``tune`` is a matter of formulas, and brings along nothing that plays policies."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.commands import ROOT

MOST_LINES = 14_000
ASKED = ("qwen3-30b-a3b", "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--cpu", "ryzen-5-5600", "--ram-gb", "32")


def test_tune_loads_neither_policies_nor_the_simulator() -> None:
    command = [sys.executable, "-m", "benchmarks.loaded_lines", "tune", *ASKED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr
    lines = {line.split()[-1]: int(line.split()[0].replace(",", "")) for line in printed.splitlines()}
    assert lines["trilane/engines"] < lines["all"] <= MOST_LINES
    assert not {"policies/papers", "policies/parts", "sim/runs", "sim/timeline", "trilane/fit"} & {*lines}
