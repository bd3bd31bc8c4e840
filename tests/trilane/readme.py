"""The README and the pages of docs/: their commands, and the parts that the program prints.

``python tests/trilane/readme.py`` renews the printed blocks and the pictures.
"""

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
PAGE_NAMES = ("fit", "accuracy", "comparing", "traces", "measuring", "measuring_llama", "extending", "papers", "tune",
              "pays", "leaderboard")
PAGES = (README, *(ROOT / "docs" / f"{name}.md" for name in PAGE_NAMES))
PICTURES = ("tpot.png", "gantt-dali.png", "cache.png", "accuracy.png", "papers.png", "leaderboard.png")
ACCURACY = "trilane accuracy --plot"
PAPERS = "trilane papers --plot"
LEADERBOARD = "trilane leaderboard"


def whole(output: str) -> str:
    """All of what was printed."""
    return output


def answer(output: str) -> str:
    """The first lines of ``trilane fit``, up to those on the routing."""
    return "\n".join(takewhile(lambda line: not line.startswith("routing"), output.splitlines()))


def by_regime(output: str) -> str:
    """The tables of ``trilane accuracy`` without models, formats and engines, and what their columns mean."""
    about, decode, prompts, *_, meanings = output.split("\n\n")
    tables = (table.partition("\nby model family")[0] for table in (decode, prompts))
    return "\n\n".join([about, *tables, meanings])


def command_line(output: str) -> str:
    """The first lines of ``trilane tune``, up to other engines."""
    return "\n".join(takewhile(lambda line: not line.startswith("other engines"), output.splitlines()))


def by_paper(output: str) -> str:
    """The table of ``trilane papers`` alone."""
    return output.split("\n\n")[0]


SHOWN: dict[str, Callable[[str], str]] = {  # by the mark around the block
    "demo": whole, "real": whole, "fit": answer, "accuracy": whole, "regimes": by_regime,
    "papers": whole, "by-paper": by_paper, "tune": command_line, "leaderboard": whole,
}


def block(name: str, output: str) -> str:
    """The output of a command, as a page shows it."""
    lines = "\n".join(line.rstrip() for line in SHOWN[name](output).strip().splitlines())
    return f"```text\n{lines}\n```\n"


def shown_block(name: str) -> str:
    """The block of that mark, as its page shows it now."""
    found = (_marked(name).search(page.read_text(encoding="utf-8")) for page in PAGES)
    return next((match[0] for match in found if match), "")


def _marked(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


def blocks(language: str, page: Path = README) -> list[str]:
    """Code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every command line of the shell blocks of all pages, once, comments removed."""
    lines = [line for page in PAGES for block in blocks("sh", page) for line in block.splitlines()]
    found = [line.partition(" #")[0].strip() for line in lines]
    return [command for command in dict.fromkeys(found) if command]


def command_with(words: str) -> str:
    """The first command that holds these words."""
    return next(command for command in commands() if words in command)


def demo(options: str = "DEMO") -> str:
    """A comparison of ``make demo``, by the name that its options have in the Makefile."""
    match = re.search(rf"^{options} := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"Makefile: expected a line {options} := --policies A,B,..."
    return f"trilane compare {match[1]}"


def update() -> None:
    """Run what the pages show; put outputs and pictures where they show them."""
    with tempfile.TemporaryDirectory() as folder:
        accuracy = _run(command_with(ACCURACY).replace("accuracy.png", f"{folder}/accuracy.png"))
        papers = _run(command_with(PAPERS).replace("papers.png", f"{folder}/papers.png"))
        board = _run(command_with(LEADERBOARD).replace("leaderboard.png", f"{folder}/leaderboard.png"))
        outputs = {"demo": _run(f"{demo()} --out {folder}"), "real": _run(demo("REAL")),
                   "fit": _run(command_with("trilane fit")), "tune": _run(command_with("trilane tune")),
                   "accuracy": accuracy, "regimes": accuracy,
                   "papers": papers, "by-paper": papers, "leaderboard": board}
        _run(command_with("--png cache.png").replace("cache.png", f"{folder}/cache.png"))
        for name in PICTURES:
            shutil.copyfile(Path(folder) / name, ROOT / "docs" / name)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, output in outputs.items():
            shown = block(name, output)
            text = _marked(name).sub(lambda _, shown=shown: shown, text)
        page.write_text(text, encoding="utf-8")


def _run(command: str) -> str:
    words = [sys.executable, "-c", "from trilane.cli import main; main()", *shlex.split(command)[1:]]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    update()
