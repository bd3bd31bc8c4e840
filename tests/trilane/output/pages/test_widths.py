"""Pages that are as narrow as their output: no number and no name is cut."""

from __future__ import annotations

import re
import shlex
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from tests.trilane.output.pages.golden import COMMANDS, file_of, page
from trilane.output.pages.output import PIPE, WIDTH, show, table
from trilane.output.pages.widths import Command, fitted, folded, folded_command

NUMBER = re.compile(r"\d[\d,.]*\d")
ROWS = [("best", "40.1", "3.67", "", "-ub 2048"),
        ("runner-up", "36.7", "3.28", "2% slower: copies of experts", "-ub 4096")]


def lines_of(made: Table, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(fitted(made, width))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def some_table() -> Table:
    return table(("setting", "tokens/s", "first token s", "why it lost", "arguments"), ROWS, (0, 3, 4))


def test_a_table_with_room_stays_as_it_is() -> None:
    assert lines_of(some_table(), 80) == [
        "setting    tokens/s  first token s  why it lost                   arguments",
        "best           40.1           3.67                                -ub 2048",
        "runner-up      36.7           3.28  2% slower: copies of experts  -ub 4096",
    ]


def test_texts_and_headers_take_several_lines_before_anything_is_cut() -> None:
    assert lines_of(some_table(), 60) == [
        "                      first token",
        "setting    tokens/s             s  why it lost     arguments",
        "best           40.1          3.67                  -ub 2048",
        "runner-up      36.7          3.28  2% slower:      -ub 4096",
        "                                   copies of",
        "                                   experts",
    ]


def test_a_table_turns_where_that_is_too_wide() -> None:
    assert lines_of(some_table(), 40) == [
        "best",
        "  tokens/s       40.1",
        "  first token s  3.67",
        "  arguments      -ub 2048",
        "runner-up",
        "  tokens/s       36.7",
        "  first token s  3.28",
        "  why it lost    2% slower: copies of",
        "                 experts",
        "  arguments      -ub 4096",
    ]


CELL = st.text("abc 1.", max_size=30)


@given(
    columns=st.integers(1, 7), width=st.integers(60, 100), texts=st.integers(0, 7), data=st.data(),
)
def test_no_table_is_wider_than_its_output_and_none_loses_a_number(
    columns: int, width: int, texts: int, data: st.DataObject
) -> None:
    names = [f"column {place} of {columns}" for place in range(columns)]
    numbers = [[f"{place}{row}123.456" for place in range(columns)] for row in range(3)]
    cells = [[data.draw(CELL) if place < texts else value for place, value in enumerate(row)] for row in numbers]
    lines = lines_of(table(names, cells, min(texts, columns)), width)
    assert max(map(len, lines), default=0) <= width
    whole = "\n".join(lines)
    assert [value for row in numbers for place, value in enumerate(row) if place >= texts and value not in whole] == []


def test_long_lines_go_on_below_their_last_column() -> None:
    assert folded(f"row  1  {'word ' * 8}".rstrip(), 30) == [
        "row  1  word word word word", "        word word word word",
    ]
    assert folded(f"- {'word ' * 6}".rstrip(), 16) == ["- word word word", "  word word word"]
    assert folded("one two three", 8) == ["one two", "three"]


def test_a_long_command_line_stays_one_for_the_shell() -> None:
    command = "llama-server -m model.gguf " + " ".join(f"--option-{n} {n}" for n in range(12))
    lines = folded_command(command, 60)
    assert max(map(len, lines)) <= 60
    assert len(lines) > 1
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_command_line_whole(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", WIDTH):
        monkeypatch.setenv(name, "60")
    monkeypatch.setenv("NO_COLOR", "1")
    if terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
    command = "llama-server -m model.gguf -ngl 99 --n-cpu-moe 24 -c 4352 -fa on -b 2048 -ub 2048"
    show(None, Command(command))
    assert (capsys.readouterr().out == f"{command}\n") == terminal


@pytest.mark.parametrize("name", COMMANDS)
def test_no_piped_line_is_too_long(name: str) -> None:
    lines = file_of(name).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > PIPE] == []


@pytest.mark.parametrize("name", ["tune", "fit", "policies", "models", "hardware", "compare"])
def test_eighty_columns_are_enough(name: str) -> None:
    wide, narrow = (page(name, width) for width in (PIPE, 80))
    assert [line for line in narrow.splitlines() if len(line) > 80] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow
    assert {*NUMBER.findall(wide)} <= {*NUMBER.findall(narrow)}
