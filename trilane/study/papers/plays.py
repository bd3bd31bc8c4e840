"""Plays of scenarios: each once, whatever many figures need it; and the file that keeps their facts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from sim.runs.scenario import Scenario
from trilane.common.csv_files import write_csv
from trilane.common.schema import from_dict
from trilane.study.journal import Journal, Study, journal_next_to, journal_of
from trilane.study.papers.paper import PapersError
from trilane.study.papers.quantities import FACTS, Facts, observed
from trilane.study.player import LastPrepared, Watch, play

PLAYED = Path(__file__).with_name("plays.csv")
_DIGITS = 6
_PLAYS = Study("scoreboard", PapersError)
_DEFAULTS = Scenario().to_dict()

Plays: TypeAlias = Mapping[str, Facts]  # by ``key``


def key(scenario: Scenario) -> str:
    """A scenario as text: what differs from the defaults, as JSON."""
    return json.dumps({name: value for name, value in scenario.to_dict().items() if value != _DEFAULTS[name]})


def played(scenarios: Iterable[Scenario], jobs: int = 1, watch: Watch | None = None) -> Iterator[tuple[str, Facts]]:
    """Play each different scenario once, and give its key and facts as soon as they are there.

    Scenarios of one trace are played one after the other. Raises what ``observed`` raises.
    """
    tasks = sorted({key(scenario): scenario for scenario in scenarios}.items(), key=lambda task: _setting(task[1]))
    for place, facts in play(_observed, [scenario for _, scenario in tasks], _setting, jobs, watch):
        yield tasks[place][0], facts


def _setting(scenario: Scenario) -> tuple[str, str]:
    """Scenarios that share a trace, and all but policy and parameters."""
    return scenario.trace, key(scenario.with_(policy="", parameters={}, engine=""))


def _observed(prepared: LastPrepared, scenario: Scenario) -> Facts:
    return observed(prepared.of(scenario))


# --- the file ---------------------------------------------------------------------------------------------------------


def read_plays(path: Path = PLAYED) -> dict[str, Facts]:
    """The plays of a file; none, if there is no file. Raises PapersError."""
    if not path.exists():
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file, strict=True)
            return {line["scenario"]: {name: float(line[name]) for name in FACTS if line[name]} for line in lines}
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError) as error:
        raise PapersError(f"{path}: expected a file of plays, as `trilane papers --play` writes it: {error}") from None


def add_plays(path: Path, scenarios: Iterable[Scenario], jobs: int = 1, watch: Watch | None = None) -> int:
    """Play the scenarios that a file lacks and add them. Each is kept in FILE.journal as soon as it is there, so that
    an interrupted run can go on.

    Returns how many were added. Raises what ``played`` raises, PapersError and OSError.
    """
    plays = read_plays(path)
    count = len(plays)
    with journal_of(journal_next_to(path), _PLAYS) as journal:
        plays |= _kept(journal)
        missing = [scenario for scenario in scenarios if key(scenario) not in plays]
        for name, facts in played(missing, jobs, watch):
            journal.add(name, facts)
            plays[name] = facts
        if len(plays) > count:
            write_csv(_lines(plays), path)
            journal.discard()
    return len(plays) - count


def _kept(journal: Journal) -> dict[str, Facts]:
    """The plays of an earlier, interrupted run. Raises PapersError."""
    try:
        return dict(from_dict(Mapping[str, Mapping[str, float]], journal.entries, "plays", PapersError))
    except PapersError as error:
        raise journal.damaged(str(error)) from None


def _lines(plays: Plays) -> Iterator[tuple[str, ...]]:
    yield "scenario", *FACTS
    for name, facts in plays.items():
        yield name, *(f"{facts[fact]:.{_DIGITS}g}" if fact in facts else "" for fact in FACTS)
