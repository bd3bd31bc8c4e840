"""The files of a validation's journal: a measured run as Parquet, and samples of microbenchmarks as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa

from realrun.errors import RefusedError
from realrun.profiling.timing import Samples
from sim.machine.devices import Power
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import TEXTS, Span
from trilane.common.errors import TrilaneError
from trilane.common.files import atomic_path
from trilane.common.json_text import parse_json
from trilane.common.parquet_files import read_parquet, write_parquet
from trilane.common.schema import from_dict, to_dict
from trilane.study.validation.parity import Answers

_META = b"trilane"
_MOST_SPANS = 10**8  # of a run


class Kept(NamedTuple):
    """A measured run, the answers of its session, and whether a fresh session gives the same answers."""

    run: Run
    answers: Answers
    replayed: bool


# --- a measured run ---------------------------------------------------------------------------------------------------


def write_run(kept: Kept, file: Path) -> None:
    spans = kept.run.spans.astype(dict.fromkeys(TEXTS, "category"))
    table = pa.Table.from_pandas(spans, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _META: _described(kept)})
    write_parquet(table, file)


def read_run(file: Path, power: Power | None) -> Kept:
    """A measured run; ``power``: of the machine. Raises RefusedError for any other file than was written."""
    try:
        table = read_parquet(file, _MOST_SPANS)
        if not _are_spans(table):
            raise TrilaneError("expected the columns of spans")
        text = (table.schema.metadata or {}).get(_META, b"")
        kept: _Described = from_dict(_Described, parse_json(text, "metadata"), "metadata")
        changed = None if kept.approximation is None else pd.DataFrame(kept.approximation)
    except (ValueError, OSError) as fault:
        raise _damaged(file, fault) from None
    run = Run(
        spans=table.to_pandas(ignore_metadata=True), power=power, routing_errors=changed, scenario=kept.scenario,
        policy=kept.policy, labels=kept.labels, trace_checksum=kept.trace_checksum, bounds=kept.bounds,
        memory=kept.memory,
    )
    return Kept(run, kept.answers, kept.replayed)


def _described(kept: Kept) -> bytes:
    run, changed = kept.run, kept.run.routing_errors
    columns: Any = None if changed is None else changed.to_dict("list")
    values = _Described(
        run.scenario, run.policy, run.labels, run.trace_checksum, run.bounds, run.memory, columns, kept.answers,
        kept.replayed,
    )
    return json.dumps(to_dict(values)).encode()


class _Described(NamedTuple):
    """A run without its spans, as ``_described`` writes it."""

    scenario: Scenario
    policy: str
    labels: tuple[str, ...]
    trace_checksum: str
    bounds: Mapping[str, float]
    memory: Mapping[str, int]
    approximation: Mapping[str, tuple[Any, ...]] | None
    answers: Answers
    replayed: bool


def _are_spans(table: pa.Table) -> bool:
    """Whether it has the columns of spans, with a value in every row."""
    categories = (field for field in table.schema if pa.types.is_dictionary(field.type))
    texts = {field.name for field in categories if field.type.value_type in (pa.string(), pa.large_string())}
    whole = {field.name for field in table.schema if field.type == pa.int64()}
    known = tuple(table.column_names) == Span._fields and texts == set(TEXTS) and whole == set(Span._fields) - texts
    return known and not any(column.null_count for column in table.columns)


# --- microbenchmarks --------------------------------------------------------------------------------------------------


def write_samples(samples: Samples, file: Path) -> None:
    with atomic_path(file) as aside:
        found = tuple(_Sample(key, [float(each) for each in ns]) for key, ns in samples.items())
        aside.write_text(json.dumps(to_dict(_Repetition(found, _checksum(found)))), encoding="utf-8")


def read_samples(file: Path) -> Samples:
    """One repetition. Raises RefusedError for any other file than was written."""
    found: _Repetition = parsed_file(_Repetition, file)
    if found.checksum != _checksum(found.samples):
        raise _damaged(file, TrilaneError("its checksum differs"))
    return {sample.key: sample.ns for sample in found.samples}


class _Sample(NamedTuple):
    """The samples of one microbenchmark."""

    key: tuple[str | int, ...]
    ns: list[float]


class _Repetition(NamedTuple):
    """All samples of one repetition."""

    samples: tuple[_Sample, ...]
    checksum: str


def _checksum(samples: Sequence[_Sample]) -> str:
    return digest_of(json.dumps(samples).encode())


# --- any file ---------------------------------------------------------------------------------------------------------


def parsed_file(hint: Any, file: Path) -> Any:
    """The value in a JSON file. Raises RefusedError for what no validation has written."""
    try:
        return from_dict(hint, parse_json(file.read_bytes(), "its content"), "its content")
    except (TrilaneError, OSError) as fault:
        raise _damaged(file, fault) from None


def _damaged(file: Path, fault: Exception) -> RefusedError:
    return RefusedError(
        f"{file}: expected a file of the journal of a validation, this is another one or damaged ({fault}); move the "
        f"folder {file.parent} away"
    )


def digest_of(*parts: bytes) -> str:
    """16 hexadecimal digits by which the content of parts is known."""
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:16]
