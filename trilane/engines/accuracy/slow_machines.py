"""The rate that explains a machine which is slower than its parts: the least change of one with which both measured
speeds would be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from scipy.optimize import minimize_scalar

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import Hardware
from trilane.engines.accuracy.errors import QUANTITIES, Speeds, measured
from trilane.engines.accuracy.measured_rows import MeasuredRow, machine_of, predict_on

SLOW = 1.25  # predicted over measured, from which on a machine is slower than others of its kind
EXPLAINED = 1.1  # the same of a speed that a changed rate explains


class SlowPart(StrEnum):
    """A rate that differs between machines of the same parts."""

    HOST_MEMORY = "host memory"
    LINK = "link"
    GPU_MEMORY = "GPU memory"
    GPU_PRODUCTS = "GPU compute"
    PAGEABLE = "pageable copies"


class _Rate(NamedTuple):
    """Keys of a machine, and the least share of their values that a fault of the machine leaves."""

    keys: tuple[str, ...]
    least: float


_RATES: Mapping[SlowPart, _Rate] = {
    SlowPart.HOST_MEMORY: _Rate(("cpu.read_bytes_per_s",), 0.01),  # a disk in place of 12 channels
    SlowPart.LINK: _Rate(("link.h2d_bytes_per_s",), 1 / 64),  # one lane of sixteen, two generations older
    SlowPart.GPU_MEMORY: _Rate(("gpu.bandwidth_bytes_per_s",), 0.01),  # the link in place of HBM
    SlowPart.GPU_PRODUCTS: _Rate(("gpu.flops_per_s", "gpu.integer_ops_per_s"), 0.2),  # the least clock over the highest
}


class SlowCause(NamedTuple):
    """A rate, the share of it that the measured speeds need, and predicted over measured speed that is left then."""

    part: SlowPart
    share: float
    off: float


Predicted = Callable[[Hardware, FittedEngine], Speeds]


def is_slow(predicted: Speeds, known: Speeds) -> bool:
    """True if a speed is below what its parts give by more than machines of one kind differ."""
    return max(_logs(predicted, known), default=0.0) > math.log(SLOW)


def slow_causes(predicted: Predicted, known: Speeds, hardware: Hardware, engine: FittedEngine) -> list[SlowCause]:
    """Causes with each of which all measured speeds would be right, the least change of a rate first; none if the
    machine is not slow. One speed alone has often several, two seldom."""
    if not is_slow(predicted(hardware, engine), known):
        return []
    causes = [cause for cause in _causes(predicted, known, hardware, engine) if cause.off <= EXPLAINED]
    return sorted(causes, key=lambda cause: -cause.share)


def slow_causes_of_row(row: MeasuredRow) -> list[SlowCause]:
    """Causes of a measured row's speeds. Raises what ``predict`` raises."""

    def predicted(hardware: Hardware, engine: FittedEngine) -> Speeds:
        found = predict_on(row, hardware, engine)
        return Speeds(found.decode_tokens_per_s, found.prompt_tokens_per_s)

    engine = load_fitted(row.engine).copying_from(row.copies)
    return slow_causes(predicted, measured(row), machine_of(row.machine), engine)


def _causes(predicted: Predicted, known: Speeds, hardware: Hardware, engine: FittedEngine) -> Iterator[SlowCause]:
    for part, rate in _RATES.items():
        own = {key: value for key, value in hardware.flat().items() if key in rate.keys}
        if hardware.cpu_only and part is not SlowPart.HOST_MEMORY:
            continue

        def off(log_share: float, own: Mapping[str, float] = own) -> float:
            """Largest error that a share of the rates leaves."""
            share = math.exp(log_share)
            changed = hardware.with_numbers({key: value * share for key, value in own.items()})
            return _off(predicted(changed, engine), known)

        found = minimize_scalar(off, bounds=(math.log(rate.least), 0.0), method="bounded")
        yield SlowCause(part, math.exp(float(found.x)), math.exp(float(found.fun)))
    copies = engine.prompt.copies
    if copies.value == "pinned" and not hardware.one_memory:
        pageable = replace(engine, prompt=engine.prompt._replace(copies=copies._replace(value="pageable")))
        yield SlowCause(SlowPart.PAGEABLE, 1.0, math.exp(_off(predicted(hardware, pageable), known)))


def _off(predicted: Speeds, known: Speeds) -> float:
    return max(map(abs, _logs(predicted, known)), default=0.0)


def _logs(predicted: Speeds, known: Speeds) -> list[float]:
    """Logarithms of predicted over measured speed, of those that are known."""
    pairs = ((predicted.of(quantity), known.of(quantity)) for quantity in QUANTITIES)
    return [math.log(a / b) for a, b in pairs if a is not None and b is not None]
