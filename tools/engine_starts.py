"""The numbers of engines before any row is seen: ``engine_numbers.yaml``, and the engines with other values of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.costs.engine import EngineError, FittedEngine, load_fitted
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

STARTS = Path(__file__).with_name("engine_numbers.yaml")
ENGINES = (
    "llama.cpp", "llama.cpp-2025", "llama.cpp-2026-02", "llama.cpp-vulkan", "llama.cpp-rocm", "llama.cpp-metal",
    "ik_llama.cpp", "ik_llama.cpp-2026-02", "ik_llama.cpp-2025", "ktransformers", "ktransformers-2025",
)
MOST_SHARE = 1.0
Vector = npt.NDArray[np.float64]


class Start(NamedTuple):
    """A number of every engine. ``spread``: the standard deviation of its logarithm before any row is seen."""

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

    @property
    def spreads(self) -> Vector:
        """Standard deviations of these logarithms."""
        return np.array([each.spread for each in self.unknowns.values()])

    def sources(self) -> dict[str, str]:
        """Sources of the numbers by key, or by engine:key, each with the value from which it was fitted."""
        said = {key: f"{start.source}; fitted from {start.start:g}" for key, start in self.numbers.items()}
        for ratio in self.ratios.values():
            source = f"{ratio.source}; fitted from {ratio.start:g} times {ratio.of or 'the other engines'}"
            said |= {f"{engine}:{key}": source for engine in ratio.engines for key in ratio.numbers}
        return said


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
