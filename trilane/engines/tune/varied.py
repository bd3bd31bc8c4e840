"""Answers of ``trilane tune`` on a machine with other numbers than its parts have: a larger memory, a faster link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sim.machine.dials import DIALS, plausible_range, turned
from sim.machine.hardware import Hardware
from sim.machine.plausibility import HardwareError, limits_of
from trilane.common.units import GB
from trilane.engines.question import check_engine, check_setting, engine_of
from trilane.engines.tune.search import searched
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import TuneStart

GPU_MEMORY, CPU_CORES = "gpu_memory_gb", "cpu_cores"
_WHOLE: Mapping[str, tuple[str, float]] = {GPU_MEMORY: ("gpu.memory_bytes", GB), CPU_CORES: ("cpu.cores", 1)}
_OF_GPU = (GPU_MEMORY, "gpu_gbps", "pcie_gbps")
VARIED = (GPU_MEMORY, "gpu_gbps", "pcie_gbps", "dram_gbps", CPU_CORES)
_RANGE = 8.0  # times the machine's own number, a choice: within the limits of machines


class Knob(NamedTuple):
    """A number of the machine that may be changed, in the unit of its name: its own value and the ends of its range."""

    name: str
    own: float
    low: float
    high: float


def knobs(hardware: Hardware) -> list[Knob]:
    """The numbers of a machine that have a meaning there: of no card none of it, of several neither, and no link in one
    memory."""
    fixed = hardware.cpu_only or bool(hardware.further)
    names = [name for name in VARIED if not (fixed and name in _OF_GPU)]
    return [_knob(hardware, name) for name in names if not (hardware.one_memory and name == "pcie_gbps")]


def _knob(hardware: Hardware, name: str) -> Knob:
    key, unit = _WHOLE[name] if name in _WHOLE else (DIALS[name].keys[0], DIALS[name].unit)
    own = float(hardware.flat()[key]) / unit
    if name in _WHOLE:
        limit = limits_of(hardware.gpu.kind)[key]
        low, high = limit.low / unit, limit.high / unit
    else:
        low, high = plausible_range(hardware, name)
    return Knob(name, own, max(low, own / _RANGE), min(high, own * _RANGE))


def with_knobs(hardware: Hardware, values: Mapping[str, float]) -> Hardware:
    """The machine with other numbers. Raises HardwareError for one that it has not, and for a value out of range."""
    known = {knob.name: knob for knob in knobs(hardware)}
    changed: dict[str, float] = {}
    for name, value in values.items():
        if name not in known:
            raise HardwareError(f"{name}: expected one of {', '.join(known)}")
        if not known[name].low <= value <= known[name].high:
            raise HardwareError(f"{name}: expected {known[name].low:g} to {known[name].high:g}, got {value:g}")
        whole = _WHOLE.get(name)
        changed |= turned(hardware, name, value) if whole is None else {whole[0]: round(value * whole[1])}
    return hardware.on_cards(lambda card: card.with_numbers(changed)) if changed else hardware


def started_on(question: TuneQuestion, hardware: Hardware) -> TuneStart:
    """Find the best setting on ``hardware`` in place of the question's own machine. Raises FitError without room."""
    shape, engine = question.shape_with(question.kv[-1]), engine_of(question.fit, hardware)
    check_setting(question.fit, engine, hardware)
    check_engine(engine, shape, hardware)
    search = searched(question, hardware, shape, engine)
    return TuneStart(question, search, search.bench.tuned(search.best))
