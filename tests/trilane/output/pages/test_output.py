"""Output of verbs: nothing is padded in a pipe, one format for each kind of number."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from tests.kit.commands import Trilane
from tests.kit.results import some_entries
from tests.trilane.output.pages.golden import COMMANDS, FOLDER, file_of, page
from trilane.output.pages.leaderboard import leaderboard_page, machine_pages
from trilane.output.pages.output import (
    heading,
    note,
    number,
    pairs,
    percent,
    reason_of,
    show,
    signed_percent,
    table,
    working,
)
from trilane.study.leaderboard.standings import standings


def test_a_pipe_gets_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    long = "words " * 60  # folded, in a table that is as wide as the page
    show(None, table(("a", "b"), [("1", long), ("2", "short")], wrap=True), pairs([("name", "value", long)]), "\ntext ")
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "a  b"
    assert "2  short" in lines
    assert lines[-2:] == ["text", ""]
    assert [line for line in lines if line != line.rstrip()] == []


EVIL = "\x1b]0;owned [/red]:smile: \u202e\ud800"
SHOWN = r"\x1b]0;owned [/red]:smile: \u202e\ud800"


@pytest.mark.parametrize("terminal", [True, False])
def test_names_of_strangers_are_shown_and_not_obeyed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Neither control characters nor rich's markup and emoji codes."""
    if terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
    show(None, EVIL, heading(EVIL), pairs([("name", EVIL)]), table(("a", EVIL), [("1", EVIL)]), EVIL)
    note(EVIL)
    with working(EVIL) as say:
        say(EVIL)
    out, err = capsys.readouterr()
    assert out.count(SHOWN) == 6
    assert SHOWN in err
    assert not {"\u202e", "\ud800"} & {*out, *err}
    assert "\x1b]" not in out + err


def test_no_verb_pads(trilane: Trilane) -> None:
    for words in (("policies",), ("models",), ("hardware", "rtx3090-ddr4")):
        lines = trilane(*words).out.splitlines()
        assert len(lines) > 5
        assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(("text", "expected"), [
    (percent(0.123), "12%"), (percent(0.1234, 1), "12.3%"), (percent(-0.0001), "0%"), (percent(None), "-"),
    (signed_percent(0.1234), "+12.3%"), (signed_percent(-0.0001), "+0.0%"), (signed_percent(None), "-"),
    (number(1234.56), "1,234.6"), (number(1234.56, 0), "1,235"), (number(None), "-"),
])
def test_numbers(text: str, expected: str) -> None:
    assert text == expected


def test_errors_that_differ_in_numbers_alone_are_one_reason() -> None:
    assert reason_of("BudgetError: 0.03 GB of 1,243 are missing") == reason_of("BudgetError: 12 GB of 9 are missing")
    assert reason_of("BudgetError: 2 GB are missing") != reason_of("TraceError: 2 GB are missing")


# --- the page of the leaderboard, from a few entries by hand ----------------------------------------------------------


def printed(parts: object) -> list[str]:
    console = Console(file=StringIO(), width=160, highlight=False)
    for part in parts:  # type: ignore[attr-defined]
        console.print(part)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_standings_whole() -> None:
    *lines, empty, mine, rest = printed(leaderboard_page(standings(some_entries()), own=("quick",)))
    assert lines[0].startswith("3 policies (and 1 that cannot run) in 16 settings: 4 machines x 2 families of routing ")
    assert [line.split() for line in lines[1:5]] == [
        ["policy", "score", "lowest", "best", "in", "runs", "in", "KL"],
        ["1", "wild", "~", "159%", "100%", "3", "3", "-"],
        ["2", "steady", "79%", "50%", "2", "3"],
        ["3", "quick", "<", "71%", "50%", "1", "2"],
    ]
    assert lines[-3:] == ["~        changes the routing", "<        yours", "never runs in no setting: too small"]
    assert "best in  settings in which no policy that keeps the routing is more than 2% faster" in lines
    assert (empty, f"{mine} {rest}".replace("  ", " ")) == ("", (
        "quick is 3 of 3; none that keeps the routing is more than 2% faster in 1 of 2 settings: 8 GB laptop gpt-oss "
        "batch 1; it is worst in 8 GB laptop qwen batch 1, with 50% of the speed of the fastest"
    ))


def test_the_speeds_on_the_first_machine() -> None:
    lines = printed(machine_pages(standings(some_entries())))
    assert lines[1].startswith("8 GB laptop: rtx-4060-laptop+ddr5-5600+ryzen-9-7945hx; qwen3-30b-a3b@q4_k_m, ")
    assert lines[4].split() == ["wild", "20.0", "[18.0-22.0]", "20.0", "[18.0-22.0]", "16.0", "[14.4-17.6]", "-"]
    assert lines[6].split() == ["quick", "5.0", "[4.5-5.5]", "-", "16.0", "[14.4-17.6]", "-"]


# --- the pages of the verbs are as they were when last read -----------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_page(name: str) -> None:
    assert page(name) == file_of(name).read_text(encoding="utf-8")


def test_no_page_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(COMMANDS)
