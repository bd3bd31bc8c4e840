"""The blind record: questions that were written down before they were first run, and what came out then.

``blind.csv`` is only appended to. A line of a question that was *written* has the hash of its figure and scenarios; one
of its first *run* what came out, at which commit. A question that has not been run may be written again, with another
hash; after its run, its score is what came out first, whatever is changed since.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trilane.common.csv_files import read_csv, write_csv
from trilane.common.hints import Name
from trilane.study.papers.calibrations import Calibrations
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.figures import PapersError, published
from trilane.study.papers.paper import AskingWay
from trilane.study.papers.plays import Plays, key, plays_of
from trilane.study.papers.scores import FigureScore, score_of
from trilane.study.papers.sources import further_sources, source_of
from trilane.study.papers.ways import Asked, ways_of

RECORD = Path(__file__).with_name("blind.csv")
_NO_VALUE = "its plays lack a fact that the quantity is made of"  # the message of such a miss


class BlindError(PapersError):
    """A record that cannot be read, or a question that cannot be written or run."""


class BlindLine(NamedTuple):
    """A question that was written down, or its first run. ``date``: of the day; ``published``: the figure's value.

    Of a run: ``value`` with nothing put in, between ``low`` and ``high``, and with ``one_number``; or the ``message``
    with which it was refused.
    """

    event: Literal["written", "run"]
    figure: Name
    batch: Name
    date: Name
    sha256: Name
    published: float
    commit: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    one_number: float | None = None
    message: str = ""

    @property
    def question(self) -> tuple[str, str, float]:
        """Batch, hash and published value of the question that it is about."""
        return self.batch, self.sha256, self.published


@dataclass(frozen=True)
class BlindRecord:
    """All lines, in their order."""

    lines: Sequence[BlindLine]

    @cached_property
    def written(self) -> Mapping[str, BlindLine]:
        """The last line of each question that was written down."""
        return {line.figure: line for line in self.lines if line.event == "written"}

    @cached_property
    def runs(self) -> Mapping[str, BlindLine]:
        """The first run of each question."""
        return {line.figure: line for line in self.lines if line.event == "run"}

    def waiting(self, batch: str | None = None) -> list[str]:
        """Questions of a batch, or of all, that have not been run."""
        chosen = [line for line in self.written.values() if batch in (None, line.batch)]
        return [line.figure for line in chosen if line.figure not in self.runs]

    def changed(self, figures: Iterable[str] | None = None) -> list[str]:
        """Recorded questions, of all or of some, that are not what was written down."""
        chosen = self.written if figures is None else figures
        lines = [self.runs.get(each) or self.written[each] for each in chosen]
        return [line.figure for line in lines
                if (line.sha256, line.published) != (hash_of(line.figure), published()[line.figure].value)]

    def scores(self, way: AskingWay) -> list[FigureScore]:
        """The scores of first runs, with nothing put in or with one number, against what was published then."""
        return [_score(line, way) for line in self.runs.values()]


def _score(line: BlindLine, way: AskingWay) -> FigureScore:
    figure = replace(published()[line.figure], value=line.published)
    value, message = (line.value if way is AskingWay.NOTHING else line.one_number), line.message
    ends = (line.low, line.high) if way is AskingWay.NOTHING else (None, None)
    return FigureScore(figure, source_of(line.figure), value, message if value is None else "", way, *ends)


def read_record(path: Path = RECORD) -> BlindRecord:
    """The record; an empty one, if there is no file. Raises BlindError."""
    lines = read_csv(BlindLine, path, "a blind record", BlindError) if path.exists() else []
    _check(lines, f"{path}: ")
    return BlindRecord(lines)


def append(lines: Sequence[BlindLine], path: Path = RECORD) -> None:
    """Add lines. Raises BlindError for a first run of a question that has one, or that is not written as it is run."""
    known = [*read_record(path).lines, *lines]
    _check(known)
    write_csv([BlindLine._fields, *known], path)


def _check(lines: Iterable[BlindLine], where: str = "") -> None:
    """Raise BlindError for a line after the first run of its question, or a run of another question than was written,
    before that, or without a result."""
    written: dict[str, BlindLine] = {}
    runs: dict[str, BlindLine] = {}
    for line in lines:
        if (ran := runs.get(line.figure)) is not None:
            raise BlindError(f"{where}{line.figure}: its first run was on {ran.date} at {ran.commit}, and stays")
        if line.event == "written":
            written[line.figure] = line
            continue
        if line.question != getattr(written.get(line.figure), "question", None):
            raise BlindError(f"{where}{line.figure}: expected the question that was written down, got another one")
        if line.date < (since := written[line.figure].date):
            raise BlindError(f"{where}{line.figure}: expected a first run after {since}, when it was written down, got "
                             f"{line.date}")
        if None in (line.value, line.one_number) and not line.message:
            raise BlindError(f"{where}{line.figure}: expected values or the message of a refusal, got neither")
        runs[line.figure] = line


# --- questions --------------------------------------------------------------------------------------------------------


def hash_of(figure_id: str) -> str:
    """The SHA-256 of a figure's value, its question, all scenarios, and what may set its program's number."""
    paper, figure = source_of(figure_id), published()[figure_id]
    question = paper.asked[figure_id]
    methods = () if isinstance(question, EngineQuestion) else (question.method, *question.baselines)
    programs = {paper.program_of(method) for method in methods} & paper.programs.keys()
    return _sha256({
        "figure": {"value": figure.value, "unit": figure.unit, "kind": figure.kind},
        "question": question.facts,
        "plays": [json.loads(key(one)) for one in plays_of(paper, question)],
        "programs": {name: paper.programs[name].calibrated_by for name in programs},
    })


def _sha256(facts: Mapping[str, Any]) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def written_lines(
    names: Iterable[str], batch: str, date: str, record: BlindRecord, played: Container[str]
) -> list[BlindLine]:
    """Lines for all questions of some sources that the record lacks, or has otherwise and without a run.

    ``played``: keys of the plays whose facts are in sight. Raises BlindError for a question that they answer already.
    """
    lines = [
        BlindLine("written", figure, batch, date, sha, value)
        for name in names
        for figure in further_sources()[name].asked
        if figure not in record.runs
        for sha in [hash_of(figure)]
        if figure not in record.written or record.written[figure].sha256 != sha
        for value in [published()[figure].value] if value is not None
    ]
    if known := [line.figure for line in lines if _is_answered(line.figure, played)]:
        raise BlindError(f"{known[0]}: expected a question without an answer, got one whose plays are in plays.csv: "
                         "asked before it was written down, it cannot be blind")
    return lines


def _is_answered(figure_id: str, played: Container[str]) -> bool:
    """True if all plays of a way of asking are there."""
    paper = source_of(figure_id)
    question = paper.asked[figure_id]
    return any(all(key(one) in played for one in plays_of(paper, question, Asked(way)))
               for way in ways_of(paper, question))


def run_lines(
    figures: Iterable[str], record: BlindRecord, plays: Plays, calibrations: Calibrations, date: str, commit: str
) -> Iterator[BlindLine]:
    """First runs, from plays that are there."""
    for figure in figures:
        written = record.written[figure]
        nothing = score_of(figure, plays, AskingWay.NOTHING, calibrations)
        one = score_of(figure, plays, AskingWay.ONE_NUMBER, calibrations)
        lacking = None in (nothing.simulated, one.simulated)
        yield written._replace(
            event="run", date=date, commit=commit, value=nothing.simulated, low=nothing.low, high=nothing.high,
            one_number=one.simulated, message=nothing.refused or one.refused or _NO_VALUE * lacking,
        )
