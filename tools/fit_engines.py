"""Fit the engines' numbers to measured speeds, and predict every row without its own machine.

    python -m tools.fit_engines           fit to all rows; print numbers and errors
    python -m tools.fit_engines --write   then write the engines, and held_out.csv: the rows of each machine as
                                          predicted with numbers that were fitted to all other machines

Least squares of logarithms with Cauchy's loss, since some rows are wrong by a factor (memory that is not as fast as its
name, pages from disk): 8 log(decode ratio), 4 log(prompt ratio), times machine's rows ** -0.4, so that a machine with
fifty rows counts as five with one; and 8 log(number / start) / spread, which holds what the rows say nothing about.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from sim.costs.engine import PLAIN, EngineError, FittedEngine, load_fitted
from sim.machine.sourced import Sourced
from trilane.common.csv_files import write_csv
from trilane.common.files import atomic_path
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml
from trilane.engines.accuracy.measured_rows import BUNDLED, MeasuredRow, predict, read_rows

STARTS = Path(__file__).with_name("engine_numbers.yaml")
HELD_OUT = BUNDLED.with_name("held_out.csv")
ENGINES = (
    "llama.cpp", "llama.cpp-2025", "llama.cpp-vulkan",
    "ik_llama.cpp", "ik_llama.cpp-2026-02", "ik_llama.cpp-2025", "ktransformers",
)
DECODE, PROMPT, START = 8.0, 4.0, 8.0  # weights of residuals
MOST_SHARE = 1.0
EVALUATIONS = 4  # the fit is held so strongly that more change nothing
STEP = 0.01
Vector = npt.NDArray[np.float64]


class Start(NamedTuple):
    """A number of every engine."""

    start: float
    spread: float
    source: str


class Ratio(NamedTuple):
    """A factor by which some numbers of some engines differ from the base's; ``of``: from another number of it."""

    start: float
    spread: float
    engines: tuple[str, ...]
    numbers: tuple[str, ...]
    source: str
    of: str | None = None


class Starts(NamedTuple):
    """``engine_numbers.yaml``."""

    numbers: Mapping[str, Start]
    ratios: Mapping[str, Ratio]

    @property
    def unknowns(self) -> dict[str, Start | Ratio]:
        """All of them, numbers first."""
        return {**self.numbers, **self.ratios}

    @property
    def logs(self) -> Vector:
        """Logarithms of the numbers to start from."""
        return np.log([each.start for each in self.unknowns.values()])


def read_starts() -> Starts:
    """The unknowns."""
    found: Starts = from_dict(Starts, read_yaml(STARTS), STARTS.name, EngineError)
    return found


def engines_of(starts: Starts, logs: Vector) -> dict[str, FittedEngine]:
    """The engines with these logarithms of the unknowns."""
    values = dict(zip(starts.unknowns, np.exp(logs), strict=True))
    return {name: load_fitted(name).with_numbers(_numbers(starts, values, name)) for name in ENGINES}


def _numbers(starts: Starts, values: Mapping[str, float], engine: str) -> dict[str, float]:
    """An engine's own."""
    own = {key: float(values[key]) for key in starts.numbers}
    for name, ratio in starts.ratios.items():
        if engine in ratio.engines:
            for key in ratio.numbers:
                own[key] = float((values[ratio.of] if ratio.of else own[key]) * values[name])
    return {key: min(value, MOST_SHARE) if key.endswith("_share") and key.startswith("gpu.") else value
            for key, value in own.items()}


def fitted(starts: Starts, rows: Sequence[MeasuredRow]) -> Vector:
    """The best logarithms for some rows."""

    def slopes(logs: Vector) -> Vector:
        """Slopes of the residuals over steps of a hundredth: shorter ones vanish in whole nanoseconds."""
        here = log_residuals(logs, starts, rows)
        steps = STEP * np.eye(len(logs))
        return np.stack([(log_residuals(logs + step, starts, rows) - here) / STEP for step in steps], axis=1)

    off = partial(log_residuals, starts=starts, rows=rows)
    found: Vector = least_squares(off, starts.logs, slopes, loss="cauchy", max_nfev=EVALUATIONS, x_scale="jac").x
    return found


def log_residuals(logs: Vector, starts: Starts, rows: Sequence[MeasuredRow]) -> Vector:
    """Weighted logarithms of errors, then of changes, which the fit makes small."""
    engines = engines_of(starts, logs)
    counts = Counter(row.machine for row in rows)
    off = [
        weight * counts[row.machine] ** -0.4 * error
        for row in rows
        for weight, error in zip((DECODE, PROMPT), errors(row, engines), strict=True)
        if error is not None
    ]
    spreads = np.array([each.spread for each in starts.unknowns.values()])
    return np.array([*off, *(START * (logs - starts.logs) / spreads)])


def errors(row: MeasuredRow, engines: Mapping[str, FittedEngine]) -> tuple[float | None, float | None]:
    """Errors of decode and prompt speed, log(predicted / measured)."""
    found = predict(row, engines)
    pairs = (
        (found.decode_tokens_per_s, row.decode_tokens_per_s), (found.prompt_tokens_per_s, row.prompt_tokens_per_s),
    )
    decode, prompt = (math.log(a / b) if a is not None and b is not None else None for a, b in pairs)
    return decode, prompt


def rows_to_fit() -> list[MeasuredRow]:
    """Rows whose setting is stated, with one assumption at most, on engines that are fitted."""
    return [row for row in read_rows() if row.scored and row.engine in ENGINES]


def held_out(starts: Starts, rows: Sequence[MeasuredRow]) -> dict[str, dict[str, FittedEngine]]:
    """Engines fitted to the rows of all other machines, by machine, from the same start as the fit to all."""
    machines = sorted({row.machine for row in rows})
    without = [[row for row in rows if row.machine != machine] for machine in machines]
    with ProcessPoolExecutor(max_workers=2) as pool:
        found = list(pool.map(partial(fitted, starts), without))
    return {machine: engines_of(starts, logs) for machine, logs in zip(machines, found, strict=True)}


def summary(found: Sequence[float | None]) -> str:
    """Median of errors, and bias."""
    off = np.expm1([error for error in found if error is not None])
    return f"{len(off)} rows, median error {np.median(np.abs(off)):.1%}, bias {np.median(off):+.1%}"


def write_held_out(rows: Sequence[MeasuredRow], engines: Mapping[str, Mapping[str, FittedEngine]]) -> None:
    """``held_out.csv``. Rows that were not fitted to are predicted with what was fitted without their machine, too."""
    lines: list[tuple[str, ...]] = [("id", "decode_tokens_per_s", "prompt_tokens_per_s")]
    for row in rows:
        found = predict(row, engines[row.machine])
        decode, prompt = found.decode_tokens_per_s, found.prompt_tokens_per_s
        lines.append((row.id, *("" if speed is None else f"{speed:.4g}" for speed in (decode, prompt))))
    write_csv(lines, HELD_OUT)


def main(arguments: Sequence[str]) -> None:
    """Fit, print, and write if asked to."""
    starts, rows = read_starts(), rows_to_fit()
    logs = fitted(starts, rows)
    engines = engines_of(starts, logs)
    for name, value in zip(starts.unknowns, np.exp(logs), strict=True):
        print(f"{name:36s} {value:.4g}")
    for kind, number in (("decode", 0), ("prompts", 1)):
        print(f"{kind}: {summary([errors(row, engines)[number] for row in rows])}")
    if "--write" not in arguments:
        return
    asked = [row for row in read_rows() if not row.left_out and row.engine != PLAIN]
    without = held_out(starts, rows)
    fallback = {row.machine: engines for row in asked if row.machine not in without}
    write_held_out(asked, {**fallback, **without})
    for kind, number in (("decode", 0), ("prompts", 1)):
        print(f"{kind}, held out: {summary([errors(row, without[row.machine])[number] for row in rows])}")
    fit = fit_of(rows, float(np.max(np.abs(np.expm1(logs - starts.logs)))))
    write_engines({name: replace(engine, fit=fit) for name, engine in engines.items()}, _sources(starts))


def fit_of(rows: Sequence[MeasuredRow], moved: float) -> str:
    """Rows to which the numbers were fitted, in words. ``moved``: the largest change by the fit, as a share."""
    machines = len({row.machine for row in rows})
    most = math.ceil(100 * moved)
    return f"{len(rows)} rows of {machines} machines, which move no number by more than {most} % (tools/fit_engines.py)"


def _sources(starts: Starts) -> dict[str, str]:
    """Sources of the numbers by key, each with the value from which it was fitted."""
    said = {key: f"{start.source}; fitted from {start.start:g}" for key, start in starts.numbers.items()}
    for ratio in starts.ratios.values():
        source = f"{ratio.source}; fitted from {ratio.start:g} times {ratio.of or 'the other engines'}"
        said |= {f"{engine}:{key}": source for engine in ratio.engines for key in ratio.numbers}
    return said


# --- the engines' files: one whole, the others as what differs from it ------------------------------------------------


FOLDER = Path(str(files("sim.costs"))) / "engines"
HEADER = "# Written by tools/fit_engines.py: numbers with a source that ends in 'fitted from' are not edited by hand.\n"
DIGITS = 3
TRAITS = (
    "program", "superseded_by", "back_end", "vendors", "reads", "splits", "dialect", "copies_at_once", "options",
    "cache_costs", "fit",
)


def write_engines(engines: Mapping[str, FittedEngine], sources: Mapping[str, str]) -> None:
    """Rewrite the files of ``engines``; ``sources``: by a number's key, or by engine:key. The first is their base."""
    (base_name, base), *others = ((name, _rounded(engine, sources)) for name, engine in engines.items())
    _write(base_name, _lines(base, None))
    for name, engine in others:
        _write(name, [f"like: {base_name}\n", *_lines(engine, base)])


def _rounded(engine: FittedEngine, sources: Mapping[str, str]) -> FittedEngine:
    """Its fitted numbers to three digits, and their sources."""
    own = f"{engine.name}:"
    said = {key: sources.get(own + key, sources.get(key)) for key in engine.flat()}
    fitted = {key: float(f"{engine.flat()[key].value:.{DIGITS}g}") for key, text in said.items() if text}
    return engine.with_numbers(fitted).with_sources({key: text for key, text in said.items() if text})


def _lines(engine: FittedEngine, base: FittedEngine | None) -> list[str]:
    """The file's lines; without what the base has, too."""
    lines = [f'about: "{engine.about}"\n', *_traits(engine, base)]
    if base is None:
        lines += [f"starts: {engine.starts}\n", f"decides: {str(engine.decides).lower()}\n"]
    known, open_sections = {} if base is None else base.flat(), list[str]()
    for key, number in engine.flat().items():
        if key in known and known[key].value == number.value:
            continue
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:\n")
                open_sections = sections[: depth + 1]
        lines.append(f"{'  ' * len(sections)}{name}: {_number(number)}\n")
    return lines


def _traits(engine: FittedEngine, base: FittedEngine | None) -> list[str]:
    """Lines of the traits that are not those of the base, or without one not the usual ones."""
    usual = {field.name: field.default for field in fields(FittedEngine)} if base is None else vars(base)
    own = {key: getattr(engine, key) for key in TRAITS if getattr(engine, key) != usual[key]}
    return [f"{key}: {_trait(value)}\n" for key, value in own.items()]


def _trait(value: str | tuple[str, ...]) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else value


def _number(number: Sourced[Any]) -> str:
    value = number.value
    text = f"{value:.3e}".replace("e+0", "e+") if isinstance(value, float) and value >= 1e9 else str(value)
    return f'{{value: {text}, source: "{number.source}", confidence: {number.confidence}}}'


def _write(name: str, lines: list[str]) -> None:
    with atomic_path(FOLDER / f"{name}.yaml") as temporary:
        temporary.write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
