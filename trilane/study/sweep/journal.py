"""The rows that a sweep has finished so far: an SQLite database next to its output."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from trilane.study.sweep.axes import SweepError

_APPLICATION_ID = 0x7472696C  # "tril", in the header of the database
_OLD_HEAD = b'{"journal": "trilane sweep"'


class SweepJournal:
    """An open journal. ``rows``: those that it held when it was opened, by point."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        found = connection.execute("SELECT point, content FROM sweep_rows ORDER BY rowid")
        self.rows: dict[str, dict[str, Any]] = {point: json.loads(content) for point, content in found}
        self.needed = bool(self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row, in place of an earlier one of the same point: when this returns, it is on the disk."""
        values = (row["point"], json.dumps(row))
        try:
            self._connection.execute("INSERT OR REPLACE INTO sweep_rows VALUES (?, ?)", values)
        except sqlite3.OperationalError as error:  # such as a full disk
            raise OSError(f"{self.path}: {error}") from None
        self.needed = True

    def discard(self) -> None:
        """Remove the file when it is closed, since the output has all rows."""
        self.needed = False


@contextmanager
def journal_of(output: Path) -> Iterator[SweepJournal]:
    """The journal of an output, locked for this sweep; a journal without rows is removed.

    Raises SweepError if another sweep holds it, and if the file is something else.
    """
    path = output.with_name(f"{output.name}.journal")
    _check_file(path)
    with closing(_opened(path, output)) as connection:
        journal = SweepJournal(path, connection)
        try:
            yield journal
        finally:
            connection.close()
            if not journal.needed:
                path.unlink(missing_ok=True)


def _opened(path: Path, output: Path) -> sqlite3.Connection:
    """The database, for this process alone; every statement is a transaction, and is on the disk when it ends."""
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # until it is closed, however the process ends
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN EXCLUSIVE")
        if connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise _not_a_journal(path)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute("CREATE TABLE sweep_rows (point TEXT PRIMARY KEY, content TEXT NOT NULL)")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        if getattr(error, "sqlite_errorname", "") != "SQLITE_BUSY":
            raise _not_a_journal(path, f": {error}") from None
        raise SweepError(
            f"{output}: another sweep is writing there; wait until it has ended, or name another file"
        ) from None
    except SweepError:
        connection.close()
        raise
    return connection


def _check_file(path: Path) -> None:
    """SQLite would write into an empty or short file whatever it is. Raises SweepError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(len(_OLD_HEAD))
    if head == _OLD_HEAD:
        raise SweepError(
            f"{path}: this journal was written by an earlier version of Trilane, and cannot be continued; finish the "
            f"sweep with that version, or move the file away and play all points again"
        )
    if head and not head.startswith(b"SQLite format 3\0"):
        raise _not_a_journal(path)


def _not_a_journal(path: Path, why: str = "") -> SweepError:
    return SweepError(f"{path}: expected the journal of a sweep, this is another file or damaged{why}; move it away")
