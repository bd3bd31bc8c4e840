"""The fit of the engines' numbers to measured speeds, fits without some rows, and what the rows say of each number.

An error is log(predicted / measured). Numbers are fitted as logarithms, to the least sum of

- Cauchy's loss of each error over its standard deviation: 0.15 for decode, 0.25 for prompts, as far as one machine is
  from another with the same parts (cooling, memory timings, drivers). Some rows are wrong by a factor: memory that is
  slower than its name, pages from disk. Cauchy's loss lets go of these;
- the square of each number's change over its spread, the standard deviation that its source leaves.

A fifth of the variance of errors is one machine's own. ``n`` speeds of a machine thus weigh 1 / (1 + (n - 1) / 5) each
(Kish's design effect): fifty as much as 4.6 of different machines.

Fits without some rows use the slopes at the fit to all rows, and errors that are predicted anew after each solution.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from sim.costs.engine import FittedEngine
from tools.engine_starts import Starts, Vector, engines_of
from trilane.engines.accuracy.errors import QUANTITIES, Quantity, Speeds, measured
from trilane.engines.accuracy.fitted_numbers import LEAST_ADDED, FittedNumber
from trilane.engines.accuracy.measured_rows import MeasuredRow, predict

SIGMAS = Speeds(decode=0.15, prompts=0.25)  # standard deviations of errors
IN_COMMON = 0.2  # share of their variance that is the machine's
EVALUATIONS, FITTED = 30, 1e-4  # of the full fit: the most, and the change of the sum at which it ends
STEP = 0.01  # of logarithms: shorter ones vanish in whole nanoseconds
CORRECTIONS = 2  # of a fit without some rows
SOLVED, ROUNDS = 1e-6, 200  # reweighting ends at this change of logarithms, or after so many rounds
MOST_OF_IT = 0.8  # machines that hold a number: the fewest that give so much of what rows say of it
Matrix = npt.NDArray[np.float64]
Each = Callable[..., Iterable[Any]]  # as ``map``, or that of a pool


class Observation(NamedTuple):
    """A measured speed."""

    row: MeasuredRow
    quantity: Quantity


class Linear(NamedTuple):
    """Errors of observations near some numbers: ``errors`` + ``slopes`` @ (logarithms - ``logs``)."""

    observations: Sequence[Observation]
    logs: Vector
    errors: Vector
    slopes: Matrix

    def where(self, kept: Sequence[bool]) -> Linear:
        """Some of the observations."""
        observations = [point for point, keep in zip(self.observations, kept, strict=True) if keep]
        return Linear(observations, self.logs, self.errors[np.array(kept)], self.slopes[np.array(kept)])


def observations_of(rows: Iterable[MeasuredRow]) -> list[Observation]:
    """The speeds of rows that can be predicted, and are not put in."""
    return [
        Observation(row, quantity)
        for row in rows
        for quantity in QUANTITIES
        if measured(row).of(quantity) is not None and (quantity == "decode" or row.prompt_tokens is not None)
        and not row.sets(quantity)
    ]


def log_errors(observations: Sequence[Observation], engines: Mapping[str, FittedEngine]) -> Vector:
    """log(predicted / measured) of each."""
    found = {row: predict(row, engines) for row in {point.row: None for point in observations}}
    speeds = {row: Speeds(one.decode_tokens_per_s, one.prompt_tokens_per_s) for row, one in found.items()}
    return np.log([(speeds[row].of(of) or math.nan) / (measured(row).of(of) or math.nan) for row, of in observations])


def weights_of(observations: Sequence[Observation]) -> Vector:
    """Weights of observations in the sum: those of a machine have part of their error in common."""
    counts = Counter((point.row.machine, point.quantity) for point in observations)
    return np.array([1 / (1 + (counts[point.row.machine, point.quantity] - 1) * IN_COMMON) for point in observations])


def sigmas_of(observations: Sequence[Observation]) -> Vector:
    """Standard deviations of their errors."""
    return np.array([SIGMAS.of(point.quantity) for point in observations])


def fitted(starts: Starts, observations: Sequence[Observation], each: Each = map) -> Linear:
    """The numbers that fit observations best, with errors and slopes there; from where slopes at the starts lead."""
    sigmas, weights, count = sigmas_of(observations), weights_of(observations), len(observations)
    latest = linear_at(starts, observations, starts.logs, each)

    def off(logs: Vector) -> Vector:
        errors = log_errors(observations, engines_of(starts, logs))
        return np.concatenate([errors / sigmas, (logs - starts.logs) / starts.spreads])

    def slopes(logs: Vector) -> Matrix:
        nonlocal latest
        latest = linear_at(starts, observations, logs, each)
        return np.vstack([latest.slopes / sigmas[:, None], np.diag(1 / starts.spreads)])

    def loss(squares: Vector) -> Matrix:
        rows = 1 + squares[:count]
        values = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        values[:, :count] = weights * np.stack([np.log(rows), 1 / rows, -1 / rows**2])
        return values

    guess = fitted_without(starts, latest, ())
    least_squares(off, guess, slopes, loss=loss, max_nfev=EVALUATIONS, ftol=FITTED, x_scale=starts.spreads)
    return latest  # slopes are taken wherever a step ends


def linear_at(starts: Starts, observations: Sequence[Observation], logs: Vector, each: Each = map) -> Linear:
    """Errors and slopes at some numbers."""
    here = log_errors(observations, engines_of(starts, logs))
    columns = each(partial(_slope, starts, observations, logs, here), range(len(logs)))
    return Linear(observations, logs, here, np.stack(list(columns), axis=1))


def _slope(starts: Starts, observations: Sequence[Observation], logs: Vector, here: Vector, number: int) -> Vector:
    """Slopes over one number; 0 for engines that lack it."""
    before, after = engines_of(starts, logs), engines_of(starts, logs + STEP * (np.arange(len(logs)) == number))
    touched = [n for n, point in enumerate(observations) if before[point.row.engine] != after[point.row.engine]]
    slopes = np.zeros(len(observations))
    slopes[touched] = (log_errors([observations[n] for n in touched], after) - here[touched]) / STEP
    return slopes


def solved(linear: Linear, starts: Starts, logs: Vector) -> Vector:
    """The numbers that fit errors best where these are linear, by reweighted least squares from some numbers."""
    at_zero = linear.errors - linear.slopes @ linear.logs
    for _ in range(ROUNDS):
        pulls = pulls_of(linear, at_zero + linear.slopes @ logs)
        information = linear.slopes.T @ (pulls[:, None] * linear.slopes) + np.diag(starts.spreads**-2)
        wanted = starts.logs / starts.spreads**2 - linear.slopes.T @ (pulls * at_zero)
        found = np.linalg.solve(information, wanted).astype(np.float64)
        if np.max(np.abs(found - logs)) < SOLVED:
            return found
        logs = found
    return logs


def pulls_of(linear: Linear, errors: Vector) -> Vector:
    """Weights of the errors' squares that pull as Cauchy's loss does at these errors."""
    sigmas = sigmas_of(linear.observations)
    pulls: Vector = weights_of(linear.observations) / (sigmas**2 + errors**2)
    return pulls


def fitted_without(starts: Starts, linear: Linear, left_out: Collection[str]) -> Vector:
    """The numbers that fit best the observations of all rows but some, by their ids."""
    kept = linear.where([point.row.id not in left_out for point in linear.observations])
    logs = solved(kept, starts, starts.logs)
    for _ in range(CORRECTIONS):
        errors = log_errors(kept.observations, engines_of(starts, logs))
        logs = solved(kept._replace(logs=logs, errors=errors), starts, logs)
    return logs


def held_out(starts: Starts, linear: Linear, groups: Mapping[str, str], each: Each = map) -> dict[str, Vector]:
    """The numbers that fit best all rows but those of a group, by group. ``groups``: by the rows' ids."""
    names = sorted(set(groups.values()))
    folds = [frozenset(row_id for row_id, name in groups.items() if name == own) for own in names]
    return dict(zip(names, each(partial(fitted_without, starts, linear), folds), strict=True))


def held(starts: Starts, linear: Linear) -> list[FittedNumber]:
    """Return how much the rows say of each number, at the fit to all of them."""
    pulls = pulls_of(linear, linear.errors)
    precision = linear.slopes.T @ (pulls[:, None] * linear.slopes) + np.diag(starts.spreads**-2)
    after = np.sqrt(np.diag(np.linalg.inv(precision)))
    said, machines = pulls[:, None] * linear.slopes**2, [point.row.machine for point in linear.observations]
    by_machine = {name: said[[one == name for one in machines]].sum(axis=0) for name in sorted({*machines})}
    found = []
    for n, (name, start) in enumerate(starts.unknowns.items()):
        moved = (start.spread / after[n]) ** 2 >= 1 + LEAST_ADDED
        holders = _holders({machine: own[n] for machine, own in by_machine.items()}) if moved else []
        values = (start.start, _digits(np.exp(linear.logs[n])), start.spread, _digits(after[n]))
        found.append(FittedNumber(name, *values, len(holders), holders[0] if holders else ""))
    return found


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _holders(said: Mapping[str, float]) -> list[str]:
    """The fewest machines that give most of what all say, the one that says most first."""
    names = sorted(said, key=lambda name: (-said[name], name))
    sums = np.cumsum([said[name] for name in names])
    return names[: int(np.searchsorted(sums, MOST_OF_IT * sums[-1])) + 1]
