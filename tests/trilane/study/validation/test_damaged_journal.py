"""Files of a journal that are damaged or crafted are refused, and stay."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from realrun.errors import RefusedError
from tests.kit.journals import Validate, contents, kept_in
from trilane.common.parquet_files import write_parquet
from trilane.study.validation.journal import journal_of

DAMAGED = (b"", b"{", b"[]", b'{"plan": 1}', b"\xff", 100_000 * b"[", b'{"plan": "\\ud800"}')


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_question_is_refused_and_its_journal_stays(tmp_path: Path, content: bytes) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / "journal" / "question.json").write_bytes(content)
    before = contents(tmp_path / "journal")
    with pytest.raises(RefusedError, match=r"question\.json: expected a file of the journal .*; move the folder"):
        kept_in(tmp_path / "journal", "second")
    assert contents(tmp_path / "journal") == before
    assert not (tmp_path / "journal.before").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[1]",
        b"[",
        b'{"samples": [{"key": [[1]], "ns": [1]}], "checksum": ""}',
        b'{"samples": [], "checksum": ""}',
    ],
)
def test_damaged_samples_are_refused(tmp_path: Path, content: bytes) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / "journal" / "microbenchmarks-00-000.json").write_bytes(content)
    refused = pytest.raises(RefusedError, match=r"microbenchmarks-00-000\.json: expected a file of the journal")
    with journal_of(tmp_path / "journal", {"plan": "first"}) as journal, refused:
        journal.samples()


def test_a_damaged_or_crafted_run_is_refused(run: Validate, tmp_path: Path) -> None:
    run()
    file = tmp_path / "journal" / "run-000-00.parquet"
    whole, table = file.read_bytes(), parquet.read_table(file)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    described = json.loads(table.schema.metadata[b"trilane"])
    others = [
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
    crafted = []
    for each in others:
        write_parquet(each, file)
        crafted.append(file.read_bytes())
    for content in (b"", whole[:-9], bytes(flipped), *crafted):
        file.write_bytes(content)
        with pytest.raises(RefusedError, match=r"run-000-00\.parquet: expected a file of the journal"):
            run()
        assert file.read_bytes() == content
    file.write_bytes(whole)
    assert run().ended.runs == 6
