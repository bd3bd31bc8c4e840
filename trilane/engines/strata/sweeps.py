"""One setting of Strata at a time, as people measured it: the best value as predicted, and what it costs.

``sweeps.csv``: machines by their parts, DDR3 as DDR4-2133; slots that no source states follow from the card's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from sim.costs.engine import load_fitted
from sim.machine.hardware import load_hardware
from traces.models.catalogue import load_model
from trilane.common.csv_files import read_csv
from trilane.common.hints import Count, Name, between
from trilane.engines.strata.predicted import ENGINE, usual_share
from trilane.engines.strata.requests import USUAL_KV_BITS, RequestsError
from trilane.engines.strata.settings import WORTH_WORKERS, StrataSetting, cache_slots, strata_speed, worker_numbers
from trilane.engines.strata.window import WindowCosts

SWEEPS = Path(__file__).with_name("sweeps.csv")
Knob = Literal["pcie_share", "workers", "min_draft_probability"]
_MODEL, _CONTEXT = "qwen3.8-flash-next", 128  # tools/calibrate.py: short questions, answers of 128 tokens
_Number = Annotated[float, between(0, 1e6)]


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The speed with one value of a setting."""

    id: Name
    machine: Name
    weights: Name
    slots: Count | None = None
    pcie_gb_s: _Number | None = None
    engine_version: str
    knob: Knob
    value: _Number
    tokens_per_s: _Number
    asked_again: bool = False  # the same questions for each value, as tools/calibrate.py does
    source: str = ""


@dataclass(frozen=True)
class Sweep:
    """A setting of one machine; tokens a second by its values."""

    machine: str
    engine_version: str
    knob: Knob
    measured: dict[float, float]
    predicted: dict[float, float]

    @property
    def best(self) -> float:
        """The value that was measured best."""
        return max(self.measured, key=lambda value: self.measured[value])

    @property
    def chosen(self) -> float:
        """The value that is predicted best; of workers the fewest that are nearly as good."""
        best = max(self.predicted, key=lambda value: self.predicted[value])
        if self.knob != "workers":
            return best
        least = self.predicted[best] / (1 + WORTH_WORKERS)
        return min(value for value, speed in self.predicted.items() if speed >= least)

    @property
    def cost(self) -> float:
        """Share of the best measured speed that the chosen value lacks."""
        return 1 - self.measured[self.chosen] / self.measured[self.best]


def sweeps(path: str | Path = SWEEPS) -> list[Sweep]:
    """All sweeps of a file. Raises RequestsError."""
    groups: dict[tuple[str, str, Knob], list[SweepRow]] = {}
    for row in read_csv(SweepRow, path, "a CSV file of settings of Strata", RequestsError):
        groups.setdefault((row.machine, row.engine_version, row.knob), []).append(row)
    return [_sweep(rows) for rows in groups.values()]


def _sweep(rows: list[SweepRow]) -> Sweep:
    first = rows[0]
    measured: dict[float, list[float]] = {}
    for row in rows:
        measured.setdefault(row.value, []).append(row.tokens_per_s)
    return Sweep(
        first.machine, first.engine_version, first.knob, {value: fmean(speeds) for value, speeds in measured.items()},
        _predicted(first, measured),
    )


def _predicted(row: SweepRow, values: Iterable[float]) -> dict[float, float]:
    hardware = load_hardware(row.machine)
    if row.pcie_gb_s is not None:
        hardware = hardware.with_numbers({"link.h2d_bytes_per_s": row.pcie_gb_s * 1e9})
    shape = replace(load_model(f"{_MODEL}@{row.weights}"), kv_bits=USUAL_KV_BITS)
    costs = WindowCosts(shape, hardware, load_fitted(ENGINE), hardware.cpu.cores)
    slots = row.slots or cache_slots(shape, hardware, _CONTEXT)
    threshold, workers = costs.work.min_draft_probability.value, worker_numbers(hardware)[0]
    usual = StrataSetting(usual_share(costs), workers, threshold, slots)
    kinds: dict[str, type] = {"workers": int}
    return {
        value: 1000 / strata_speed(
            costs, replace(usual, **{row.knob: kinds.get(row.knob, float)(value)}), _CONTEXT, same_text=row.asked_again
        ).token_ms
        for value in values
    }
