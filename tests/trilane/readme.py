"""The parts of README.md that come out of the program. ``python tests/trilane/readme.py`` makes them anew."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PICTURES = ("tpot.png", "gantt-dali.png")
_DEMO = re.compile(r"(?<=<!-- demo -->\n).*?(?=<!-- /demo -->)", re.DOTALL)


def demo_block(output: str) -> str:
    """What ``trilane compare`` printed, as README shows it."""
    lines = "\n".join(line.rstrip() for line in output.strip().splitlines())
    return f"```text\n{lines}\n```\n"


def shown_block() -> str:
    """The table that README shows now."""
    match = _DEMO.search(README.read_text(encoding="utf-8"))
    return match[0] if match else ""


def blocks(language: str) -> list[str]:
    """Code blocks of README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every command line of the shell blocks, comments removed."""
    lines = [line.partition(" #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def demo_policies() -> str:
    """The policies that ``make demo`` compares."""
    match = re.search(r"^DEMO := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert match, "Makefile: expected a line DEMO := A,B,..."
    return match[1]


def update() -> None:
    """Run the demo; put its table and pictures where README shows them."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", "from trilane.cli import main; main()", "compare"]
        words += ["--policies", demo_policies(), "--out", folder]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
        for name in PICTURES:
            shutil.copyfile(Path(folder) / name, ROOT / "docs" / name)
    text = _DEMO.sub(lambda _: demo_block(done.stdout), README.read_text(encoding="utf-8"))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    update()
