"""The README and the pages of docs/: their commands, and the parts that the program prints.

``python tests/trilane/readme.py`` renews the printed blocks and the pictures.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from trilane.output.pages.output import WIDTH

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGE_NAMES = ("fit", "accuracy", "comparing", "traces", "measuring", "measuring_llama", "extending", "papers",
              "recommend", "tune", "explore", "sharing", "pays", "leaderboard", "quality", "strata", "notes/accuracy",
              "notes/leaderboard", "notes/papers")
PAGES = (README, *(ROOT / "docs" / f"{name}.md" for name in PAGE_NAMES))
PICTURES = (
    "tpot.png", "gantt-dali.png", "cache.png", "accuracy.png", "papers.png", "leaderboard.png", "quality.png",
    "strata.png",
)
REQUESTS = "trilane accuracy --requests"
ACCURACY = "trilane accuracy --plot"
PAPERS = "trilane papers --plot"
LEADERBOARD = "trilane leaderboard"
QUALITY, PUBLISHED = "trilane quality --plot", "trilane quality --published"
WIDEST = 120  # characters of a line in a block


def answer(output: str) -> str:
    """The lines of ``trilane fit``, up to the caveats."""
    return "\n".join(takewhile(lambda line: line != "caveats", output.splitlines())).rstrip()


def over_all(output: str) -> str:
    """The tables of ``trilane accuracy`` over all rows."""
    return "\n\n".join([output.split("\n\n")[0], *(table.partition("\nby regime")[0] for table in _errors(output))])


def by_regime(output: str) -> str:
    """The tables of ``trilane accuracy`` by regime, and what their columns mean."""
    about, *_, meanings = output.split("\n\n")
    return "\n\n".join([about, *(table.partition("\nby architecture")[0] for table in _errors(output)), meanings])


def by_model(output: str) -> str:
    """The tables of ``trilane accuracy`` by model, format and engine, and the rows that were not asked."""
    tables = [table.splitlines() for table in _errors(output)]
    some = ["\n".join([*lines[:3], *lines[lines.index("by architecture"):]]) for lines in tables]  # 3: title and header
    return "\n\n".join([*some, *output.split("\n\n")[4:-1]])


def _errors(output: str) -> list[str]:
    """The tables of decode and of prompts."""
    return output.split("\n\n")[1:3]


def recommendation(output: str) -> str:
    """The table of ``trilane recommend``, without what does not run."""
    return output.partition("\nwhat does not run")[0]


def command_line(output: str) -> str:
    """The first lines of ``trilane tune``, up to other engines."""
    return "\n".join(takewhile(lambda line: not line.startswith("other engines"), output.splitlines()))


def by_paper(output: str) -> str:
    """The table of ``trilane papers`` alone, with further sources together."""
    lines = output.split("\n\n")[0].splitlines()
    papers = 1 + next(place for place, line in enumerate(lines) if line.startswith("  times and ratios"))
    further = next(place for place, line in enumerate(lines) if line.startswith("further sources"))
    return "\n".join([*lines[:papers], *lines[further:]])


def without_meanings(output: str) -> str:
    """A comparison without the meanings of its columns, for which the page has a table."""
    return "\n\n".join(part for part in output.split("\n\n") if not part.startswith("TPOT "))


def standings(output: str) -> str:
    """The first fifteen of ``trilane leaderboard``, and what the columns mean."""
    table, meanings = output.split("\n\n")[:2]
    said = takewhile(lambda line: "runs in no setting" not in line, meanings.splitlines())
    return "\n".join([*table.splitlines()[:17], "...", "", *said])


def without_values(output: str) -> str:
    """What ``trilane quality --published`` prints above the list of values."""
    return output.rpartition("\n\n")[0]


def whole(output: str) -> str:
    """All of what was printed."""
    return output


SHOWN: dict[str, Callable[[str], str]] = {  # by the mark around the block
    "recommend": recommendation, "tune": command_line, "fit": answer, "accuracy": over_all, "regimes": by_regime,
    "models": by_model, "by-paper": by_paper, "papers": whole, "demo": without_meanings, "real": without_meanings,
    "leaderboard": standings, "leaderboard-whole": whole, "quality": whole, "requests": whole,
    "published": without_values,
}


def block(name: str, output: str) -> str:
    """The output of a command, as a page shows it."""
    return f"```text\n{SHOWN[name](output).strip()}\n```\n"


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
    """Every command line of the shell blocks of all pages, once, comments removed; a \\ joins two lines."""
    texts = [re.sub(r"\\\n *", "", text) for page in PAGES for text in blocks("sh", page)]
    lines = [line for text in texts for line in text.splitlines()]
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
        requests = _run(command_with(REQUESTS).replace("strata.png", f"{folder}/strata.png"))
        outputs = {"demo": _run(f"{demo()} --out {folder}"), "real": _run(demo("REAL")),
                   "fit": _run(command_with("trilane fit")), "tune": _run(command_with("trilane tune")),
                   "recommend": _run(command_with("trilane recommend")), "published": _run(PUBLISHED),
                   "quality": _run(command_with(QUALITY).replace("quality.png", f"{folder}/quality.png")),
                   **dict.fromkeys(("accuracy", "regimes", "models"), accuracy),
                   **dict.fromkeys(("papers", "by-paper"), papers), "requests": requests,
                   **dict.fromkeys(("leaderboard", "leaderboard-whole"), board)}
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
    narrow = {**os.environ, WIDTH: str(WIDEST)}
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=narrow).stdout


if __name__ == "__main__":
    update()
