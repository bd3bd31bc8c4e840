"""Parquet files with checksums: no damage to a file is read as other numbers."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from trilane.common.errors import ErrorClass, TrilaneError
from trilane.common.files import atomic_path

_MARK = b"trilane-blake2b:"  # in front of the checksum of the whole file
_CHECKSUM_BYTES = 32
_ROWS_TOGETHER = 1 << 16
_READ_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, MemoryError)  # of a damaged file


class ParquetError(TrilaneError):
    """A file that is not Parquet, or damaged."""


def write_parquet(table: pa.Table, path: str | Path) -> None:
    """Write a table, whole or not at all; the same bytes for the same table.

    Parquet has checksums for pages, but none for its footer. That of the whole file is written between the two, where
    other programs do not look.
    """
    sink = pa.BufferOutputStream()
    parquet.write_table(
        table, sink, compression="zstd", version="2.6", row_group_size=_ROWS_TOGETHER, write_page_checksum=True
    )
    content = sink.getvalue().to_pybytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")  # its length and "PAR1" follow it
    with atomic_path(path) as aside:
        aside.write_bytes(content[:footer] + _MARK + _checksum(content) + content[footer:])


def read_parquet(
    path: str | Path, most_rows: int, error: ErrorClass = ParquetError, *, foreign: bool = True
) -> pa.Table:
    """The table in a file, of ``most_rows`` at most. What other programs wrote has checksums of pages, or none; it is
    refused unless ``foreign``.

    Raises ``error``, which names the file, if it is not Parquet, damaged or larger; OSError if it cannot be read.
    """
    content = Path(path).read_bytes()
    if not content.startswith(b"PAR1"):
        raise error(f"{path}: expected a Parquet file, this is not Parquet")
    before, mark, after = content.rpartition(_MARK)
    if not (mark or foreign) or (mark and after[:_CHECKSUM_BYTES] != _checksum(before + after[_CHECKSUM_BYTES:])):
        raise error(f"{path}: damaged, since its checksum differs or is missing; copy it again or make it anew")
    table = _parsed(content, most_rows)
    if table is None:
        raise error(
            f"{path}: damaged, of a kind that Trilane does not write, or of more than {most_rows:,} rows; copy it "
            f"again or make it anew"
        )
    return table


def _parsed(content: bytes, most_rows: int) -> pa.Table | None:
    """The table in a file's content; None if it cannot be read or claims more rows."""
    try:
        with parquet.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            groups = [file.metadata.row_group(place) for place in range(file.metadata.num_row_groups)]
            table = file.read(use_threads=False) if sum(group.num_rows for group in groups) <= most_rows else None
            if table is not None:
                table.validate(full=True)
            return table
    except _READ_ERRORS:
        return None


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
