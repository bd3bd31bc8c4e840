"""The one number of each program, from the one figure of its source that may set it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from sim.costs.engine import CountedEngine, load_engine
from trilane.common.errors import TrilaneError
from trilane.common.schema import from_dict
from trilane.study.calibrate import UnreachedError, bounds_of, solved
from trilane.study.journal import Journal, Study, journal_next_to, journal_of
from trilane.study.papers.calibrations import ProgramNumber, read_calibrations, write_calibrations
from trilane.study.papers.figures import PapersError, published
from trilane.study.papers.paper import AskingWay, Paper
from trilane.study.papers.plays import key, observed_in, plays_of
from trilane.study.papers.scores import value_of
from trilane.study.papers.sources import sources
from trilane.study.papers.ways import Asked
from trilane.study.player import LastPrepared, Watch, play

_CALIBRATIONS = Study("calibration", PapersError)
_DIGITS = 3  # of a value


class ProgramName(NamedTuple):
    """A program with a figure that sets its number."""

    source: str
    program: str


def programs(names: Iterable[str] | None = None) -> list[ProgramName]:
    """The programs of some sources with such a figure; ``names``: None: all sources."""
    chosen = sources() if names is None else {name: sources()[name] for name in names}
    return [ProgramName(name, program) for name, paper in chosen.items()
            for program, one in paper.programs.items() if one.calibrated_by]


def add_calibrations(
    path: Path, wanted: Iterable[ProgramName], jobs: int = 1, watch: Watch | None = None
) -> int:
    """Calibrate the programs that a file lacks, and add them; an interrupted run goes on, by FILE.journal.

    Returns how many were added. Raises PapersError and OSError.
    """
    known = dict(read_calibrations(path))
    count = len(known)
    with journal_of(journal_next_to(path), _CALIBRATIONS) as journal:
        known |= _kept(journal)
        missing = [one for one in wanted if one not in known]
        for place, found in play(_calibrated, missing, lambda one: one, jobs, watch):
            journal.add("/".join(missing[place]), found._asdict())
            known[missing[place]] = found
        if len(known) > count:
            write_calibrations(known.values(), path)
            journal.discard()
    return len(known) - count


def _kept(journal: Journal) -> dict[tuple[str, str], ProgramNumber]:
    try:
        kept = from_dict(Mapping[str, ProgramNumber], journal.entries, "calibrations", PapersError)
    except PapersError as error:
        raise journal.damaged(str(error)) from None
    return {(one.source, one.program): one for one in kept.values()}


def _calibrated(prepared: LastPrepared, name: ProgramName) -> ProgramNumber:
    paper = sources()[name.source]
    try:
        return calibrated(paper, name.program, prepared)
    except TrilaneError as error:
        figure = paper.programs[name.program].calibrated_by or ""
        return ProgramNumber(*name, figure, "", "", None, False, str(error))


def calibrated(paper: Paper, program: str, prepared: LastPrepared | None = None) -> ProgramNumber:
    """The first number of the kind with which the program takes the time that the figure prints; if none does, the one
    that comes nearest. Raises what ``observed`` raises, and PapersError for an engine without such numbers."""
    figure_id = paper.programs[program].calibrated_by or ""
    engine, keys = _numbers_of(paper, program, figure_id)
    nearest: tuple[float, ProgramNumber] | None = None
    for number in keys:
        target = _Target(paper, program, figure_id, engine, number, prepared or LastPrepared())
        found = target.solved()
        if found.met:
            return found
        far = abs(target.error(found.value or 0.0))
        if nearest is None or far < nearest[0]:
            nearest = far, found
    assert nearest is not None
    return nearest[1]


def _numbers_of(paper: Paper, program: str, figure_id: str) -> tuple[str, list[str]]:
    """The kind of the figure's engine, and its numbers in the order in which they are tried."""
    method = paper.questions[figure_id].method
    scenario = paper.cases(paper.questions[figure_id], method)[0].draws[0]
    kind = load_engine(paper.kinds.get(scenario.engine, scenario.engine))
    numbers = [each.number for each in kind.calibrated] if isinstance(kind, CountedEngine) else []
    keys = [number for number in numbers if number not in scenario.engine_overrides]
    if not keys:
        raise PapersError(f"{paper.name}: {program}: engine {kind.name!r} has no numbers that a time sets")
    return kind.name, keys


class _Target(NamedTuple):
    """A figure that is to be met by one number of an engine."""

    paper: Paper
    program: str
    figure: str
    engine: str
    key: str
    prepared: LastPrepared

    def solved(self) -> ProgramNumber:
        """The value between its bounds, or the nearest."""
        met, bounds = True, {self.key: bounds_of(self.engine, self.key)}
        try:
            values = solved(lambda numbers: [self.error(numbers[self.key])], bounds)
        except UnreachedError as error:
            met, values = False, error.nearest
        return self._with(float(f"{values[self.key]:.{_DIGITS}g}"), met)

    def error(self, value: float) -> float:
        """ln(simulated / published)."""
        asked = Asked(AskingWay.ONE_NUMBER, calibrations={(self.paper.name, self.program): self._with(value)})
        question = self.paper.questions[self.figure]
        plays = {key(one): observed_in(self.prepared, one) for one in plays_of(self.paper, question, asked)}
        simulated, aim = value_of(self.paper, question, plays, asked), published()[self.figure].value
        if not simulated or not aim:
            raise PapersError(f"{self.figure}: expected a play with this quantity, got one without")
        return math.log(simulated / aim)

    def _with(self, value: float, met: bool = True) -> ProgramNumber:
        return ProgramNumber(self.paper.name, self.program, self.figure, self.engine, self.key, value, met)
