"""The journal: the entries that it has taken are there again, whatever happened to the process or the file."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrun.errors import RefusedError
from tests.kit.commands import ROOT
from tests.kit.small_sweeps import journal_of_sweep
from trilane.study.journal import journal_of
from trilane.study.sweep.axes import SweepError
from trilane.study.validation.journal import VALIDATION

ROWS = [{"point": f"sha256:{n}", "tpot_ms": n / 3, "policy": "dali — ü\n", "error": ""} for n in range(3)]
CELLS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.booleans()


def changed(path: Path, *statements: str) -> bytes:
    """Change a database as another program would; its bytes afterwards."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        for statement in statements:
            other.execute(statement)
    return path.read_bytes()


def write(output: Path, rows: list[dict[str, Any]]) -> Path:
    with journal_of_sweep(output) as journal:
        for row in rows:
            journal.add(row["point"], row)
        return journal.path


def read(output: Path) -> list[dict[str, Any]]:
    with journal_of_sweep(output) as journal:
        return list(journal.entries.values())


@settings(max_examples=15)
@given(rows=st.lists(st.dictionaries(st.text(), CELLS)))
def test_rows_are_read_as_they_were_added(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    keyed = [{**row, "point": str(place)} for place, row in enumerate(rows)]
    output = tmp_path_factory.mktemp("kept") / "o.parquet"
    write(output, keyed)
    assert read(output) == keyed


def test_the_later_of_two_rows_of_one_point_replaces_the_earlier(tmp_path: Path) -> None:
    write(tmp_path / "o.parquet", [{"point": "a", "error": "x"}, {"point": "a", "error": ""}])
    assert read(tmp_path / "o.parquet") == [{"point": "a", "error": ""}]


def test_a_journal_without_rows_is_removed_and_so_is_one_that_is_discarded(tmp_path: Path) -> None:
    write(tmp_path / "o.parquet", [])
    assert list(tmp_path.iterdir()) == []
    with journal_of_sweep(tmp_path / "o.parquet") as journal:
        journal.add("sha256:0", ROWS[0])
        journal.discard()
    assert list(tmp_path.iterdir()) == []


# --- what may happen to it --------------------------------------------------------------------------------------------


def test_rows_are_there_after_the_process_was_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.kit.small_sweeps import journal_of_sweep\n"
        "with journal_of_sweep(Path(sys.argv[1])) as journal:\n"
        "    for n in range(5):\n"
        "        journal.add(str(n), {'point': str(n)})\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "o.parquet")], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert read(tmp_path / "o.parquet") == [{"point": str(n)} for n in range(5)]


def test_a_torn_end_costs_the_last_row_alone(tmp_path: Path) -> None:
    """Cut anywhere in what the last row has written."""
    live, cut = tmp_path / "live.parquet", tmp_path / "cut.parquet"
    log = tmp_path / "live.parquet.journal-wal"
    with journal_of_sweep(live) as journal:
        for row in ROWS[:2]:
            journal.add(row["point"], row)
        before = log.stat().st_size
        journal.add("sha256:2", ROWS[2])
        whole = log.read_bytes()
        for end in range(before, len(whole), 997):
            shutil.copy(journal.path, tmp_path / "cut.parquet.journal")
            (tmp_path / "cut.parquet.journal-wal").write_bytes(whole[:end])
            assert read(cut) == ROWS[:2]
            write(cut, ROWS[2:])
            assert read(cut) == ROWS


def test_a_full_disk_costs_the_row_that_it_refused(tmp_path: Path) -> None:
    rows = [{"point": str(n), "policy": 1000 * "x"} for n in range(99)]
    with journal_of_sweep(tmp_path / "o.parquet") as journal:
        journal._connection.execute("PRAGMA max_page_count = 9")
        with pytest.raises(OSError, match=r"No space left on device: .*o\.parquet\.journal"):
            [journal.add(row["point"], row) for row in rows]
    kept = read(tmp_path / "o.parquet")
    assert kept == rows[: len(kept)]
    assert 0 < len(kept) < 99
    write(tmp_path / "o.parquet", rows[len(kept) :])
    assert read(tmp_path / "o.parquet") == rows


def test_two_sweeps_do_not_share_one(tmp_path: Path) -> None:
    output = tmp_path / "o.parquet"
    with journal_of_sweep(output) as first:
        first.add("sha256:0", ROWS[0])
        with pytest.raises(SweepError, match="another sweep is writing there"):
            read(output)
        first.add("sha256:1", ROWS[1])
    assert read(output) == ROWS[:2]


def test_a_refused_second_sweep_does_not_unlock_the_first(tmp_path: Path) -> None:
    """Closing a file drops all POSIX locks that the process has on it, those of SQLite too."""
    output = tmp_path / "o.parquet"
    program = "import sys; from pathlib import Path; from tests.kit.small_sweeps import journal_of_sweep\n"
    program += "with journal_of_sweep(Path(sys.argv[1])): pass"
    with journal_of_sweep(output) as first:
        first.add("sha256:0", ROWS[0])
        with pytest.raises(SweepError, match="another sweep is writing there"):
            read(output)
        other = subprocess.run([sys.executable, "-c", program, str(output)], cwd=ROOT, capture_output=True, text=True)
        assert "another sweep is writing there" in other.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["o.parquet.journal"]


def test_a_journal_is_removed_while_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it may be another sweep's."""
    output, unlink, removed = tmp_path / "o.parquet", Path.unlink, []

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        with pytest.raises(SweepError, match="another sweep is writing there"):
            read(output)
        removed.append(path.name)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlinked)
    write(output, [])
    assert removed == ["o.parquet.journal", "o.parquet.journal.lock"]
    assert list(tmp_path.iterdir()) == []


# --- a disk that fails, a file that is damaged ------------------------------------------------------------------------


def test_what_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    """Its rows may be good: the message must not have it moved away."""
    write(tmp_path / "o.parquet", ROWS)
    (tmp_path / "o.parquet.journal-wal").mkdir()
    with pytest.raises(SweepError, match=r"o\.parquet\.journal: cannot be opened or written: unable to open"):
        read(tmp_path / "o.parquet")


def test_a_journal_that_became_read_only_says_so(tmp_path: Path) -> None:
    with journal_of_sweep(tmp_path / "o.parquet") as journal:
        journal._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(SweepError, match=r"o\.parquet\.journal: cannot be opened or written: .*readonly"):
            journal.add("sha256:0", ROWS[0])


@pytest.mark.parametrize("content", ["'{'", "'[]'", "'{}'", "7", "CAST(x'22ff22' AS TEXT)"])
def test_a_damaged_row_is_said_to_be(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "o.parquet", ROWS)
    changed(path, f"UPDATE sweep_entries SET content = {content} WHERE rowid = 2")
    with pytest.raises(SweepError, match=r"o\.parquet\.journal: .*damaged.*move it away"):
        read(tmp_path / "o.parquet")


def test_a_damaged_page_is_said_to_be(tmp_path: Path) -> None:
    path = write(tmp_path / "o.parquet", [{"point": str(n), "policy": 1000 * "x"} for n in range(9)])
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    with pytest.raises(SweepError, match=r"o\.parquet\.journal: .*damaged.*move it away"):
        read(tmp_path / "o.parquet")


# --- other files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "expected"), [
    (b"notes of mine\n", "expected the journal of a sweep"),
    (b"x", "expected the journal of a sweep"),
    (b"SQLite format 3\0 and no more", "expected the journal of a sweep"),
    (b'{"journal": "trilane sweep", "format": 1}\n', "expected the journal of a sweep"),
])
def test_another_file_is_left_alone(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "o.parquet.journal"
    path.write_bytes(content)
    with pytest.raises(SweepError, match=expected):
        read(tmp_path / "o.parquet")
    assert path.read_bytes() == content


def test_a_journal_of_another_study_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "o.parquet", ROWS)
    before = path.read_bytes()
    with pytest.raises(RefusedError, match="written by another version"), journal_of(path, VALIDATION):
        pass
    assert path.read_bytes() == before


def test_an_entry_may_have_bytes(tmp_path: Path) -> None:
    with journal_of(tmp_path / "journal", VALIDATION) as journal:
        journal.add("run", {"policy": "dali"}, b"\0spans")
        journal.add("samples", {})
    with journal_of(tmp_path / "journal", VALIDATION) as journal:
        assert journal.entries == {"run": {"policy": "dali"}, "samples": {}}
        assert (journal.blob("run"), journal.blob("samples")) == (b"\0spans", b"")


@pytest.mark.parametrize("application_id", [0, 7])
def test_another_database_is_left_alone(tmp_path: Path, application_id: int) -> None:
    path = tmp_path / "o.parquet.journal"
    before = changed(path, f"PRAGMA application_id = {application_id}", "CREATE TABLE mine (name TEXT)")
    with pytest.raises(SweepError, match="expected the journal of a sweep"):
        read(tmp_path / "o.parquet")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS key, "
ENDLESS += "x AS content, x AS blob, x AS checksum FROM n"


@pytest.mark.parametrize("statements", [
    ["DROP TABLE sweep_entries", f"CREATE VIEW sweep_entries AS {ENDLESS}"],
    ["CREATE TRIGGER t AFTER INSERT ON sweep_entries BEGIN DELETE FROM sweep_entries; END"],
    ["DROP TABLE sweep_entries", "CREATE TABLE sweep_entries (key TEXT PRIMARY KEY, content TEXT NOT NULL)"],
])
def test_a_journal_with_anything_else_in_it_is_refused(tmp_path: Path, statements: list[str]) -> None:
    """A view would be computed, without an end perhaps, and a trigger would run with every row."""
    path = write(tmp_path / "o.parquet", ROWS)
    before = changed(path, *statements)
    with pytest.raises(SweepError, match="written by another version of Trilane"):
        read(tmp_path / "o.parquet")
    assert path.read_bytes() == before


def test_no_flipped_bit_of_a_journal_is_read_as_another_row(tmp_path: Path) -> None:
    """Rows may be lost, and are played again then."""
    path, rng = write(tmp_path / "o.parquet", ROWS), random.Random(5)
    whole = path.read_bytes()
    used = [place for place, byte in enumerate(whole) if byte]
    for place in rng.sample(used, 200):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert all(row in ROWS for row in read(tmp_path / "o.parquet"))
        except SweepError:
            assert path.read_bytes() == damaged


@pytest.mark.parametrize("end", [1, 50, 100, 4096, 5000, 9000])
def test_a_journal_that_was_cut_short_is_refused_and_stays_as_it_is(tmp_path: Path, end: int) -> None:
    path = write(tmp_path / "o.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:end])
    before = path.read_bytes()
    with pytest.raises(SweepError, match="expected the journal of a sweep, this is another file or damaged"):
        read(tmp_path / "o.parquet")
    assert path.read_bytes() == before


def test_an_empty_file_is_a_journal_that_was_never_begun(tmp_path: Path) -> None:
    (tmp_path / "o.parquet.journal").touch()
    write(tmp_path / "o.parquet", ROWS)
    assert read(tmp_path / "o.parquet") == ROWS
    assert [path.name for path in tmp_path.iterdir()] == ["o.parquet.journal"]
