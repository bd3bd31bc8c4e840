"""The file of a journal: begun anew for another question, shared with nothing else, and kept once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.registry import SYSTEMS
from realrun.errors import RefusedError
from tests.kit.validations import contents, kept_in
from trilane.study.sweep.code_fingerprint import fingerprint_of
from trilane.study.validation.journal import code_of, journal_of


@pytest.mark.parametrize("name", ["journal", "journal.before"])
def test_another_file_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / name).write_text("mine")
    with pytest.raises(RefusedError, match=rf"{name}: expected the journal of a validation, .*; move it away"):
        kept_in(tmp_path / "journal", "second")
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["journal", "journal.before"])
def test_a_folder_as_of_an_earlier_version_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    if name != "journal":
        kept_in(tmp_path / "journal", "first")
    (tmp_path / name).mkdir()
    with pytest.raises(RefusedError, match=rf"{name}: this journal was written by another version of Trilane"):
        kept_in(tmp_path / "journal", "second")
    assert (tmp_path / name).is_dir()


def test_of_earlier_journals_only_the_last_is_kept_and_what_was_never_begun_replaces_none(tmp_path: Path) -> None:
    folder, before = tmp_path / "journal", tmp_path / "journal.before"
    for question in ("first", "second", "third"):
        kept_in(folder, question)
    assert contents(before)["question"] == ({"plan": "second"}, b"")
    with journal_of(folder, {"plan": "fourth"}) as journal:
        assert (journal.changed, journal.samples()) == (("plan",), [])
    assert contents(folder)["question"] == ({"plan": "third"}, b"")
    assert contents(before)["question"] == ({"plan": "second"}, b"")
    assert {path.name for path in tmp_path.iterdir()} == {"journal", "journal.before"}


def test_a_journal_that_another_validation_has_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with journal_of(folder, {"plan": "this"}), pytest.raises(RefusedError, match="another validation is writing there"):
        kept_in(folder, "this")
    kept_in(folder, "this")


@pytest.mark.parametrize("name", ["a.py", "machine/native/ffn.c", "machine/native/ffn.h"])
def test_other_code_is_another_question(tmp_path: Path, name: str) -> None:
    source = tmp_path / "realrun" / name
    source.parent.mkdir(parents=True)
    source.write_text("1\n")
    before = fingerprint_of([tmp_path / "realrun"])
    assert fingerprint_of([tmp_path / "realrun"]) == before
    source.write_text("2\n")
    assert fingerprint_of([tmp_path / "realrun"]) != before


def test_the_code_is_that_of_the_tree_and_of_a_policy_that_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the digest was that of a folder without any code."""
    ours = code_of(["dali"])
    assert ours == code_of(["dali", "dali"])
    monkeypatch.setitem(SYSTEMS, "dali", replace(SYSTEMS["dali"], summary="another"))
    assert code_of(["dali"]) != ours
    monkeypatch.undo()
    monkeypatch.setattr("trilane.study.validation.journal.MEASURING", ())
    assert code_of(["dali"]) != ours
