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
from pathlib import Path

from realrun.errors import RefusedError
from realrun.profiling.timing import Samples
from sim.machine.devices import Power
from sim.runs.prepare import Prepared
from trilane.common.files import ASIDE, atomic_path, locked, remove_abandoned
from trilane.study.sweep.code_fingerprint import code_fingerprint, own_source
from trilane.study.validation.journal_files import (
    Kept,
    digest_of,
    parsed_file,
    read_run,
    read_samples,
    write_run,
    write_samples,
)

MEASURING = ("realrun", "traces.capture")  # code that a measured run follows from, and a simulated one does not
_FILES = ("question.json", "run-*.parquet", "microbenchmarks-*.json", f".*{ASIDE}")
_OF_THE_SYSTEM = (".DS_Store", "._*", "Thumbs.db", "desktop.ini")  # written by programs that show a folder


class ValidationJournal:
    """The journal in ``folder``, which is created with its first entry.

    An existing journal of another ``question`` counts as empty and is then renamed to ``before``; ``changed``: the
    parts of the question that differ. Raises RefusedError if either folder holds other files, which would be lost.
    """

    def __init__(self, folder: Path, question: Mapping[str, str]) -> None:
        self.folder, self._asked = folder, question
        there = parsed_file(Mapping[str, str], self._question) if self._question.exists() else None
        self._is_ours = there == question
        for each in () if self._is_ours else (folder, self.before):
            _check_files(each)
        self.changed = () if there is None else tuple(key for key in question if there.get(key) != question[key])

    def has(self, scenario: int, turn: int) -> bool:
        """Whether it has a scenario's run of a round."""
        return self._is_ours and self._run(scenario, turn).exists()

    def add(self, scenario: int, turn: int, kept: Kept) -> None:
        self._begin()
        write_run(kept, self._run(scenario, turn))

    def runs(self, scenario: int, rounds: int, power: Power | None) -> list[Kept]:
        """A scenario's measured runs, in order; ``power``: of the machine."""
        return [read_run(self._run(scenario, turn), power) for turn in range(rounds) if self.has(scenario, turn)]

    def has_samples(self, turn: int) -> bool:
        """Whether it has the microbenchmarks before a round; those after the last count for the round after it."""
        return self._is_ours and any(self.folder.glob(f"microbenchmarks-{turn:02d}-*.json"))

    def add_samples(self, turn: int, samples: Samples) -> None:
        self._begin()
        number = len(list(self.folder.glob("microbenchmarks-*.json")))
        write_samples(samples, self.folder / f"microbenchmarks-{turn:02d}-{number:03d}.json")

    def samples(self) -> list[Samples]:
        """All repetitions, in order."""
        files = sorted(self.folder.glob("microbenchmarks-*.json")) if self._is_ours else []
        return [read_samples(file) for file in files]

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
        "plan": digest_of(json.dumps(scenarios).encode()),
        "profile": digest_of(json.dumps(profile, default=str).encode()),
        "code": code_of(setting.scenario.policy for setting in settings),
    }


def code_of(policies: Iterable[str]) -> str:
    """Digest of the code that measures these policies: that of Trilane, and the files of registered policies.

    Raises SweepError for a registered policy that is defined in no file.
    """
    own = (own_source(name) or "" for name in sorted(set(policies)))
    return digest_of(code_fingerprint(*MEASURING).encode(), *map(str.encode, own))
