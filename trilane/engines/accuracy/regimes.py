"""Regimes: kinds of machine and split, in each of which other parts of a cost model decide."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, get_args

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.accuracy.measured_rows import MeasuredRow
from trilane.engines.accuracy.prediction import machine_of, shape_of, split_of
from trilane.engines.split_speed import StaticSplit

Regime = Literal["all GPU", "mixed", "experts on CPU", "server", "CPU only", "laptop", "Vulkan", "unified"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
SERVER_BYTES_PER_S = 150e9  # theory of the DRAM: six channels of DDR4 have it, two of DDR5 do not
_MOBILE = re.compile(r"laptop|Ryzen AI|\d(U|H|HS|HX|HK)\b")


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


@cache
def regime_of_row(row: MeasuredRow) -> Regime:
    """The regime of a measured row. Raises what ``load_model``, ``load_hardware`` and ``load_fitted`` raise."""
    return regime_of(shape_of(row), machine_of(row.machine), load_fitted(row.engine), split_of(row))
