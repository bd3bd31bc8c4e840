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
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGE_NAMES = ("fit", "accuracy", "comparing", "traces", "measuring", "measuring_llama", "extending", "papers", "recommend", "tune",
              "pays", "leaderboard", "notes/accuracy", "notes/leaderboard", "notes/papers")
PAGES = (README, *(ROOT / "docs" / f"{name}.md" for name in PAGE_NAMES))
PICTURES = ("tpot.png", "gantt-dali.png", "cache.png", "accuracy.png", "papers.png", "leaderboard.png")
ACCURACY = "trilane accuracy --plot"
PAPERS = "trilane papers --plot"
LEADERBOARD = "trilane leaderboard"
WIDEST = 120  # characters of a line in a block
_KEPT = "\N{NO-BREAK SPACE}"


def answer(output: str) -> str:
    """The first lines of ``trilane fit``, up to those on the routing."""
    return "\n".join(takewhile(lambda line: not line.startswith("routing"), output.splitlines()))


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
    return output.partition("\nwhat does not run\n")[0]


def command_line(output: str) -> str:
    """The first lines of ``trilane tune``, up to other engines."""
    return "\n".join(takewhile(lambda line: not line.startswith("other engines"), output.splitlines()))


def by_paper(output: str) -> str:
    """The table of ``trilane papers`` alone."""
    return output.split("\n\n")[0]


def by_figure(output: str) -> str:
    """``trilane papers`` without that table."""
    return output.partition("\n\n")[2]


def without_meanings(output: str) -> str:
    """A comparison without the meanings of its columns, for which the page has a table."""
    return "\n\n".join(part for part in output.split("\n\n") if not part.startswith("TPOT "))


def standings(output: str) -> str:
    """The first fifteen of ``trilane leaderboard``, and what the columns mean."""
    table, meanings = output.split("\n\n")[:2]
    said = [line for line in meanings.splitlines() if "runs in no setting" not in line]
    return "\n".join([*table.splitlines()[:17], "...", "", *said])


def whole(output: str) -> str:
    """All of what was printed."""
    return output


SHOWN: dict[str, Callable[[str], str]] = {  # by the mark around the block
    "recommend": recommendation, "tune": command_line, "fit": answer, "accuracy": over_all, "regimes": by_regime, "models": by_model,
    "by-paper": by_paper, "papers": by_figure, "demo": without_meanings, "real": without_meanings,
    "leaderboard": standings, "leaderboard-whole": whole,
}


def block(name: str, output: str) -> str:
    """The output of a command, as a page shows it."""
    lines = SHOWN[name](output).strip().splitlines()
    return "\n".join(["```text", *folded(line.rstrip() for line in lines), "```\n"])


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Lines of at most ``WIDEST`` characters: a longer one goes on below its last column, a command after a \\.

    Lines below a column are part of the text above them, which is folded as a whole.
    """
    texts = iter(lines)
    text = next(texts)
    indent = _last_column(text)
    for line in texts:
        if indent and line.startswith(" " * indent) and line[indent] != " ":
            text += f" {line.strip()}"
            continue
        yield from _folded(text, indent)
        text, indent = line, _last_column(line)
    yield from _folded(text, indent)


def _last_column(line: str) -> int:
    """Where the last column of a line begins that is too long; 0 without columns, and for other lines."""
    gaps = [gap.end() for gap in re.finditer(r" {2,}", line) if gap.end() < WIDEST]
    return gaps[-1] if len(line) > WIDEST and gaps else 0


def _folded(line: str, indent: int) -> list[str]:
    if len(line) <= WIDEST:
        return [line]
    if line.startswith("llama-server "):
        kept = re.sub(r" (?!-)", _KEPT, line)  # options stay with their values
        parts = wrap(kept, WIDEST - 2, subsequent_indent="  ", break_on_hyphens=False)
        return " \\\n".join(parts).replace(_KEPT, " ").splitlines()
    head = line[:indent]
    return wrap(line[indent:], WIDEST, initial_indent=head, subsequent_indent=" " * (indent or 4),
                break_on_hyphens=False, break_long_words=False)


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
        outputs = {"demo": _run(f"{demo()} --out {folder}"), "real": _run(demo("REAL")),
                   "fit": _run(command_with("trilane fit")), "tune": _run(command_with("trilane tune")),
                   "recommend": _run(command_with("trilane recommend")),
                   **dict.fromkeys(("accuracy", "regimes", "models"), accuracy),
                   **dict.fromkeys(("papers", "by-paper"), papers),
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
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    update()
