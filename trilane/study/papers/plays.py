"""The plays that figures need: each once, whatever many figures need it, and the file of their facts."""

from __future__ import annotations

import csv
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from sim.runs.scenario import Scenario
from trilane.common.csv_files import write_csv
from trilane.common.errors import TrilaneError
from trilane.common.schema import from_dict
from trilane.study.journal import Journal, Study, journal_next_to, journal_of
from trilane.study.papers.calibrations import Calibrations
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.figures import PapersError
from trilane.study.papers.paper import AskingWay, Paper, PaperQuestion
from trilane.study.papers.quantities import FACTS, Facts, observed
from trilane.study.papers.sources import source_of
from trilane.study.papers.ways import STUDIED, Asked, all_asked, cases
from trilane.study.player import LastPrepared, Watch, play

PLAYED = Path(__file__).with_name("plays.csv")
_DIGITS = 6
_REFUSED = "refused"  # column of the messages of scenarios that cannot be played
_PLAYS = Study("scoreboard", PapersError)
_DEFAULTS = Scenario().to_dict()

Playable: TypeAlias = Scenario | EngineQuestion
Plays: TypeAlias = Mapping[str, Facts | str]  # by ``key``; a text is the message with which it was refused


def key(scenario: Playable) -> str:
    """A scenario as text: what differs from the defaults, as JSON; the same of an engine's question."""
    if isinstance(scenario, EngineQuestion):
        return scenario.key
    return json.dumps({name: value for name, value in scenario.to_dict().items() if value != _DEFAULTS[name]})


def needed(
    figure_ids: Iterable[str], ways: Container[AskingWay] = frozenset(AskingWay),
    calibrations: Calibrations | None = None,
) -> list[Playable]:
    """The scenarios that figures need in some ways, with repetitions. ``calibrations``: None: those that come with the
    program. Raises ScenarioError."""
    return [
        one
        for figure_id in figure_ids
        for paper in [source_of(figure_id)]
        for question in [paper.asked[figure_id]]
        for asked in all_asked(paper, question) if asked.way in ways
        for one in plays_of(paper, question, asked._replace(calibrations=calibrations))
    ]


def plays_of(paper: Paper, question: PaperQuestion | EngineQuestion, asked: Asked = STUDIED) -> Iterator[Playable]:
    """The scenarios of a figure in one way."""
    if isinstance(question, EngineQuestion):
        yield question
        return
    for method in (question.method, *question.baselines):
        for case in cases(paper, question, method, asked):
            yield from case.draws


def played(
    scenarios: Iterable[Playable], jobs: int = 1, watch: Watch | None = None, any_error: bool = False
) -> Iterator[tuple[str, Facts | str]]:
    """Play each different scenario once, and give its key and facts, or why it was refused, as soon as they are there.

    Scenarios of one trace are played one after the other. ``any_error``: a fault of the program is a refusal, too.
    """
    tasks = sorted({key(scenario): scenario for scenario in scenarios}.items(), key=lambda task: _setting(task[1]))
    for place, facts in play(partial(_observed, any_error), [scenario for _, scenario in tasks], _setting, jobs, watch):
        yield tasks[place][0], facts


def _setting(scenario: Playable) -> tuple[str, str]:
    """Scenarios that share a trace, and all but policy and parameters."""
    if isinstance(scenario, EngineQuestion):
        return "", scenario.key
    return scenario.trace, key(scenario.with_(policy="", parameters={}, engine=""))


def observed_in(prepared: LastPrepared, scenario: Playable) -> Facts:
    """Facts of a scenario. Raises TrilaneError for what cannot run."""
    return scenario.answered() if isinstance(scenario, EngineQuestion) else observed(prepared.of(scenario))


def _observed(any_error: bool, prepared: LastPrepared, scenario: Playable) -> Facts | str:
    try:
        return observed_in(prepared, scenario)
    except TrilaneError as error:
        return str(error)
    except Exception as error:
        if any_error:
            return f"{type(error).__name__}: {error}"
        raise


# --- the file ---------------------------------------------------------------------------------------------------------


def read_plays(path: Path = PLAYED) -> dict[str, Facts | str]:
    """The plays of a file; none, if there is no file. Raises PapersError."""
    if not path.exists():
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file, strict=True)
            return {line["scenario"]: line.get(_REFUSED) or _facts_in(line) for line in lines}
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError) as error:
        raise PapersError(f"{path}: expected a file of plays, as `trilane papers --play` writes it: {error}") from None


def _facts_in(line: Mapping[str, str]) -> Facts:
    """Columns that a file lacks are those of facts that its plays lack."""
    if "tpot_ms" not in line:
        raise KeyError("tpot_ms")
    return {name: float(line[name]) for name in FACTS if line.get(name)}


def add_plays(
    path: Path, scenarios: Iterable[Playable], jobs: int = 1, watch: Watch | None = None, any_error: bool = False
) -> int:
    """Play the scenarios that a file lacks, or that were refused, and add them. Each is kept in FILE.journal as soon as
    it is there, so that an interrupted run can go on.

    Returns how many were added. Raises what ``played`` raises, PapersError and OSError.
    """
    before = read_plays(path)
    plays = dict(before)
    with journal_of(journal_next_to(path), _PLAYS) as journal:
        plays |= _kept(journal)
        missing = [scenario for scenario in scenarios if isinstance(plays.get(key(scenario), ""), str)]
        for name, facts in played(missing, jobs, watch, any_error):
            journal.add(name, {_REFUSED: facts} if isinstance(facts, str) else facts)
            plays[name] = facts
        if plays != before:
            write_plays(plays, path)
            journal.discard()
    return len(plays) - len(before)


def _kept(journal: Journal) -> dict[str, Facts | str]:
    """The plays of an earlier, interrupted run. Raises PapersError."""
    try:
        kept = from_dict(Mapping[str, Mapping[str, float] | Mapping[str, str]], journal.entries, "plays", PapersError)
    except PapersError as error:
        raise journal.damaged(str(error)) from None
    return {name: facts.get(_REFUSED) or facts for name, facts in kept.items()}


def write_plays(plays: Plays, path: Path) -> None:
    """The whole file. Raises OSError."""
    write_csv(_lines(plays), path)


def _lines(plays: Plays) -> Iterator[tuple[str, ...]]:
    yield "scenario", *FACTS, _REFUSED
    for name, facts in plays.items():
        if isinstance(facts, str):
            yield name, *("" for _ in FACTS), facts
        else:
            yield name, *(f"{facts[fact]:.{_DIGITS}g}" if fact in facts else "" for fact in FACTS), ""
