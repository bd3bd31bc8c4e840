"""The journal: what it has taken it gives back, whatever happened to its last line."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.study.sweep import journal
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.journal import HEAD, journal_of, rows_in

Rows = dict[str, dict[str, Any]]
ROWS = [{"point": f"sha256:{n}", "tpot_ms": n / 3, "policy": "dali — ü\n", "error": ""} for n in range(3)]
CELLS = st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.booleans()


def write(output: Path, rows: list[dict[str, Any]]) -> Path:
    with journal_of(output) as kept:
        for row in rows:
            kept.add(row)
        return kept.path


def read(output: Path) -> Rows:
    with journal_of(output) as kept:
        return dict(kept.rows)


@settings(max_examples=30)
@given(rows=st.lists(st.dictionaries(st.text(), CELLS)))
def test_what_it_takes_it_gives_back(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    keyed = [{**row, "point": str(place)} for place, row in enumerate(rows)]
    output = tmp_path_factory.mktemp("kept") / "o.parquet"
    write(output, keyed)
    assert list(read(output).values()) == keyed


def torn_anywhere(folder: Path, read_rows: Callable[[bytes, str], Rows]) -> None:
    """At whatever byte the last line is torn: the rows before it are there, and it is added again as if it were new."""
    path = write(folder / "o.parquet", ROWS)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert list(read_rows(whole[:end], "j").values()) == ROWS[:2]
        write(folder / "o.parquet", ROWS[2:])
        assert path.read_bytes() == whole


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    torn_anywhere(tmp_path, rows_in)


def keeps_torn_lines(content: bytes, where: str) -> Rows:
    """A reader that takes the last line for a row although it does not end."""
    return rows_in(content if content.endswith(b"\n") else content + b"\n", where)


def test_a_reader_that_keeps_torn_lines_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, SweepError)):
        torn_anywhere(tmp_path, keeps_torn_lines)
    monkeypatch.setattr(journal, "rows_in", keeps_torn_lines)
    with pytest.raises((AssertionError, SweepError)):
        torn_anywhere(tmp_path, rows_in)


def test_a_torn_first_line_is_no_journal_yet(tmp_path: Path) -> None:
    path = tmp_path / "o.parquet.journal"
    for end in range(len(HEAD)):
        path.write_bytes(HEAD[:end])
        write(tmp_path / "o.parquet", ROWS)
        assert list(read(tmp_path / "o.parquet").values()) == ROWS
        path.unlink()


def test_what_is_written_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    write(tmp_path / "o.parquet", ROWS)
    monkeypatch.undo()
    assert list(read(tmp_path / "o.parquet").values()) == ROWS


def test_a_full_disk_costs_the_row_that_it_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, [700]

    def limited(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(file, data[: room[0]])
        room[0] -= written
        return written

    rows = [{"point": str(n), "policy": 100 * "x"} for n in range(9)]
    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "o.parquet", rows)
    monkeypatch.undo()
    kept = list(read(tmp_path / "o.parquet").values())
    assert kept == rows[: len(kept)]
    assert 0 < len(kept) < 9
    write(tmp_path / "o.parquet", rows[len(kept) :])
    assert list(read(tmp_path / "o.parquet").values()) == rows


def test_of_two_rows_of_one_point_the_later_counts(tmp_path: Path) -> None:
    write(tmp_path / "o.parquet", [{"point": "a", "error": "x"}, {"point": "a", "error": ""}])
    assert read(tmp_path / "o.parquet") == {"a": {"point": "a", "error": ""}}


def test_one_without_rows_does_not_stay(tmp_path: Path) -> None:
    write(tmp_path / "o.parquet", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"notes of mine\n", b"{}\n", b"x"])
def test_another_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "o.parquet.journal"
    path.write_bytes(content)
    with pytest.raises(SweepError, match=r"o\.parquet\.journal: expected the journal of a sweep"):
        read(tmp_path / "o.parquet")
    assert path.read_bytes() == content


def test_damage_in_the_middle_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "o.parquet", ROWS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\0\0\0\n", *lines[3:]]))
    with pytest.raises(SweepError, match="line 3: expected a row of a sweep; the file was damaged"):
        read(tmp_path / "o.parquet")


def test_two_sweeps_do_not_share_one(tmp_path: Path) -> None:
    output = tmp_path / "o.parquet"
    with journal_of(output) as first:
        first.add(ROWS[0])
        with pytest.raises(SweepError, match="another sweep is writing there"):
            read(output)
        first.add(ROWS[1])
    assert list(read(output).values()) == ROWS[:2]
