"""CSV files: read by the hints of a record's fields, and refused with the line and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import pytest

from trilane.common.csv_files import read_csv, write_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import at_least


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
