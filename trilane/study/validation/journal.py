"""The journal of a validation, to which every run is added when it ends, so that none is lost.

``question`` identifies the validation; ``run-SCENARIO-ROUND`` has one measured run as Parquet: its spans and, in the
metadata, the rest of it; ``microbenchmarks-ROUND-N`` the samples of one repetition of the microbenchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from realrun.errors import RefusedError
from realrun.profiling.timing import Samples
from sim.machine.devices import Power
from sim.runs.prepare import Prepared
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import TEXTS, Span
from trilane.common.errors import TrilaneError
from trilane.common.json_text import parse_json
from trilane.common.schema import from_dict, to_dict
from trilane.study import journal as study_journal
from trilane.study.journal import Journal, Study
from trilane.study.sweep.code_fingerprint import code_fingerprint, own_source
from trilane.study.validation.parity import Answers

MEASURING = ("realrun", "traces.capture")  # code that a measured run follows from, and a simulated one does not
VALIDATION = Study("validation", RefusedError, elsewhere="choose another folder")
_QUESTION, _REPETITION = "question", "microbenchmarks-"
_META = b"trilane"


class Kept(NamedTuple):
    """A measured run, the answers of its session, and whether a fresh session gives the same answers."""

    run: Run
    answers: Answers
    replayed: bool


class ValidationJournal:
    """The journal of one ``question``.

    A file of another question counts as empty, and is moved to ``before`` with the first entry; ``changed``: the parts
    of the question that differ. Raises RefusedError for a file of another kind at ``before``, which would be lost.
    """

    def __init__(self, journal: Journal, question: Mapping[str, str]) -> None:
        self._journal, self._question = journal, question
        held = journal.entries.get(_QUESTION)
        self._is_ours = held == question
        if journal.entries and held is None:
            raise journal.damaged("it has no question")
        if not self._is_ours:
            VALIDATION.check_file(self.before)
        self.changed = () if held is None else tuple(key for key in question if held.get(key) != question[key])

    @property
    def before(self) -> Path:
        """The file of an earlier journal of another question."""
        return self._journal.path.with_name(f"{self._journal.path.name}.before")

    def has(self, scenario: int, turn: int) -> bool:
        """True if it has a scenario's run of a round."""
        return self._is_ours and _run_key(scenario, turn) in self._journal.entries

    def add(self, scenario: int, turn: int, kept: Kept) -> None:
        """Keep a measured run."""
        self._begin()
        self._journal.add(_run_key(scenario, turn), {"policy": kept.run.policy}, _parquet_of(kept))

    def runs(self, scenario: int, rounds: int, power: Power | None) -> list[Kept]:
        """A scenario's measured runs, in order; ``power``: of the machine. Raises RefusedError for damaged ones."""
        return [self._run(_run_key(scenario, turn), power) for turn in range(rounds) if self.has(scenario, turn)]

    def has_samples(self, turn: int) -> bool:
        """True if it has the microbenchmarks before a round; those after the last count for the round after it."""
        return any(key.startswith(f"{_REPETITION}{turn:02d}-") for key in self._repetitions())

    def add_samples(self, turn: int, samples: Samples) -> None:
        """Keep one repetition of the microbenchmarks, before a round."""
        self._begin()
        rows = tuple(_Sample(key, [float(one) for one in ns]) for key, ns in samples.items())
        key = f"{_REPETITION}{turn:02d}-{len(self._repetitions()):03d}"
        self._journal.add(key, to_dict(_Repetition(rows)))

    def samples(self) -> list[Samples]:
        """All repetitions, in order. Raises RefusedError for damaged ones."""
        return [self._samples(key) for key in sorted(self._repetitions())]

    def count(self, scenarios: int, rounds: int) -> int:
        """The number of its runs among those of ``scenarios`` and ``rounds``."""
        return sum(self.has(scenario, turn) for scenario in range(scenarios) for turn in range(rounds))

    def _begin(self) -> None:
        """Begin with the question, if needed; the latest journal of another question is kept in ``before``."""
        if self._is_ours:
            return
        if self._journal.entries:
            self._journal.begin_anew(self.before)
        self._journal.add(_QUESTION, self._question)
        self._is_ours = True

    def _repetitions(self) -> list[str]:
        keys = self._journal.entries if self._is_ours else ()
        return [key for key in keys if key.startswith(_REPETITION)]

    def _samples(self, key: str) -> Samples:
        try:
            found = from_dict(_Repetition, self._journal.entries[key], key)
        except TrilaneError as fault:
            raise self._journal.damaged(str(fault)) from None
        return {sample.key: sample.ns for sample in found.samples}

    def _run(self, key: str, power: Power | None) -> Kept:
        try:
            return _run_of(self._journal.blob(key), power)
        except (ValueError, OSError, pa.ArrowException) as fault:
            raise self._journal.damaged(f"{key}: {fault}") from None


def _run_key(scenario: int, turn: int) -> str:
    return f"run-{scenario:03d}-{turn:02d}"


@contextmanager
def journal_of(path: Path, question: Mapping[str, str]) -> Iterator[ValidationJournal]:
    """The journal at ``path``, locked for this validation. Raises RefusedError if another one holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with study_journal.journal_of(path, VALIDATION) as journal:
        yield ValidationJournal(journal, question)


# --- its entries ------------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """The samples of one microbenchmark."""

    key: tuple[str | int, ...]
    ns: list[float]


class _Repetition(NamedTuple):
    """All samples of one repetition."""

    samples: tuple[_Sample, ...]


class _Described(NamedTuple):
    """A run without its spans."""

    scenario: Scenario
    policy: str
    labels: tuple[str, ...]
    trace_checksum: str
    bounds: Mapping[str, float]
    memory: Mapping[str, int]
    approximation: Mapping[str, tuple[Any, ...]] | None
    answers: Answers
    replayed: bool


def _parquet_of(kept: Kept) -> bytes:
    run, changed = kept.run, kept.run.routing_errors
    columns: Any = None if changed is None else changed.to_dict("list")
    described = _Described(
        run.scenario, run.policy, run.labels, run.trace_checksum, run.bounds, run.memory, columns, kept.answers,
        kept.replayed,
    )
    table = pa.Table.from_pandas(run.spans.astype(dict.fromkeys(TEXTS, "category")), preserve_index=False)
    sink = pa.BufferOutputStream()
    parquet.write_table(
        table.replace_schema_metadata({_META: json.dumps(to_dict(described)).encode()}), sink, compression="zstd"
    )
    return bytes(sink.getvalue())


def _run_of(content: bytes, power: Power | None) -> Kept:
    """The measured run of an entry; ``power``: of the machine. Raises TrilaneError, ValueError and ArrowException."""
    table = parquet.read_table(pa.BufferReader(content))
    table.validate(full=True)
    if not _are_spans(table):
        raise TrilaneError("expected the columns of spans")
    text = (table.schema.metadata or {}).get(_META, b"")
    kept: _Described = from_dict(_Described, parse_json(text, "metadata"), "metadata")
    changed = None if kept.approximation is None else pd.DataFrame(kept.approximation)
    run = Run(
        spans=table.to_pandas(ignore_metadata=True), power=power, routing_errors=changed, scenario=kept.scenario,
        policy=kept.policy, labels=kept.labels, trace_checksum=kept.trace_checksum, bounds=kept.bounds,
        memory=kept.memory,
    )
    return Kept(run, kept.answers, kept.replayed)


def _are_spans(table: pa.Table) -> bool:
    """True if a table has the columns of spans, with a value in every row."""
    categories = (field for field in table.schema if pa.types.is_dictionary(field.type))
    texts = {field.name for field in categories if field.type.value_type in (pa.string(), pa.large_string())}
    whole = {field.name for field in table.schema if field.type == pa.int64()}
    known = tuple(table.column_names) == Span._fields and texts == set(TEXTS) and whole == set(Span._fields) - texts
    return known and not any(column.null_count for column in table.columns)


# --- its question -----------------------------------------------------------------------------------------------------


def question_of(settings: Sequence[Prepared]) -> dict[str, str]:
    """Digests of what is measured: scenarios with their traces' contents, the profile, and the code.

    The number of repeats is not included: a validation can be continued with more of them.
    """
    scenarios = [[setting.scenario.to_dict(), setting.trace.checksum] for setting in settings]
    profile = settings[0].hardware.document()
    return {
        "plan": _digest_of(json.dumps(scenarios).encode()),
        "profile": _digest_of(json.dumps(profile, default=str).encode()),
        "code": code_of(setting.scenario.policy for setting in settings),
    }


def code_of(policies: Iterable[str]) -> str:
    """Digest of the code that measures these policies: that of Trilane, and the files of registered policies.

    Raises SweepError for a registered policy that is defined in no file.
    """
    own = (own_source(name) or "" for name in sorted(set(policies)))
    return _digest_of(code_fingerprint(*MEASURING).encode(), *map(str.encode, own))


def _digest_of(*parts: bytes) -> str:
    """16 hexadecimal digits by which the content of parts is known."""
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:16]
