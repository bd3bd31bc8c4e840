"""Text of unknown origin: a terminal shows all of it, and obeys none of it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilane.common.quoting import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Qwen3 → 30 B, größer", "Qwen3 → 30 B, größer"),
        ("two\nlines", "two\nlines"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("gnp.\u202egpj", "gnp.\\u202egpj"),
        ("over\rwritten", "over\\rwritten"),
        ("\ud800", "\\ud800"),
        ("line\u2028break", "line\\u2028break"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(codec=None)))
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(c) for c in shown if c != "\n"} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert shown.encode().decode() == shown
