"""The journal of a study: what it has finished so far, in an SQLite database next to its output.

An entry has a key, a JSON object and, where that is not enough, bytes. It is on the disk when ``Journal.add`` returns.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from trilane.common.errors import ErrorClass
from trilane.common.files import full_disk, locked, plain_target
from trilane.common.json_text import parse_json

_HEAD = b"SQLite format 3\0"
_APPLICATION_ID = 0x7472696C  # "tril", in the header of the database
_MOST_BYTES = 2**30  # of an entry, the largest value that SQLite reads
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


class Study(NamedTuple):
    """A kind of study that keeps journals: its name, the class of its errors, and what to do where another is busy."""

    name: str
    error: ErrorClass
    elsewhere: str = "name another file"

    @property
    def table(self) -> str:
        """The SQL of its only table."""
        return (
            f"CREATE TABLE {self.name}_entries (key TEXT PRIMARY KEY, content TEXT NOT NULL, blob BLOB NOT NULL, "
            f"checksum TEXT NOT NULL)"
        )

    def check_file(self, path: Path) -> None:
        """Refuse other files: SQLite would write into an empty or short file whatever it is."""
        if path.is_dir():
            raise self.other_version(path)
        if path.exists():
            with path.open("rb") as file:
                head = file.read(len(_HEAD))
            if head and head != _HEAD:
                raise self.not_a_journal(path)

    def busy(self, path: Path) -> Exception:
        """The refusal of a journal that another process holds."""
        wait = f"wait until it has ended, or {self.elsewhere}"
        return self.error(f"{path.with_suffix('')}: another {self.name} is writing there; {wait}")

    def other_version(self, path: Path) -> Exception:
        """The refusal of a journal with another table."""
        return self.error(
            f"{path}: this journal was written by another version of Trilane, and cannot be continued; finish the "
            f"{self.name} with that version, or move it away and begin again"
        )

    def not_a_journal(self, path: Path, why: str = "") -> Exception:
        """The refusal of another file, or of a damaged one."""
        return self.error(
            f"{path}: expected the journal of a {self.name}, this is another file or damaged{why}; move it away"
        )


class Journal:
    """An open journal. ``entries``: the JSON objects that it holds, by key, in the order in which they were added."""

    def __init__(self, path: Path, study: Study) -> None:
        self.path, self._study = path, study
        self._open()
        self._needed = bool(self.entries)

    def add(self, key: str, content: Mapping[str, Any], blob: bytes = b"") -> None:
        """Keep an entry, in place of an earlier one of the same key: when this returns, it is on the disk."""
        text = json.dumps(content)
        values = (key, text, blob, checksum_of(key.encode(), text.encode(), blob))
        with self._errors():  # such as a full disk
            self._connection.execute(f"INSERT OR REPLACE INTO {self._study.name}_entries VALUES (?, ?, ?, ?)", values)
        self.entries[key] = dict(content)
        self._needed = True

    def blob(self, key: str) -> bytes:
        """The bytes of an entry."""
        query = f"SELECT CAST(blob AS BLOB) FROM {self._study.name}_entries WHERE key = ?"
        with self._errors():
            return bytes(self._connection.execute(query, (key,)).fetchone()[0])

    def begin_anew(self, before: Path) -> None:
        """Move the file to ``before``, in place of an earlier journal, and go on with an empty one."""
        self._study.check_file(before)
        self._connection.close()
        self.path.replace(before)
        self._open()

    def discard(self) -> None:
        """Remove the file when it is closed, since the output has all entries."""
        self._needed = False

    def close(self) -> None:
        """Close the file; one without entries is removed."""
        self._connection.close()
        if not self._needed:
            self.path.unlink(missing_ok=True)

    def damaged(self, why: str) -> Exception:
        """The refusal of a journal whose entries are not those of its study."""
        return self._study.not_a_journal(self.path, f": {why}")

    def _open(self) -> None:
        self._study.check_file(self.path)
        is_new = not self.path.exists()
        with self._errors():
            self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            self._begin()
            self.entries = dict(self._read())
        except BaseException:
            self._connection.close()
            if is_new:
                self.path.unlink(missing_ok=True)
            raise

    def _begin(self) -> None:
        """Make every statement a transaction that is on the disk when it ends; SQLite's own lock keeps others out.

        A database that is not exactly such a journal is left as it is: one with views or triggers would run their code.
        """
        connection = self._connection
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
        with self._errors():
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # until it is closed, however the process ends
            holds = connection.execute("SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
            identity = connection.execute("PRAGMA application_id").fetchone()[0]
            if identity not in (0, _APPLICATION_ID) or (holds and identity == 0):
                raise self._study.not_a_journal(self.path)
            if holds and holds != [("table", self._study.table)]:
                raise self._study.other_version(self.path)
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise self._study.not_a_journal(self.path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN EXCLUSIVE")
            if not holds:
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(self._study.table)
            connection.execute("COMMIT")

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Keys and JSON objects, all of which have their checksums, which SQLite lacks."""
        columns = ", ".join(f"CAST({name} AS BLOB)" for name in ("key", "content", "blob", "checksum"))
        with self._errors():
            for *parts, checksum in self._connection.execute(
                f"SELECT {columns} FROM {self._study.name}_entries ORDER BY rowid"
            ):
                if None in parts or checksum != checksum_of(*parts).encode():
                    raise self._study.not_a_journal(self.path)
                key, text, _ = parts
                try:
                    content = parse_json(text, "entry", self._study.error)
                except ValueError as error:
                    raise self.damaged(str(error)) from None
                if not isinstance(content, dict):
                    raise self._study.not_a_journal(self.path)
                yield key.decode(), content

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of SQLite as those of the study; only a damaged file is to be moved away, others may have good
        entries. A full disk is an OSError."""
        try:
            yield
        except UnicodeDecodeError:  # from a key, or from what a message of SQLite quotes
            raise self._study.not_a_journal(self.path) from None
        except sqlite3.Error as error:
            full_code = getattr(error, "sqlite_errorcode", 0)
            code = full_code & 0xFF  # an extended code has details in its upper bytes
            if code == sqlite3.SQLITE_BUSY:
                raise self._study.busy(self.path) from None
            if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise self.damaged(str(error)) from None
            if full_code in _FULL:
                raise full_disk(self.path) from None
            raise self._study.error(f"{self.path}: cannot be opened or written: {error}") from None


@contextmanager
def journal_of(path: Path, study: Study) -> Iterator[Journal]:
    """The journal at ``path``, locked for this study; a journal without entries is removed.

    Raises the study's error if another process holds it, if the file is something else or damaged, and if it cannot be
    opened or written; OSError if no file can be created in its folder, or the disk is full.
    """
    plain_target(path)
    with (
        locked(path.with_name(f"{path.name}.lock"), study.busy(path)),
        closing(Journal(path, study)) as journal,
    ):
        yield journal


def journal_next_to(output: Path) -> Path:
    """The path of the journal of an output file."""
    return output.with_name(f"{output.name}.journal")


def checksum_of(*parts: bytes) -> str:
    """The checksum of an entry's key, JSON and bytes."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
