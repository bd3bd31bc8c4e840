"""How fast weights of fewer than 16 bits are read: unpacking them costs time. From ``weight_formats.yaml``."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from sim.machine.plausibility import HardwareError
from sim.machine.sourced_yaml import only, read_mapping

Processor = Literal["cpu", "gpu"]
_FILE = Path(str(files("sim.machine"))) / "presets" / "parts" / "weight_formats.yaml"


class FormatRate(NamedTuple):
    """Weights of ``bits`` are read at ``fraction`` of the rate of 16-bit ones."""

    bits: float
    fraction: float
    source: str
    confidence: str


def read_fraction(processor: Processor, bits: float) -> float:
    """Of the rate at which ``processor`` reads 16-bit weights: what it reaches with ``bits`` a weight; 1 from 16 on."""
    rows = format_rates()[processor]
    return float(np.interp(bits, [row.bits for row in rows], [row.fraction for row in rows]))


@cache
def format_rates() -> dict[Processor, list[FormatRate]]:
    """The rows of each processor, by rising bits. Raises HardwareError if the file is not what it must be."""
    document = read_mapping(_FILE)
    only(document, ("cpu", "gpu"), _FILE.name, complete=True)
    return {processor: sorted(_row(row, processor) for row in document[processor]) for processor in ("cpu", "gpu")}


def _row(row: Any, processor: str) -> FormatRate:
    where = f"{_FILE.name}, {processor}"
    only(row, FormatRate._fields, where, complete=True)
    rate = FormatRate(float(row["bits"]), float(row["fraction"]), str(row["source"]), str(row["confidence"]))
    if not (rate.bits > 0 and 0 < rate.fraction <= 1):
        raise HardwareError(f"{where}: bits must be positive and fraction within 0..1, got {row!r}")
    return rate
