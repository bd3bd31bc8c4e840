"""The table of docs/notes/owners.md: a machine, a question, a command, and the numbers that the command answers with.

``python -m tests.trilane.owners`` renews the answers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs/notes/owners.md"
OWNER = re.compile(r"^\| (.+?) \| (.+?) \| `(trilane .+?)` \| (.+?) \|$", re.M)
SETTING = re.compile(r"(?:--n-cpu-moe|-ts|--kt-num-gpu-experts) \S+|-ot .+?(?= -)")
BOUGHT = re.compile(r"^(\S.*?)  +(?:second GPU|GPU)  .*?([\d.]+) +[\d.]+(?: min)?  (\d+%|no gain)", re.M)
RUNS = re.compile(r"^([a-z]\S+) +[\d,.]+ +(\S+) +[\d.]+ +([\d.]+) +[\d.]+ ", re.M)


class Owner(NamedTuple):
    """One row of the table."""

    machine: str
    question: str
    command: str
    answer: str


def owners() -> list[Owner]:
    """The rows of the page."""
    return [Owner(*match) for match in OWNER.findall(PAGE.read_text(encoding="utf-8"))]


def headline(output: str) -> str:
    """Numbers of an answer: what was bought, else what runs, else the setting and its speed."""
    if bought := BOUGHT.findall(output):
        return "; ".join(f"{part}: {speed} tokens/s, {gain}" for part, speed, gain in bought)
    if "what runs, largest first" in output:
        return _models(output)
    return _setting(output)


def _models(output: str) -> str:
    """How many models run, and the largest of them."""
    runs = RUNS.findall(output.partition("what runs")[2].partition("what does not run")[0])
    model, weights, speed = runs[0]
    return f"{len(runs)} models run; the largest is {model} in {weights}: {speed} tokens/s"


def _setting(output: str) -> str:
    """The division of the best command line, tokens/s and the first token."""
    [best, *_] = re.findall(r"^(?:llama-server|python -m) .+", re.sub(r"\\\n *", "", output), re.M)
    [speed] = re.findall(r"^decode +([\d.]+ tokens/s)", output, re.M)
    [first] = re.findall(r"^first token +([\d.]+ (?:s|min|ms))", output, re.M)
    return ", ".join([*(f"`{part}`" for part in SETTING.findall(best)), speed, f"first token after {first}"])


def update() -> None:
    """Run the commands; put their answers into the table."""
    text = PAGE.read_text(encoding="utf-8")
    for owner in owners():
        words = [sys.executable, "-m", *owner.command.split()]
        output = subprocess.run(words, capture_output=True, text=True, check=True, cwd=PAGE.parents[2]).stdout
        text = text.replace(f"`{owner.command}` | {owner.answer} |", f"`{owner.command}` | {headline(output)} |")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    update()
