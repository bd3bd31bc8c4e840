"""Fit the engines' numbers to measured speeds, and predict every row with numbers that were fitted without its machine.

    python -m tools.fit_engines           judge a form of the engines: errors of rows held out by machine, by family of
                                          models and by month, and A/B pairs; about 70 s on two free cores
    python -m tools.fit_engines --full    with every number: where it started and came to, and who holds it
    python -m tools.fit_engines --write   then write the engines, fitted_numbers.csv and held_out.csv

A new number is a line in ``engine_numbers.yaml``, with its key in an engine's file; a factor of some engines is one
under ``ratios`` there. See ``engine_fit`` for the sum that is made least.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from time import monotonic

from sim.costs.engine import PLAIN, FittedEngine
from tools.engine_files import write_engines
from tools.engine_fit import Each, Linear, fitted, held, held_out, observations_of
from tools.engine_starts import ENGINES, Starts, engines_of, read_starts
from trilane.common.csv_files import write_csv
from trilane.engines.accuracy.errors import HELD_OUT, Predictions, Speeds, architecture_of_row, error_table
from trilane.engines.accuracy.fitted_numbers import FITTED_NUMBERS, FittedNumber
from trilane.engines.accuracy.measured_rows import MeasuredRow, predict, read_rows
from trilane.engines.accuracy.pairs import setting_scores

GROUPS: Mapping[str, Callable[[MeasuredRow], str]] = {
    "machine": lambda row: row.machine,
    "family": architecture_of_row,
    "month": lambda row: row.date[: len("2026-11")],
}
_AT_ONCE = 8  # tasks that a process takes
Engines = Mapping[str, FittedEngine]


def rows_to_fit() -> list[MeasuredRow]:
    """Rows whose setting is stated, with one assumption at most, on engines that are fitted."""
    return [row for row in read_rows() if row.scored and row.engine in ENGINES]


def rows_to_predict() -> list[MeasuredRow]:
    """All rows that can be asked of an engine with times of layers."""
    return [row for row in read_rows() if not row.left_out and row.engine != PLAIN]


def predictions_without(by: str, starts: Starts, linear: Linear, each: Each) -> dict[str, Speeds]:
    """Speeds of all rows, by numbers fitted without the rows' own group; of groups without a part in it, by all's."""
    name_of, fit_rows = GROUPS[by], {point.row for point in linear.observations}
    logs = held_out(starts, linear, {row.id: name_of(row) for row in fit_rows}, each)
    engines = {name: engines_of(starts, own) for name, own in logs.items()}
    whole = engines_of(starts, linear.logs)
    return {row.id: _speeds(row, engines.get(name_of(row), whole)) for row in rows_to_predict()}


def _speeds(row: MeasuredRow, engines: Engines) -> Speeds:
    found = predict(row, engines)
    return Speeds(found.decode_tokens_per_s, found.prompt_tokens_per_s)


def main(arguments: Sequence[str]) -> None:
    """Fit, print, and write if asked to."""
    began, starts, rows = monotonic(), read_starts(), rows_to_fit()
    with ProcessPoolExecutor(max_workers=2) as pool:
        each = partial(pool.map, chunksize=_AT_ONCE)
        linear = fitted(starts, observations_of(rows), each)
        without = {by: predictions_without(by, starts, linear, each) for by in GROUPS}
    numbers = held(starts, linear)
    if "--full" in arguments:
        print_numbers(numbers)
    for by, predictions in without.items():
        print_errors(by, rows, predictions)
    print_pairs(rows, without["machine"])
    print(f"{len(rows)} rows, {len(numbers)} numbers, {monotonic() - began:.0f} s")
    if "--write" in arguments:
        write(starts, linear, numbers, without["machine"])


def print_numbers(numbers: Sequence[FittedNumber]) -> None:
    """Each with its start, its spread before and after, and the machines that hold it."""
    for one in numbers:
        spreads = f"{one.spread:.2f} -> {one.spread_after:.2f}"
        holders = f"{one.machines} machines, {one.most} most" if one.machines else "held by no row"
        print(f"{one.number:36s} {one.start:10.4g} -> {one.fitted:10.4g}  {spreads}  {holders}")


def print_errors(by: str, rows: Sequence[MeasuredRow], predictions: Predictions) -> None:
    """Medians and the 90th percentile of all rows, and by machine of each regime."""
    for line in error_table(rows, predictions):
        if line.by == "all" or (line.by == "regime" and by == "machine"):
            of = f"{line.quantity} without the {by}, {line.group}"
            errors = line.errors
            print(f"{of:48s} {errors.rows:4d} rows {errors.machines:3d} machines  median {errors.median:6.1%}  "
                  f"by machine {errors.by_machine:6.1%}  p90 {errors.p90:6.1%}  bias {errors.bias:+6.1%}")


def print_pairs(rows: Sequence[MeasuredRow], predictions: Predictions) -> None:
    """Directions and gains by setting."""
    for one in setting_scores(rows, predictions):
        of = f"{one.quantity}, {one.setting}"
        print(f"{of:32s} {one.right:4d} of {one.pairs:4d} pairs right, {one.machines:3d} machines, "
              f"predicted gain / measured {one.followed:.2f}")


def write(starts: Starts, linear: Linear, numbers: Sequence[FittedNumber], without: Predictions) -> None:
    """The engines, ``fitted_numbers.csv`` and ``held_out.csv``."""
    rows = {point.row for point in linear.observations}
    fit = f"{len(rows)} rows of {len({row.machine for row in rows})} machines (tools/fit_engines.py)"
    engines = {name: replace(engine, fit=fit) for name, engine in engines_of(starts, linear.logs).items()}
    write_engines(engines, starts.sources())
    write_csv([FittedNumber._fields, *numbers], FITTED_NUMBERS)
    lines = [(row_id, *("" if speed is None else f"{speed:.4g}" for speed in one)) for row_id, one in without.items()]
    write_csv([("id", "decode_tokens_per_s", "prompt_tokens_per_s"), *lines], HELD_OUT)


if __name__ == "__main__":
    main(sys.argv[1:])
