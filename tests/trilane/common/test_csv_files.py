"""CSV files: read by the hints of a record's fields, and refused with the line and the field."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilane.common.csv_files import read_csv, write_csv
from trilane.common.errors import TrilaneError
from trilane.common.files import atomic_path, lock_file
from trilane.common.hints import at_least
from trilane.common.json_text import MOST_DEPTH, JsonError, parse_json


class Stone(NamedTuple):
    name: str
    grams: Annotated[float, at_least(0)] | None
    pieces: int = 1
    smooth: bool = False


def test_cells_are_read_by_their_hints_and_empty_ones_are_none_or_the_default(tmp_path: Path) -> None:
    write_csv([(*Stone._fields, "note"), ("a", 2.5, 3, "yes", "x"), ("", "", "", "", "")], tmp_path / "s.csv")
    assert read_csv(Stone, tmp_path / "s.csv", "stones", TrilaneError) == [Stone("a", 2.5, 3, True), Stone("", None)]


@pytest.mark.parametrize(("text", "words"), [
    ("name,grams\na,2\nb,x\n", "expected stones: line 3: grams: expected a number >= 0 or an empty cell, got 'x'"),
    ("name,grams\na,-1\n", "line 2: grams: expected a number >= 0 or an empty cell, got -1"),
    ("name,grams,smooth\na,1,maybe\n", "line 2: smooth: expected yes or no, got 'maybe'"),
    ("name,grams,pieces\na,1,1.5\n", "line 2: pieces: expected a whole number, got '1.5'"),
    ("name\na\n", "its first line lacks the columns grams"),
    ("name,grams\na,1,2\n", "line 2: more cells than columns"),
    ("name,grams\n\"a,1\n", "expected stones: unexpected end of data"),
    ("name,grams\n\xff,1\n", "expected stones: 'utf-8' codec"),
])
def test_anything_else_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(TrilaneError) as refused:
        read_csv(Stone, tmp_path / "s.csv", "stones", TrilaneError)
    assert str(refused.value).startswith(f"{tmp_path / 's.csv'}: expected stones: ")
    assert words in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrilaneError, match=r"s\.csv: expected stones: .*No such file"):
        read_csv(Stone, tmp_path / "s.csv", "stones", TrilaneError)


# --- Files that appear whole, and files that are locked ---------------------------------------------------------------


def test_a_file_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    with atomic_path(target) as path:
        path.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_block_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("earlier")
    with suppress(KeyError), atomic_path(target) as path:
        path.write_text("half")
        raise KeyError
    assert target.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [target]


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = lock_file(path)
    with pytest.raises(BlockingIOError):
        lock_file(path)
    path.unlink()  # its owner may remove it: the next one locks a new file
    second = lock_file(path)
    os.close(first)
    with pytest.raises(BlockingIOError):
        lock_file(path)
    os.close(second)
    os.close(lock_file(path))


# --- Strict JSON, of plain values, within limits ----------------------------------------------------------------------


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_PLAIN, st.booleans())
def test_what_is_written_is_read_back(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text, "here") == value
    assert parse_json(text.encode(), "here") == value


@pytest.mark.parametrize(("text", "problem"), [
    ("", "Expecting value"),
    ("{'a': 1}", "Expecting property name"),
    ('{"a": 1, "a": 2}', "duplicate key 'a'"),
    ('["\\ud800"]', "surrogates not allowed"),
    ('{"\\udfff": 1}', "surrogates not allowed"),
    ("1" * 5000, "is beyond 64 bits"),
    (str(2**63), "the whole number '9223372036854775808' is beyond 64 bits"),
    ("[" * 100_000, f"more than {MOST_DEPTH} deep"),
    ('{"a":' * 100_000, f"more than {MOST_DEPTH} deep"),
    ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), f"more than {MOST_DEPTH} deep"),
    (b'"\xff"', "can't decode"),
    (b'"\xed\xa0\x80"', "can't decode"),
], ids=lambda it: ascii(it)[:20])
def test_what_is_no_plain_value_is_refused_in_one_sentence(text: str | bytes, problem: str) -> None:
    with pytest.raises(JsonError) as raised:
        parse_json(text, "prompts.jsonl line 3")
    message = str(raised.value)
    assert message.startswith("prompts.jsonl line 3: not plain JSON: ")
    assert problem in message
    assert len(message) < 250


def test_a_reader_may_take_larger_whole_numbers() -> None:
    assert parse_json(str(2**64 - 1), "here", below=2**64) == 2**64 - 1
    with pytest.raises(JsonError, match="is beyond 64 bits"):
        parse_json(str(2**64), "here", below=2**64)


def test_the_greatest_depth_is_read() -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH, "here") is not None
