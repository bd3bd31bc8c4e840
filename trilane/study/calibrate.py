"""Numbers of an engine from times that a program took: as many as there are times, so that simulated plays take these.

One number is found by bracketing, several by least squares, both in logarithms of numbers and times. A number is looked
for up to ``BEYOND`` times below and above those that programs of its kind have. A kind of programs says which numbers
its times set, in which order: the first with which all times are met, are set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import brentq, least_squares

from sim.costs.engine import EngineError, load_engine
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from trilane.common.errors import TrilaneError

BEYOND, ANY = 4.0, 30.0  # ANY: of engines that are no kind
CLOSE = 0.01  # of a time, up to which it has been met
_FINE = 1e-3  # of a number, to which it is looked for

SpeedQuantity: TypeAlias = Literal["tpot_ms", "ttft_ms", "tokens_per_s", "prompt_tokens_per_s"]
LogErrors: TypeAlias = Callable[[Mapping[str, float]], Sequence[float]]  # ln(simulated / asked time) of each time


class Bounds(NamedTuple):
    """Ends between which a number is looked for; both are above 0."""

    least: float
    most: float


class TimedPlay(NamedTuple):
    """A speed that a program reached, and the scenario that plays it.

    ``tokens_per_s``: of all sequences together, without the prompt; ``prompt_tokens_per_s``: of the prompt, likewise.
    """

    scenario: Scenario
    quantity: SpeedQuantity
    value: float


class CalibrationError(TrilaneError):
    """Times from which no numbers of an engine follow; the message says which, and what to change."""


class UnreachedError(CalibrationError):
    """Times that no value between the bounds gives; ``nearest``: the values that come nearest, ``worst``: the largest
    ln(simulated / asked time) with them."""

    def __init__(self, message: str, nearest: dict[str, float], worst: float) -> None:
        super().__init__(message)
        self.nearest, self.worst = nearest, worst


def calibrated(timed: Sequence[TimedPlay], keys: Sequence[str] | None = None) -> dict[str, float]:
    """Values of the engine's numbers ``keys``, as many as plays, with which these take their times.

    The engine is that of the first scenario. ``keys``: None is the kind's own order (``set_in_order``). Raises
    CalibrationError, of times that cannot be met UnreachedError; and what ``prepare`` raises.
    """
    prepared = [prepare(each.scenario) for each in timed]

    def errors(numbers: Mapping[str, float]) -> list[float]:
        simulated = [value_in(play(with_numbers(one, numbers)), each.quantity)
                     for one, each in zip(prepared, timed, strict=True)]
        return [log_error(each.quantity, value, each.value) for value, each in zip(simulated, timed, strict=True)]

    engine = timed[0].scenario.engine
    if keys is None:
        return set_in_order(errors, engine, len(timed))
    return solved(errors, {key: bounds_of(engine, key) for key in keys}, len(timed))


def set_in_order(errors: LogErrors, engine: str, times: int) -> dict[str, float]:
    """The first ``times`` numbers in the order of a kind of programs with which all errors are 0.

    Raises CalibrationError for an engine that states no order, or for fewer numbers than times; UnreachedError with the
    values that come nearest.
    """
    nearest: UnreachedError | None = None
    for keys in combinations(order_of(engine, times), times):
        try:
            return solved(errors, {key: bounds_of(engine, key) for key in keys})
        except UnreachedError as error:
            nearest = error if nearest is None or abs(error.worst) < abs(nearest.worst) else nearest
    assert nearest is not None
    raise nearest


def order_of(engine: str, times: int = 1) -> list[str]:
    """The numbers that a kind's times set, in its order. Raises CalibrationError for fewer than ``times``."""
    order = [each.number for each in load_engine(engine).calibrated]
    if not 1 <= times <= len(order):
        raise CalibrationError(
            f"engine {engine!r}: expected 1 to {len(order)} times, as many as it has numbers to set, got {times}"
            if order else f"engine {engine!r}: expected a kind of programs, such as eager (`trilane engines`)"
        )
    return order


def solved(errors: LogErrors, bounds: Mapping[str, Bounds], times: int | None = None) -> dict[str, float]:
    """The numbers at which all errors are 0, looked for between ``bounds``. Raises CalibrationError."""
    if times is not None and times != len(bounds):
        raise CalibrationError(f"expected as many numbers as times, got {len(bounds)} for {times}")
    found = _one(errors, bounds) if len(bounds) == 1 else _several(errors, bounds)
    worst = max(errors(found), key=abs)
    if abs(worst) > CLOSE:
        names, far = " and ".join(found), f"{math.exp(worst):.2f} times as long as asked"
        message = f"with no value of {names} the plays take the times: the nearest takes {far}"
        raise UnreachedError(message, found, worst)
    return found


def _one(errors: LogErrors, bounds: Mapping[str, Bounds]) -> dict[str, float]:
    """By bracketing; the nearer end where both are too short or too long."""
    ((key, ends),) = bounds.items()
    low, high = (errors({key: end})[0] for end in ends)
    if low * high > 0:
        return {key: ends.least if abs(low) <= abs(high) else ends.most}
    known = {math.log(ends.least): low, math.log(ends.most): high}

    def error(log_value: float) -> float:
        return known[log_value] if log_value in known else errors({key: math.exp(log_value)})[0]

    return {key: math.exp(brentq(error, *map(math.log, ends), xtol=_FINE))}


def _several(errors: LogErrors, bounds: Mapping[str, Bounds]) -> dict[str, float]:
    """By least squares, from the middle of all bounds."""
    low, high = np.log([ends.least for ends in bounds.values()]), np.log([ends.most for ends in bounds.values()])

    def at(logs: Sequence[float]) -> dict[str, float]:
        return {key: math.exp(value) for key, value in zip(bounds, logs, strict=True)}

    solution = least_squares(
        lambda logs: errors(at(logs)), (low + high) / 2, bounds=(low, high), diff_step=0.02, xtol=_FINE, ftol=1e-8
    )
    return at(solution.x)


def bounds_of(engine: str, key: str) -> Bounds:
    """Ends between which a number of an engine is looked for. Raises CalibrationError for one that has no value."""
    loaded = load_engine(engine)
    number = loaded.flat().get(key)
    if number is None or not isinstance(number.value, int | float) or number.value <= 0:
        raise CalibrationError(f"engine {engine!r}: expected a value above 0 of {key}, around which to look for it")
    spread = loaded.spread.get(key)
    ends = (number.value / ANY, number.value * ANY) if spread is None else (min(spread) / BEYOND, max(spread) * BEYOND)
    return Bounds(*(_allowed(engine, key, end, number.value if spread is None else max(spread)) for end in ends))


def _allowed(engine: str, key: str, end: float, known: float) -> float:
    """An end, or what is known to be allowed where an engine takes none such."""
    try:
        load_engine(engine, {key: end})
    except EngineError:
        return known
    return end


# --- plays ------------------------------------------------------------------------------------------------------------


def with_numbers(prepared: Prepared, numbers: Mapping[str, float]) -> Prepared:
    """Return the question with other numbers of its engine."""
    overrides = {**prepared.scenario.engine_overrides, **numbers}
    return replace(prepared, scenario=prepared.scenario.with_(engine_overrides=overrides)).on(prepared.hardware)


def value_in(run: Run, quantity: SpeedQuantity) -> float:
    """A quantity of a run. Raises CalibrationError for one without the steps that it is of."""
    metrics, batch = run.metrics, run.scenario.batch
    time_ms = metrics.tpot_ms if quantity in ("tpot_ms", "tokens_per_s") else metrics.ttft_ms
    tokens = {"tokens_per_s": batch, "prompt_tokens_per_s": batch * (run.scenario.prompt_tokens or 0)}.get(quantity)
    if not time_ms or tokens == 0:
        raise CalibrationError(f"{quantity}: expected a scenario with such steps and their tokens (prompt_tokens)")
    return time_ms if tokens is None else tokens / time_ms * 1e3


def log_error(quantity: SpeedQuantity, simulated: float, asked: float) -> float:
    """ln(simulated time / asked time)."""
    return math.log(simulated / asked) * (-1 if quantity.endswith("_per_s") else 1)
