"""The rows that a sweep has finished so far: an SQLite database next to its output."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from trilane.common.files import locked, plain_target
from trilane.common.json_text import parse_json
from trilane.study.sweep.axes import SweepError

_APPLICATION_ID = 0x7472696C  # "tril", in the header of the database
_TABLE = "CREATE TABLE sweep_rows (point TEXT PRIMARY KEY, content TEXT NOT NULL, checksum TEXT NOT NULL)"
_MOST_BYTES = 2**24  # of a row
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
_OLD_HEAD = b'{"journal": "trilane sweep"'


class SweepJournal:
    """An open journal. ``rows``: those that it held when it was opened, by point."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self.rows = _rows(path, connection)
        self.needed = bool(self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row, in place of an earlier one of the same point: when this returns, it is on the disk."""
        content = json.dumps(row)
        values = (row["point"], content, _checksum(content.encode()))
        with _sqlite_errors(self.path):  # such as a full disk
            self._connection.execute("INSERT OR REPLACE INTO sweep_rows VALUES (?, ?, ?)", values)
        self.needed = True

    def discard(self) -> None:
        """Remove the file when it is closed, since the output has all rows."""
        self.needed = False


@contextmanager
def journal_of(output: Path) -> Iterator[SweepJournal]:
    """The journal of an output, locked for this sweep; a journal without rows is removed.

    Raises SweepError if another sweep holds it, if the file is something else or damaged, and if it cannot be opened or
    written; OSError if no file can be created in its folder, or the disk is full.
    """
    path = plain_target(output.with_name(f"{output.name}.journal"))
    with locked(path.with_name(f"{path.name}.lock"), _busy(path)):
        _check_file(path)
        with _sqlite_errors(path):
            connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        with closing(connection):
            _begin(path, connection)
            journal = SweepJournal(path, connection)
            try:
                yield journal
            finally:
                connection.close()
                if not journal.needed:
                    path.unlink(missing_ok=True)


def _begin(path: Path, connection: sqlite3.Connection) -> None:
    """Every statement is a transaction, and is on the disk when it ends. SQLite's own lock keeps other programs out.

    A database that is not exactly such a journal is left as it is: one with views or triggers would run their code.
    """
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
    with _sqlite_errors(path):
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # until it is closed, however the process ends
        holds = connection.execute("SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        identity = connection.execute("PRAGMA application_id").fetchone()[0]
        if identity not in (0, _APPLICATION_ID) or (holds and identity == 0):
            raise _not_a_journal(path)
        if holds and holds != [("table", _TABLE)]:
            raise _other_version(path)
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise _not_a_journal(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN EXCLUSIVE")
        if not holds:
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(_TABLE)
        connection.execute("COMMIT")


def _rows(path: Path, connection: sqlite3.Connection) -> dict[str, dict[str, Any]]:
    """All rows by point, in the order in which they were added."""
    columns = "CAST(content AS BLOB), CAST(checksum AS BLOB)"
    with _sqlite_errors(path):
        found = connection.execute(f"SELECT {columns} FROM sweep_rows ORDER BY rowid").fetchall()
    if any(checksum != _checksum(content).encode() for content, checksum in found):  # SQLite has none
        raise _not_a_journal(path)
    try:
        rows = [parse_json(content, "row", SweepError) for content, _ in found]
        return {row["point"]: row for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise _not_a_journal(path, f": {error}") from None


def _checksum(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


@contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as SweepError; only a damaged file is to be moved away, others may have good rows.

    A full disk is an OSError.
    """
    try:
        yield
    except UnicodeDecodeError:  # from what a message of SQLite quotes
        raise _not_a_journal(path) from None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # an extended code has details in its upper bytes
        if code == sqlite3.SQLITE_BUSY:
            raise _busy(path) from None
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise _not_a_journal(path, f": {error}") from None
        if getattr(error, "sqlite_errorcode", 0) in _FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        raise SweepError(f"{path}: cannot be opened or written: {error}") from None


def _check_file(path: Path) -> None:
    """SQLite would write into an empty or short file whatever it is. Raises SweepError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(len(_OLD_HEAD))
    if head == _OLD_HEAD:
        raise _other_version(path)
    if head and not head.startswith(b"SQLite format 3\0"):
        raise _not_a_journal(path)


def _other_version(path: Path) -> SweepError:
    return SweepError(
        f"{path}: this journal was written by another version of Trilane, and cannot be continued; finish the sweep "
        f"with that version, or move the file away and play all points again"
    )


def _not_a_journal(path: Path, why: str = "") -> SweepError:
    return SweepError(f"{path}: expected the journal of a sweep, this is another file or damaged{why}; move it away")


def _busy(path: Path) -> SweepError:
    output = path.with_suffix("")
    return SweepError(f"{output}: another sweep is writing there; wait until it has ended, or name another file")
