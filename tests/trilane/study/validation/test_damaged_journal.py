"""Entries of a journal that are damaged or crafted are refused, and stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from realrun.errors import RefusedError
from tests.kit.validations import Validate, contents, kept_in
from trilane.study.journal import journal_of as any_journal
from trilane.study.validation.journal import VALIDATION, journal_of


def craft(path: Path, key: str, content: dict[str, Any], blob: bytes = b"") -> None:
    """Put an entry with its checksum into a journal."""
    with any_journal(path, VALIDATION) as journal:
        journal.add(key, content, blob)


def test_a_journal_without_a_question_is_refused_and_stays(tmp_path: Path) -> None:
    craft(tmp_path / "journal", "run-000-00", {})
    with pytest.raises(RefusedError, match=r"journal: expected the journal of a validation, .* it has no question"):
        kept_in(tmp_path / "journal", "second")
    assert contents(tmp_path / "journal").keys() == {"run-000-00"}
    assert not (tmp_path / "journal.before").exists()


@pytest.mark.parametrize("content", [{}, {"samples": 1}, {"samples": [{"key": [[1]], "ns": [1]}]}, {"other": []}])
def test_damaged_samples_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    kept_in(tmp_path / "journal", "first")
    craft(tmp_path / "journal", "microbenchmarks-00-000", content)
    refused = pytest.raises(RefusedError, match=r"journal: expected the journal of a validation, .*microbenchmarks-00")
    with journal_of(tmp_path / "journal", {"plan": "first"}) as journal, refused:
        journal.samples()


def test_a_damaged_or_crafted_run_is_refused(run: Validate, tmp_path: Path) -> None:
    run()
    path = tmp_path / "journal"
    content, whole = contents(path)["run-000-00"]
    for blob in (b"", whole[:-9], *crafted(whole)):
        craft(path, "run-000-00", content, blob)
        with pytest.raises(RefusedError, match=r"journal: expected the journal of a validation, .*run-000-00"):
            run()
        assert contents(path)["run-000-00"] == (content, blob)
    craft(path, "run-000-00", content, whole)
    assert run().ended.runs == 6


def crafted(whole: bytes) -> Iterator[bytes]:
    """Runs with other columns, or another description."""
    table = parquet.read_table(BytesIO(whole))
    described = json.loads(table.schema.metadata[b"trilane"])
    tables = [
        table.replace_schema_metadata({}),
        table.replace_schema_metadata({b"trilane": b"["}),
        table.drop_columns(["bytes"]),
        table.set_column(2, "start_ns", pa.repeat(1.5, len(table))),
        table.set_column(2, "start_ns", pa.nulls(len(table), pa.int64())),
        *(
            table.replace_schema_metadata({b"trilane": json.dumps({**described, **changes}).encode()})
            for changes in (
                {"labels": 1}, {"answers": {}}, {"bounds": {"a": "x"}}, {"approximation": {"a": [1], "b": []}}
            )
        ),
    ]
    for one in tables:
        parquet.write_table(one, sink := BytesIO())
        yield sink.getvalue()
