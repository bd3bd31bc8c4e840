"""examples/pack_results.py: what is packed, and what is left out where the archive would be too large."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.pack_results import LIMIT_BYTES, pack


def fill(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))


def test_all_but_weights_and_half_written_files_is_packed(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {"report.md": 10, "a/journal/run.parquet": 99, "made.safetensors": 10, ".x.json.1.trilane-part/x.json": 10},
    )
    assert pack(tmp_path, tmp_path / "results.zip") == []
    assert pack(tmp_path, tmp_path / "results.zip") == []  # an archive is no result
    with zipfile.ZipFile(tmp_path / "results.zip") as packed:
        assert set(packed.namelist()) == {"report.md", "a/journal/run.parquet", "MANIFEST.txt"}
        assert packed.read("MANIFEST.txt").startswith(b"2 files; left out, because of the limit of the archive: none")


def test_the_largest_are_left_out_first_and_named(tmp_path: Path) -> None:
    fill(tmp_path, {"small": 1_000, "large": 50_000, "larger": 60_000, "medium": 20_000})
    out = pack(tmp_path, tmp_path / "results.zip", limit_bytes=40_000)
    assert [file.name for file in out] == ["larger", "large"]
    assert (tmp_path / "results.zip").stat().st_size <= 40_000
    with zipfile.ZipFile(tmp_path / "results.zip") as packed:
        assert set(packed.namelist()) == {"small", "medium", "MANIFEST.txt"}
        lines = packed.read("MANIFEST.txt").decode().splitlines()
    assert lines[1:] == ["      60,000 bytes  larger", "      50,000 bytes  large"]


@pytest.mark.parametrize("limit_bytes", [3_000, 10_000, 37_123])
def test_the_archive_is_never_larger_than_its_limit(tmp_path: Path, limit_bytes: int) -> None:
    fill(tmp_path, {f"folder {n % 3}/{'long name ' * 5}{n}": 10 + 37 * n for n in range(40)})
    pack(tmp_path, tmp_path / "results.zip", limit_bytes)
    assert (tmp_path / "results.zip").stat().st_size <= limit_bytes


def test_the_limit_is_16_mb() -> None:
    assert LIMIT_BYTES == 16_000_000
