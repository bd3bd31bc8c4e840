"""The journal of a validation: a folder to which every run is added when it ends, so that none is lost.

``question.json`` identifies the validation; ``run-SCENARIO-ROUND.parquet`` contains the spans of one measured run and,
in the file's metadata, the rest of it; ``microbenchmarks-ROUND-N.json`` the samples of one repetition of the
microbenchmarks. Files are written under another name and renamed, so that all are complete even if the process is
killed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa

import realrun
from realrun.errors import RefusedError
from realrun.profiling.timing import Samples
from sim.machine.devices import Power
from sim.runs.prepare import Prepared
from sim.runs.run import Run
from sim.runs.spans import TEXTS, Span
from trilane.common.errors import TrilaneError
from trilane.common.files import ASIDE, atomic_path, locked, remove_abandoned
from trilane.common.json_text import parse_json
from trilane.common.parquet_files import read_parquet, write_parquet
from trilane.common.schema import from_dict, to_dict
from trilane.study.sweep.user_policies import own_source
from trilane.study.validation.parity import Answers

# Code that a measured run follows from
PACKAGES = ("policies", "realrun", "sim", "traces", "trilane/common", "trilane/machines")
SOURCES = (".py", ".c", ".h")
_META = b"trilane"
_FILES = ("question.json", "run-*.parquet", "microbenchmarks-*.json", f".*{ASIDE}")
_OF_THE_SYSTEM = (".DS_Store", "._*", "Thumbs.db", "desktop.ini")  # written by programs that show a folder
_MOST_SPANS = 10**8  # of a run


class Kept(NamedTuple):
    """A measured run, the answers of its session, and whether a fresh session gives the same answers."""

    run: Run
    answers: Answers
    replayed: bool


class ValidationJournal:
    """The journal in ``folder``, which is created with its first entry.

    An existing journal of another ``question`` counts as empty and is then renamed to ``before``; ``changed``: the
    parts of the question that differ. Raises RefusedError if either folder holds other files, which would be lost.
    """

    def __init__(self, folder: Path, question: Mapping[str, str]) -> None:
        self.folder, self._asked = folder, question
        there = _parsed(Mapping[str, str], self._question) if self._question.exists() else None
        self._is_ours = there == question
        for each in () if self._is_ours else (folder, self.before):
            _check_files(each)
        self.changed = () if there is None else tuple(key for key in question if there.get(key) != question[key])

    def has(self, scenario: int, turn: int) -> bool:
        """Whether it has a scenario's run of a round."""
        return self._is_ours and self._run(scenario, turn).exists()

    def add(self, scenario: int, turn: int, kept: Kept) -> None:
        """Add a measured run."""
        self._begin()
        spans = kept.run.spans.astype(dict.fromkeys(TEXTS, "category"))
        table = pa.Table.from_pandas(spans, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _META: _described(kept)})
        write_parquet(table, self._run(scenario, turn))

    def runs(self, scenario: int, rounds: int, power: Power | None) -> list[Kept]:
        """A scenario's measured runs, in order; ``power``: of the machine."""
        return [_read(self._run(scenario, turn), power) for turn in range(rounds) if self.has(scenario, turn)]

    def has_samples(self, turn: int) -> bool:
        """Whether it has the microbenchmarks before a round; those after the last count for the round after it."""
        return self._is_ours and any(self.folder.glob(f"microbenchmarks-{turn:02d}-*.json"))

    def add_samples(self, turn: int, samples: Samples) -> None:
        """Add one repetition of the microbenchmarks."""
        self._begin()
        number = len(list(self.folder.glob("microbenchmarks-*.json")))
        with atomic_path(self.folder / f"microbenchmarks-{turn:02d}-{number:03d}.json") as aside:
            found = tuple(_Sample(key, [float(each) for each in ns]) for key, ns in samples.items())
            aside.write_text(json.dumps(to_dict(_Repetition(found, _checksum(found)))), encoding="utf-8")

    def samples(self) -> list[Samples]:
        """All repetitions, in order."""
        files = sorted(self.folder.glob("microbenchmarks-*.json")) if self._is_ours else []
        return [{sample.key: sample.ns for sample in _repetition(file).samples} for file in files]

    def count(self, scenarios: int, rounds: int) -> int:
        """The number of its runs among those of ``scenarios`` and ``rounds``."""
        return sum(self.has(scenario, turn) for scenario in range(scenarios) for turn in range(rounds))

    @property
    def before(self) -> Path:
        """The folder for an earlier journal of another question."""
        return self.folder.with_name(f"{self.folder.name}.before")

    @property
    def _question(self) -> Path:
        return self.folder / "question.json"

    def _run(self, scenario: int, turn: int) -> Path:
        return self.folder / f"run-{scenario:03d}-{turn:02d}.parquet"

    def _begin(self) -> None:
        """Create the folder, if needed; the latest journal of another question is kept in ``before``."""
        if self._is_ours:
            return
        if self._question.exists():
            shutil.rmtree(self.before, ignore_errors=True)
            self.folder.rename(self.before)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with atomic_path(self._question) as aside:
            aside.write_text(json.dumps(self._asked, indent=2) + "\n", encoding="utf-8")
        self._is_ours = True


def _check_files(folder: Path) -> None:
    """Raise RefusedError if a folder holds anything else than a journal."""
    for file in folder.glob("*"):
        if not any(file.match(name) for name in (*_FILES, *_OF_THE_SYSTEM)):
            raise RefusedError(f"{folder}: expected a journal or no such folder, it holds {file.name}; move it away")


@contextmanager
def journal_of(folder: Path, question: Mapping[str, str]) -> Iterator[ValidationJournal]:
    """The journal in ``folder``, locked for this validation. Raises RefusedError if another one holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{folder}: another validation is writing there; wait until it has ended, or choose another folder"
    with locked(folder.with_name(f"{folder.name}.lock"), RefusedError(busy)):
        remove_abandoned(folder)  # next to a run that is complete, and not written again
        yield ValidationJournal(folder, question)


def question_of(settings: Sequence[Prepared]) -> dict[str, str]:
    """Digests of what is measured: scenarios with their traces' contents, the profile, and the code.

    The number of repeats is not included: a validation can be continued with more of them.
    """
    scenarios = [[setting.scenario.to_dict(), setting.trace.checksum] for setting in settings]
    profile = settings[0].hardware.document()
    return {
        "plan": _sha(json.dumps(scenarios).encode()),
        "profile": _sha(json.dumps(profile, default=str).encode()),
        "code": code_of(setting.scenario.policy for setting in settings),
    }


def code_of(policies: Iterable[str]) -> str:
    """Digest of the code that measures these policies: that of Trilane, and the files of registered policies.

    Raises SweepError for a registered policy that is defined in no file.
    """
    own = (own_source(name) or "" for name in sorted(set(policies)))
    return _sha(code_digest(Path(realrun.__file__).parents[1]).encode(), *map(str.encode, own))


def code_digest(root: Path) -> str:
    """The digest of all sources of ``PACKAGES`` in ``root``: Python, and C for the CPU's experts."""
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*")) if file.suffix in SOURCES)
    return _sha(*(part for file in files for part in (str(file.relative_to(root)).encode(), file.read_bytes())))


def _sha(*parts: bytes) -> str:
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:16]


def _described(kept: Kept) -> bytes:
    run = kept.run
    values = {
        "scenario": run.scenario, "policy": run.policy, "labels": run.labels, "trace_checksum": run.trace_checksum,
        "bounds": run.bounds, "memory": run.memory, "approximation": _records(run.routing_errors),
        "answers": kept.answers.to_dict(), "replayed": kept.replayed,
    }  # fmt: skip
    return json.dumps(values).encode()


def _records(frame: pd.DataFrame | None) -> dict[str, Any] | None:
    return None if frame is None else frame.to_dict("list")  # type: ignore[return-value]


class _Described(NamedTuple):
    """A run without its spans, as ``_described`` writes it."""

    scenario: Mapping[str, Any]
    policy: str
    labels: tuple[str, ...]
    trace_checksum: str
    bounds: Mapping[str, float]
    memory: Mapping[str, int]
    approximation: Mapping[str, tuple[Any, ...]] | None
    answers: Answers
    replayed: bool


class _Sample(NamedTuple):
    """The samples of one microbenchmark."""

    key: tuple[str | int, ...]
    ns: list[float]


class _Repetition(NamedTuple):
    """All samples of one repetition."""

    samples: tuple[_Sample, ...]
    checksum: str


def _checksum(samples: Sequence[_Sample]) -> str:
    return _sha(json.dumps(samples).encode())


def _repetition(file: Path) -> _Repetition:
    """One repetition. Raises RefusedError for any other than was written."""
    found: _Repetition = _parsed(_Repetition, file)
    if found.checksum != _checksum(found.samples):
        raise _damaged(file, TrilaneError("its checksum differs"))
    return found


def _read(file: Path, power: Power | None) -> Kept:
    try:
        table = read_parquet(file, _MOST_SPANS, foreign=False)
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
    )  # fmt: skip
    return Kept(run, kept.answers, kept.replayed)


def _are_spans(table: pa.Table) -> bool:
    """Whether it has the columns of spans, with a value in every row."""
    categories = (field for field in table.schema if pa.types.is_dictionary(field.type))
    texts = {field.name for field in categories if field.type.value_type in (pa.string(), pa.large_string())}
    whole = {field.name for field in table.schema if field.type == pa.int64()}
    known = tuple(table.column_names) == Span._fields and texts == set(TEXTS) and whole == set(Span._fields) - texts
    return known and not any(column.null_count for column in table.columns)


def _parsed(hint: Any, file: Path) -> Any:
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
