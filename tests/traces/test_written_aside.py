"""A file appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces.written_aside import written_aside


def test_a_file_takes_its_name_once_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    with written_aside(str(target)) as path:
        path.write_text("all of it")
        assert [each.name for each in tmp_path.iterdir()] == ["run.json.part"]
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    assert target.read_text() == "all of it"


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    target.write_text("the earlier run")
    with pytest.raises(UnicodeEncodeError), written_aside(target) as path:
        path.write_text("half of \udcff", encoding="utf-8")
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    assert target.read_text() == "the earlier run"


def test_where_nothing_can_be_written_nothing_remains(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_aside(tmp_path / "missing" / "run.json") as path:
        path.write_text("all of it")
    assert not list(tmp_path.iterdir())
