"""Files that appear whole, files that are locked, and strict YAML."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from trilane.common.files import atomic_path, lock_file
from trilane.common.yaml_files import YamlError, read_yaml

ROOT = Path(__file__).parents[3]
YAML_FILES = sorted(
    path.relative_to(ROOT) for room in ("traces", "sim", "examples") for path in (ROOT / room).rglob("*.yaml")
)


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


def test_yaml_gives_plain_values(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("a: [1, x]\nb: {c: null}\n")
    assert read_yaml(tmp_path / "f.yaml") == {"a": [1, "x"], "b": {"c": None}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", "duplicate key 'a'"),
        (b"x: {a: 1, a: 2}", "duplicate key 'a'"),
        (b"a: [1", "not valid YAML"),
        (b"[1]: 2", "unhashable key"),
        (b"a: 2026-13-45", "month must be in 1..12"),
        (b"a: !!python/object:os.system x", "not valid YAML"),
        (b"\xff\xfe\x00\xd8", "UTF-8"),
    ],
)
def test_a_file_with_more_than_one_reading_or_none_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(text)
    with pytest.raises(YamlError, match=message) as raised:
        read_yaml(path)
    assert str(raised.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match=r"none\.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", YAML_FILES, ids=str)
def test_the_fast_parser_reads_what_pyyaml_reads(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    # repr tells 1 from 1.0 and from True, and keeps the order of keys
    assert repr(read_yaml(ROOT / path)) == repr(yaml.load(text, yaml.SafeLoader))
