"""All requests that were measured, with what is predicted of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.costs.engine import FittedEngine, load_fitted
from sim.costs.window_costs import MOST_ROWS
from sim.machine.plausibility import HardwareError
from trilane.common.errors import TrilaneError
from trilane.engines.strata.card_predictions import PredictedOnCards, cards_refused
from trilane.engines.strata.machines import machines_of
from trilane.engines.strata.predicted import ENGINE, QUANTITIES, Predicted
from trilane.engines.strata.requests import StrataRequest
from trilane.engines.strata.window import WindowCosts


@dataclass(frozen=True)
class Predictions:
    """All requests that can be asked, and why others cannot."""

    asked: tuple[Predicted, ...]
    left_out: Mapping[str, str]  # by id

    def pairs(self, quantity: str) -> list[tuple[Predicted, float, float]]:
        """Requests with both values of a quantity: predicted, measured."""
        return [(one, *one.pairs[quantity]) for one in self.asked if quantity in one.pairs]

    @cached_property
    def null_ms(self) -> dict[str, float]:
        """By id, windows as a + b x entries on the CPU, fitted to the machine's own requests in the same weights."""
        fitted: dict[str, float] = {}
        for group in grouped(one for one, _, _ in self.pairs(QUANTITIES[0])).values():
            fitted |= _null_model(group)
        return fitted


def predictions(requests: Iterable[StrataRequest]) -> Predictions:
    """Predict all requests with weights in a memory of the host."""
    engine = load_fitted(ENGINE)
    asked, left_out = list[Predicted](), dict[str, str]()
    for request in requests:
        try:
            hardware, *_ = machines_of(request)
            if reason := _refused(request) or ("memory of GPU and host is one" if hardware.one_memory else ""):
                left_out[request.id] = reason
                continue
            threads = request.workers + 1 if request.workers else hardware.cpu.cores
            costs = WindowCosts(request.shape, hardware, _on(request, engine), threads)
            kind = PredictedOnCards if request.n_gpus > 1 else Predicted
            asked.append(kind(request, costs.with_setting(threads - 1, request.kv_tokens)))
        except (HardwareError, TrilaneError) as error:
            left_out[request.id] = str(error).partition(";")[0]
    return Predictions(tuple(asked), left_out)


def _on(request: StrataRequest, engine: FittedEngine) -> FittedEngine:
    """The engine on the request's system. On Windows HIP is another runtime, and no times of starts of its kernels are
    published: those of NVIDIA's cards are taken."""
    return engine.with_numbers({"gpu.vendor_layers.amd": 1.0}) if request.os == "Windows" else engine


def _refused(request: StrataRequest) -> str:
    """Why a request is of another kind than the formulas; empty if it is not."""
    if request.n_gpus > 1:
        return cards_refused(request)
    if (request.hits or 0) > (request.lookups or 0):
        return "more hits than look-ups"
    if request.counts is not None and request.counts.rows > MOST_ROWS:
        return f"windows of more than {MOST_ROWS} rows"
    return "no experts on the CPU" if "sycl" in request.engine_version else ""


def grouped(asked: Iterable[Predicted]) -> dict[str, list[Predicted]]:
    """Requests by machine and weights."""
    groups: dict[str, list[Predicted]] = {}
    for one in asked:
        groups.setdefault(group_of(one), []).append(one)
    return groups


def group_of(one: Predicted) -> str:
    """The machine and the weights."""
    return f"{one.request.machine}, {one.request.quant}"


def _null_model(group: Sequence[Predicted]) -> dict[str, float]:
    """Least squares; the mean where there are fewer than three requests."""
    entries = [one.request.counts.cpu if one.request.counts else 0.0 for one in group]
    times = np.array([one.request.window_ms for one in group], np.float64)
    known = np.array([[1.0, count] for count in entries])[:, : 2 if len(group) > 2 else 1]
    factors = np.linalg.lstsq(known, times, rcond=None)[0]
    return dict(zip((one.request.id for one in group), (known @ factors).tolist(), strict=True))
