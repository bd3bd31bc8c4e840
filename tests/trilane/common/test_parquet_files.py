"""Parquet with checksums of pages: whatever happens to them, a file is refused or read as it was written."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from trilane.common.parquet_files import ParquetError, read_parquet, write_parquet

TABLE = pa.table({
    "whole": pa.array([1, None, 2**62]), "number": pa.array([0.1, 0.2, None]), "text": pa.array(["a", "", None]),
    "category": pa.array(["gpu", "cpu", "gpu"]).dictionary_encode(),
}).replace_schema_metadata({"about": "what it is"})
MOST = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_parquet(TABLE, tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


def outcome(path: Path, content: bytes) -> pa.Table | None:
    """The table that is read, None if it is refused."""
    path.write_bytes(content)
    try:
        return read_parquet(path, MOST)
    except ParquetError:
        return None


def test_a_table_is_read_as_it_was_written_by_other_programs_too(path: Path) -> None:
    assert read_parquet(path, MOST).equals(TABLE, check_metadata=True)
    assert parquet.read_table(path, page_checksum_verification=True).equals(TABLE, check_metadata=True)
    pd.testing.assert_frame_equal(pd.read_parquet(path), TABLE.to_pandas())


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_no_flipped_bit_of_a_page_changes_what_is_read(path: Path) -> None:
    """Nor one of the lengths at the end."""
    whole = path.read_bytes()
    footer, last = 8 * (len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")), 8 * len(whole) - 1
    for bit in [*random.Random(7).sample(range(footer), 200), *range(last - 63, last + 1)]:
        table = outcome(path, flipped(whole, bit))
        assert table is None or table.equals(TABLE, check_metadata=True), bit


def test_a_flipped_bit_of_the_footer_changes_names_at_most(path: Path) -> None:
    """Parquet has no checksum for it; readers check names and metadata."""
    whole = path.read_bytes()
    footer, end = 8 * (len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")), 8 * (len(whole) - 8)
    for bit in random.Random(7).sample(range(footer, end), 200):
        table = outcome(path, flipped(whole, bit))
        assert table is None or len(table) == len(TABLE), bit


def test_a_file_that_was_cut_short_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    assert all(outcome(path, whole[:end]) is None for end in range(0, len(whole), 31))


def test_pages_of_other_programs_are_checked(path: Path) -> None:
    parquet.write_table(
        TABLE, path, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    assert read_parquet(path, MOST).equals(TABLE, check_metadata=True)
    whole = path.read_bytes()
    assert (2**62).to_bytes(8, "little") in whole
    assert outcome(path, whole.replace((2**62).to_bytes(8, "little"), (2**61).to_bytes(8, "little"), 1)) is None


def test_a_table_with_more_rows_than_expected_is_not_read(path: Path) -> None:
    parquet.write_table(pa.table({"a": pa.repeat(1, 10**6)}), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(ParquetError, match="of more than 1,000 rows"):
        read_parquet(path, MOST)


@pytest.mark.parametrize("content", [b"", b"hello", b"PAR1", b"PAR1" + 99 * b"\xff" + b"PAR1", b"PAR1\0\0\0\0PAR1"])
def test_other_files(path: Path, content: bytes) -> None:
    assert outcome(path, content) is None


def test_equal_tables_give_equal_bytes(path: Path, tmp_path: Path) -> None:
    write_parquet(read_parquet(path, MOST), tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == path.read_bytes()
