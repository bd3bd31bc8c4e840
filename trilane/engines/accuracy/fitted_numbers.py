"""How much measured rows say of each number of the engines: ``fitted_numbers.csv`` of ``tools/fit_engines.py``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from trilane.common.csv_files import read_csv
from trilane.engines.accuracy.measured_rows import RowsError

FITTED_NUMBERS = Path(__file__).with_name("fitted_numbers.csv")
LEAST_ADDED = 0.2  # a number to whose precision rows add less than this share is held by no row


class FittedNumber(NamedTuple):
    """A number, by its key in the engines' files or the name of a ratio, before and after the fit.

    ``spread``: the standard deviation of its logarithm that its source leaves; ``spread_after``: the one that rows
    leave. ``machines``: the fewest whose rows give four fifths of what all say of it; 0 if it is held by no row.
    ``most``: the machine that says most.
    """

    number: str
    start: float
    fitted: float
    spread: float
    spread_after: float
    machines: int
    most: str


@cache
def fitted_numbers() -> dict[str, FittedNumber]:
    """All of the file, by number. Raises RowsError."""
    return {one.number: one for one in read_csv(FittedNumber, FITTED_NUMBERS, "what rows say of numbers", RowsError)}
