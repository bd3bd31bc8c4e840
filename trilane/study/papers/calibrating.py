"""The one number of each program, from the one figure of its source that may set it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from trilane.common.errors import TrilaneError
from trilane.common.schema import from_dict
from trilane.study.calibrate import UnreachedError, set_in_order
from trilane.study.journal import Journal, Study, journal_next_to, journal_of
from trilane.study.papers.calibrations import ProgramNumber, read_calibrations, write_calibrations
from trilane.study.papers.figures import PapersError, published
from trilane.study.papers.paper import AskingWay, Paper
from trilane.study.papers.plays import key, observed_in, plays_of
from trilane.study.papers.scores import value_of
from trilane.study.papers.sources import sources
from trilane.study.papers.ways import Asked, scenarios
from trilane.study.player import LastPrepared, Watch, play

_CALIBRATIONS = Study("calibration", PapersError)
_DIGITS = 4  # of a value


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
    that comes nearest. Raises what ``observed`` raises, and CalibrationError for an engine without such numbers."""
    figure = paper.programs[program].calibrated_by or ""
    engine = scenarios(paper, paper.questions[figure], Asked(AskingWay.ONE_NUMBER, calibrations={}))[0].engine
    last = prepared or LastPrepared()

    def number(values: Mapping[str, float], met: bool = True) -> ProgramNumber:
        [(key, value)] = values.items()
        return ProgramNumber(paper.name, program, figure, engine, key, float(f"{value:.{_DIGITS}g}"), met)

    def errors(values: Mapping[str, float]) -> list[float]:
        return [_error(paper, number(values), last)]

    try:
        return number(set_in_order(errors, engine, 1))
    except UnreachedError as error:
        return number(error.nearest, met=False)


def _error(paper: Paper, number: ProgramNumber, prepared: LastPrepared) -> float:
    """ln(simulated / published) of the figure of a number."""
    asked = Asked(AskingWay.ONE_NUMBER, calibrations={(number.source, number.program): number})
    question = paper.questions[number.figure]
    plays = {key(one): observed_in(prepared, one) for one in plays_of(paper, question, asked)}
    simulated, aim = value_of(paper, question, plays, asked), published()[number.figure].value
    if not simulated or not aim:
        raise PapersError(f"{number.figure}: expected a play with this quantity, got one without")
    return math.log(simulated / aim)
