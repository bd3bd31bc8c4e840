"""What a sweep has done so far: a file beside its output, to which every row is added as it finishes.

JSON lines below a first line that says what the file is. A row counts once its line is complete, line end included: of
a sweep that was killed while it wrote, the torn last line is dropped and that point is played again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trilane.common.files import lock_file
from trilane.study.sweep.axes import SweepError

HEAD = b'{"journal": "trilane sweep", "format": 1}\n'


class Journal:
    """An open journal. ``rows``: those that it held when it was opened, by point; of two of one point, the later."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        content = _read_all(descriptor)
        self.rows = rows_in(content, str(path))
        self.empty = not self.rows
        os.ftruncate(descriptor, content.rfind(b"\n") + 1)
        if not content.startswith(HEAD):
            self._write(HEAD)

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row: when this returns, it is on the disk."""
        self.empty = False
        self._write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def remove(self) -> None:
        """All rows are in the output: it is not needed any more."""
        self.path.unlink()
        self.empty = True

    def _write(self, line: bytes) -> None:
        while line:  # a full disk takes a part, and refuses the next
            line = line[os.write(self._descriptor, line) :]
        os.fsync(self._descriptor)


def rows_in(content: bytes, where: str) -> dict[str, dict[str, Any]]:
    """The rows of all complete lines, by point. Raises SweepError if this is no journal, or a damaged one."""
    if not content.startswith(HEAD):
        if HEAD.startswith(content):  # killed while it began
            return {}
        raise SweepError(f"{where}: expected the journal of a sweep, this is another file; move it away")
    rows = {}
    lines = content.split(b"\n")[1:-1]  # what follows the last line end is torn, or nothing
    for number, line in enumerate(lines, 2):
        try:
            row = json.loads(line)
            rows[row["point"]] = row
        except (ValueError, KeyError, TypeError):
            raise SweepError(f"{where}, line {number}: expected a row of a sweep; the file was damaged") from None
    return rows


@contextmanager
def journal_of(output: Path) -> Iterator[Journal]:
    """The journal of an output, for this sweep alone; one without rows does not stay. Raises SweepError if another
    sweep has it."""
    path = output.with_name(f"{output.name}.journal")
    descriptor = _locked(path, output)
    try:
        journal = Journal(path, descriptor)
        try:
            yield journal
        finally:
            if journal.empty:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _locked(path: Path, output: Path) -> int:
    try:
        return lock_file(path)
    except BlockingIOError:
        raise SweepError(
            f"{output}: another sweep is writing there; wait until it has ended, or name another file"
        ) from None


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()
