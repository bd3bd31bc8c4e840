"""The one number of each program: the file of those that were found (``calibrated.csv``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from trilane.common.csv_files import read_csv, write_csv
from trilane.common.hints import Name
from trilane.study.papers.figures import PapersError

CALIBRATED = Path(__file__).with_name("calibrated.csv")


class ProgramNumber(NamedTuple):
    """A number of an engine with which a program takes the time that a figure of its source prints, or comes nearest
    to it, where ``met`` is false. ``value`` is None where the figure cannot be asked: ``refused`` says why."""

    source: Name
    program: Name
    figure: Name
    engine: Name
    key: str
    value: float | None
    met: bool
    refused: str = ""


Calibrations: TypeAlias = Mapping[tuple[str, str], ProgramNumber]  # by source and program


@cache
def shipped_calibrations() -> Calibrations:
    """The numbers that come with the program. Raises PapersError."""
    return read_calibrations(CALIBRATED)


def read_calibrations(path: Path) -> Calibrations:
    """The numbers in a file; none, if there is no file. Raises PapersError."""
    if not path.exists():
        return {}
    found = read_csv(ProgramNumber, path, "a CSV file of calibrated programs", PapersError)
    return {(one.source, one.program): one for one in found}


def write_calibrations(calibrations: Iterable[ProgramNumber], path: Path) -> None:
    """In the order of their sources and programs. Raises OSError."""
    lines = sorted(calibrations, key=lambda one: (one.source, one.program))
    cells = ({**one._asdict(), "met": "yes" if one.met else "no"}.values() for one in lines)
    write_csv([ProgramNumber._fields, *cells], path)
