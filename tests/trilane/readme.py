"""The parts of README.md that come out of the program. ``python tests/trilane/readme.py`` makes them anew."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PICTURES = ("tpot.png", "gantt-dali.png", "cache.png")


def whole(output: str) -> str:
    """All of what was printed."""
    return output


def answer(output: str) -> str:
    """What ``trilane fit`` says first: the lines before it says which routing it played."""
    return "\n".join(takewhile(lambda line: not line.startswith("routing"), output.splitlines()))


SHOWN: dict[str, Callable[[str], str]] = {"demo": whole, "fit": answer}  # by the mark around the block


def block(name: str, output: str) -> str:
    """What a command printed, as README shows it."""
    lines = "\n".join(line.rstrip() for line in SHOWN[name](output).strip().splitlines())
    return f"```text\n{lines}\n```\n"


def shown_block(name: str) -> str:
    """The block of that mark that README shows now."""
    match = _marked(name).search(README.read_text(encoding="utf-8"))
    return match[0] if match else ""


def _marked(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


def blocks(language: str) -> list[str]:
    """Code blocks of README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every command line of the shell blocks, comments removed."""
    lines = [line.partition(" #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def command_with(words: str) -> str:
    """The first command that holds these words."""
    return next(command for command in commands() if words in command)


def demo() -> str:
    """What ``make demo`` runs."""
    match = re.search(r"^DEMO := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert match, "Makefile: expected a line DEMO := A,B,..."
    return f"trilane compare --policies {match[1]}"


def update() -> None:
    """Run what README shows; put its outputs and pictures where README shows them."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = {"demo": _run(f"{demo()} --out {folder}"), "fit": _run(command_with("trilane fit"))}
        _run(command_with("--png cache.png").replace("cache.png", f"{folder}/cache.png"))
        for name in PICTURES:
            shutil.copyfile(Path(folder) / name, ROOT / "docs" / name)
    text = README.read_text(encoding="utf-8")
    for name, output in outputs.items():
        shown = block(name, output)
        text = _marked(name).sub(lambda _, shown=shown: shown, text)
    README.write_text(text, encoding="utf-8")


def _run(command: str) -> str:
    words = [sys.executable, "-c", "from trilane.cli import main; main()", *shlex.split(command)[1:]]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    update()
