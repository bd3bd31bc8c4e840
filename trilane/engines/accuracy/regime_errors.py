"""The error that each regime had on the bundled rows, kept in ``regime_errors.csv`` for answers of ``trilane fit``.

Every machine has one vote: rigs with many rows would weigh most otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from sim.costs.engine import FittedEngine, load_fitted
from trilane.common.csv_files import read_csv
from trilane.engines.accuracy.errors import SCORED_QUALITIES, Predictions, errors_of
from trilane.engines.accuracy.measured_rows import BUNDLED, MeasuredRow, RowsError
from trilane.engines.accuracy.regimes import REGIMES, Regime, regime_of_row

REGIME_ERRORS = BUNDLED.with_name("regime_errors.csv")
FEWEST_MACHINES = 3  # of fewer, a median says nothing


class RegimeAccuracy(NamedTuple):
    """Errors of decode speeds that were predicted without the row's machine.

    ``engine``: the program, of whichever builds; empty: all of them. ``median``: of the machines' own medians;
    ``within_25``: machines whose own is at most 25 %.
    """

    regime: str
    engine: str
    median: float
    within_25: int
    machines: int
    rows: int


def regime_error(regime: Regime, engine: FittedEngine) -> RegimeAccuracy | None:
    """The error that an engine had in a regime, or all engines where fewer than three machines ran it; None where
    fewer than three machines are of the regime."""
    of_engine = {each.engine: each for each in kept_errors() if each.regime == regime}
    found = (of_engine.get(name) for name in (engine.scored_as, ""))
    return next((each for each in found if each and each.machines >= FEWEST_MACHINES), None)


@cache
def kept_errors() -> tuple[RegimeAccuracy, ...]:
    """All of the file: to find the regimes of all rows takes too long for an answer."""
    return tuple(read_csv(RegimeAccuracy, REGIME_ERRORS, "the errors of regimes", RowsError))


def regime_errors(rows: Sequence[MeasuredRow], predictions: Predictions) -> Iterator[RegimeAccuracy]:
    """Of every regime, of all engines and of each; medians to three digits."""
    scored = [row for row in rows if row.quality in SCORED_QUALITIES]
    for regime in REGIMES:
        members = [row for row in scored if regime_of_row(row) == regime]
        for engine in ("", *sorted({load_fitted(row.engine).scored_as for row in members})):
            own = [row for row in members if engine in ("", load_fitted(row.engine).scored_as)]
            if found := errors_of(own, predictions, "decode"):
                yield RegimeAccuracy(
                    regime, engine, round(found.by_machine, 3), found.machines_within_25, found.machines, found.rows
                )
