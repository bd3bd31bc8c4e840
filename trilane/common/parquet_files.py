"""Parquet files whose pages have checksums: a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from trilane.common.errors import ErrorClass, TrilaneError
from trilane.common.files import atomic_path, check_no_pipe

_ROWS_TOGETHER = 1 << 16
_READ_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, MemoryError)  # of a damaged file


class ParquetError(TrilaneError):
    """A file that is not Parquet, or damaged."""


def write_parquet(table: pa.Table, path: str | Path) -> None:
    """Write a table, whole or not at all; the same bytes for the same table."""
    content = pa.BufferOutputStream()
    parquet.write_table(
        table, content, compression="zstd", version="2.6", row_group_size=_ROWS_TOGETHER, write_page_checksum=True
    )
    with atomic_path(path) as aside:
        aside.write_bytes(content.getvalue())


def read_parquet(path: str | Path, most_rows: int, error: ErrorClass = ParquetError) -> pa.Table:
    """The table in a file, of ``most_rows`` at most.

    Raises ``error``, which names the file, if it is not Parquet, damaged or larger; OSError if it cannot be read.
    """
    check_no_pipe(path, error)
    content = Path(path).read_bytes()
    if not content.startswith(b"PAR1"):
        raise error(f"{path}: expected a Parquet file, this is not Parquet")
    try:
        with parquet.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            groups = [file.metadata.row_group(place) for place in range(file.metadata.num_row_groups)]
            if sum(group.num_rows for group in groups) <= most_rows:
                table = file.read(use_threads=False)
                table.validate(full=True)
                return table
    except _READ_ERRORS:
        pass
    raise error(
        f"{path}: damaged, of a kind that Trilane does not write, or of more than {most_rows:,} rows; copy it again or "
        f"make it anew"
    )
