"""Output of verbs: nothing is padded in a pipe, one format for each kind of number."""

from __future__ import annotations

import pytest

from tests.kit.commands import Trilane
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
