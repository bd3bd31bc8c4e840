"""Regimes: kinds of machine and split, in each of which other parts of a cost model decide; and the error that each had
on the bundled rows, kept in ``regime_errors.csv`` for answers of ``trilane fit``.

Every machine has one vote: rigs with many rows would weigh most otherwise.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.csv_files import read_csv
from trilane.engines.accuracy.measured_rows import RowsError
from trilane.engines.split_speed import StaticSplit

Regime = Literal["all GPU", "mixed", "experts on CPU", "server", "CPU only", "laptop", "Vulkan", "unified"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
SERVER_BYTES_PER_S = 150e9  # theory of the DRAM: six channels of DDR4 have it, two of DDR5 do not
_MOBILE = re.compile(r"laptop|Ryzen AI|\d(U|H|HS|HX|HK)\b")
REGIME_ERRORS = Path(__file__).with_name("regime_errors.csv")
FEWEST_MACHINES = 3  # of fewer, a median says nothing


def regime_of(shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit) -> Regime:
    """The regime of a split on a machine with an engine. The kind of machine goes before that of the split."""
    if hardware.gpu.kind == "unified":
        return "unified"
    if _MOBILE.search(f"{hardware.gpu.name}, {hardware.cpu.name}"):
        return "laptop"
    if hardware.cpu_only:
        return "CPU only"
    if engine.back_end == "vulkan":
        return "Vulkan"
    if split.cpu_layers == 0:
        return "all GPU"
    if hardware.cpu.dram_bytes_per_s > SERVER_BYTES_PER_S:
        return "server"
    return "experts on CPU" if split.cpu_layers >= shape.moe_layers and not split.gpu_experts else "mixed"


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
    of_engine = {error.engine: error for error in kept_errors() if error.regime == regime}
    errors = (of_engine.get(name) for name in (engine.scored_as, ""))
    return next((error for error in errors if error and error.machines >= FEWEST_MACHINES), None)


@cache
def kept_errors() -> tuple[RegimeAccuracy, ...]:
    """All of the file: to find the regimes of all rows takes too long for an answer."""
    return tuple(read_csv(RegimeAccuracy, REGIME_ERRORS, "the errors of regimes", RowsError))
