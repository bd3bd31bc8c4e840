"""How fast weights of fewer than 16 bits are read, since unpacking them takes time: ``weight_formats.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from sim.machine.sourced import Confidence, read_file
from trilane.common.hints import above, at_most

Processor = Literal["cpu", "gpu"]
_FILE = Path(str(files("sim.machine"))) / "presets" / "parts" / "weight_formats.yaml"


class FormatRate(NamedTuple):
    """Weights of ``bits`` are read at ``fraction`` of the rate of 16-bit weights."""

    bits: Annotated[float, above(0)]
    fraction: Annotated[float, above(0), at_most(1)]
    source: str
    confidence: Confidence


_Rates = Mapping[Processor, tuple[FormatRate, ...]]


@cache
def read_fraction(processor: Processor, bits: float) -> float:
    """The rate of ``processor`` with ``bits`` per weight, as a fraction of that with 16 bits; 1 from 16 bits on."""
    rows = format_rates()[processor]
    return float(np.interp(bits, [row.bits for row in rows], [row.fraction for row in rows]))


@cache
def format_rates() -> dict[Processor, list[FormatRate]]:
    """The rows of each processor, by rising bits. Raises HardwareError for a faulty file."""
    return {processor: sorted(rows) for processor, rows in read_file(_Rates, _FILE).items()}
