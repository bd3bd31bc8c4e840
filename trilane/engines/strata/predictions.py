"""Requests that were measured, and what is predicted of them, in two ways: with the hits of their logs, and without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.costs.engine import FittedEngine, load_fitted
from sim.costs.window_costs import MOST_ROWS
from sim.machine.plausibility import HardwareError
from trilane.common.errors import TrilaneError
from trilane.engines.strata.cache import hit_rate, swapped
from trilane.engines.strata.machines import machine_of
from trilane.engines.strata.prompt import prompt_ms
from trilane.engines.strata.requests import StrataRequest, WindowCounts
from trilane.engines.strata.settings import cache_slots
from trilane.engines.strata.window import WindowCosts, WindowTime, window_time

ENGINE = "strata"
QUANTITIES = ("window, hits given", "window, hits predicted", "decode tokens/s", "prompt")
USUAL_DRAFTS, USUAL_ACCEPTED = 2.1, 0.7  # of a window where the row does not say: means of the open requests of 2026-11
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Predicted:
    """One request; times in ms. None where the row lacks what is compared, or does not say what is needed."""

    request: StrataRequest
    costs: WindowCosts

    @cached_property
    def given(self) -> WindowTime | None:
        """A window with the hits and the reads of the log."""
        counts = self.request.counts
        if counts is None:
            return None
        return window_time(self.costs, counts, self.request.context_tokens, None, swapped(self.held_share, counts.rows))

    @cached_property
    def counts(self) -> WindowCounts:
        """WindowCounts of a window by the slots of the cache; rows are those of the log, or usual ones."""
        known = self.request.counts
        drafts = USUAL_DRAFTS if known is None else known.drafts
        rows = 1 + drafts if known is None else known.rows
        entries = rows * self.request.shape.top_k
        hits = entries * hit_rate(self.held_share, rows)
        crossing = 0.0
        if self.pcie_share is None and known is not None and known.pcie:
            crossing = known.pcie / (known.cpu + known.pcie)
        missed = entries - hits
        return WindowCounts(rows, drafts, hits, (1 - crossing) * missed, crossing * missed)

    @cached_property
    def by_slots(self) -> WindowTime:
        """A window with predicted hits."""
        swaps = swapped(self.held_share, self.counts.rows)
        return window_time(self.costs, self.counts, self.request.context_tokens, self.pcie_share, swaps)

    @property
    def held_share(self) -> float:
        """Share of all experts in the cache: the row's slots, or those that the card has room for."""
        request, shape = self.request, self.request.shape
        slots = request.cache_slots
        if slots is None:
            context = request.context or request.context_tokens
            slots = cache_slots(shape, self.costs.hardware, context, request.kv_tokens)
        return min(slots / (shape.moe_layers * shape.experts), 1.0)

    @property
    def pcie_share(self) -> float | None:
        """Share of the missed experts that cross the link: the row's, or by the engine's rule. None: what the log
        counted."""
        if self.request.pcie_frac is None and self.request.pcie_reads is not None:
            return None
        return usual_share(self.costs) if self.request.pcie_frac is None else self.request.pcie_frac

    @property
    def hit_rates(self) -> tuple[float, float] | None:
        """The predicted and the measured rate of hits, by entry."""
        if (known := self.request.counts) is None:
            return None
        return self.counts.hits / sum(self.counts[2:]), known.hits / sum(known[2:])

    @cached_property
    def prompt_ms(self) -> float | None:
        tokens = self.request.read_tokens
        if not tokens or self.request.read_ms is None:
            return None
        before, share = max((self.request.prompt_tokens or 0) - tokens, 0), self.request.pcie_frac
        share = usual_share(self.costs) if share is None else share
        return prompt_ms(self.costs, tokens, before, self.held_share, share)

    @property
    def tokens_per_window(self) -> float:
        """Tokens by which a window lengthens the answer: those of the row, or usual ones."""
        windows, tokens = self.request.windows or 0, self.request.gen_tokens
        if windows > 0 and tokens:
            return tokens / windows
        return 1 + USUAL_DRAFTS * USUAL_ACCEPTED

    @property
    def pairs(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured value of each quantity that both have; times, and of speeds their inverse."""
        request, found = self.request, dict[str, tuple[float, float]]()
        times = {QUANTITIES[0]: self.given, QUANTITIES[1]: self.by_slots}
        for name, time in times.items():
            if time is not None and request.window_ms is not None:
                found[name] = time.total_ns / _NS_PER_MS, request.window_ms
        if request.window_ms is None and request.tg_tok_s and request.decode_ms is None:
            token_ms = self.by_slots.total_ns / _NS_PER_MS / self.tokens_per_window
            found[QUANTITIES[2]] = token_ms, 1000 / request.tg_tok_s
        if self.prompt_ms is not None and request.read_ms:
            found[QUANTITIES[3]] = self.prompt_ms, request.read_ms
        return found


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
    """Predict all requests of one GPU with weights in a memory of the host."""
    engine = load_fitted(ENGINE)
    asked, left_out = [], {}
    for request in requests:
        try:
            hardware = machine_of(request)
            if reason := _refused(request) or ("memory of GPU and host is one" if hardware.one_memory else ""):
                left_out[request.id] = reason
                continue
            threads = request.workers + 1 if request.workers else hardware.cpu.cores
            costs = WindowCosts(request.shape, hardware, _on(request, engine), threads)
            asked.append(Predicted(request, costs.with_setting(threads - 1, request.kv_tokens)))
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
        return "several GPUs"
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


def usual_share(costs: WindowCosts) -> float:
    """Share of the misses that cross the link, by the rule of engines 0.1.37 to 0.1.41."""
    work = costs.work
    return work.pcie_share.value * min(costs.hardware.link.h2d_bytes_per_s / work.share_bytes_per_s.value, 1.0)
