"""Files that appear whole, and files that are locked."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from trilane.common.files import atomic_path, lock_file


def test_a_file_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    with atomic_path(target) as path:
        path.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_block_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("earlier")
    with suppress(KeyError), atomic_path(target) as path:
        path.write_text("half")
        raise KeyError
    assert target.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [target]


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = lock_file(path)
    with pytest.raises(BlockingIOError):
        lock_file(path)
    path.unlink()  # its owner may remove it: the next one locks a new file
    second = lock_file(path)
    os.close(first)
    with pytest.raises(BlockingIOError):
        lock_file(path)
    os.close(second)
    os.close(lock_file(path))
