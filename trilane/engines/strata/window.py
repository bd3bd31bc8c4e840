"""The time of one window of Strata, in closed form.

With r rows, of a layer in which the pool computes n experts and m cross the link:

    layer  = until the routing + max(GPU part, pool) + sum
    GPU    = shared expert + call for the hits + copies of m experts + call for these
    pool   = fixed time + n x an expert of so many rows; 0 for n = 0
    window = layers x layer + head + drafts + swaps that are not done + commit + host

Layers are a chain: what is longer in one of them is not made up for in another. So the mean is taken over the number of
missed experts of a layer, which is spread as if each were missed by itself (Poisson).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, floor
from statistics import fmean

import numpy as np
import numpy.typing as npt

from sim.costs.cost_table import CostTable, StepCosts
from sim.costs.engine import FittedEngine
from sim.costs.fitted_costs import fitted_costs
from sim.costs.processors import GpuProcessor
from sim.costs.window_costs import MOST_ROWS, selection_ns, streamed_ns
from sim.costs.window_work import WindowWork, with_selected
from sim.machine.hardware import Hardware
from traces.models.codings import codings_of
from traces.models.shape import ModelShape
from trilane.engines.question import FitError
from trilane.engines.strata.cache import EVERY
from trilane.engines.strata.order import LastShares, distinct_share, last_shares
from trilane.engines.strata.requests import WindowCounts

_NS = 1e9


@dataclass(frozen=True)
class WindowTime:
    """The parts of a window's time, in ns. The pool and the link's copies run while others do: ``waiting_ns`` is for
    which the GPU waits for the pool."""

    routing_ns: float  # of all layers, until their routing is there, and their sums; the head
    kv_ns: float  # keys and values that come from the host's memory
    gpu_experts_ns: float  # shared and routed experts on the GPU
    copies_ns: float  # of experts over the link
    waiting_ns: float
    drafts_ns: float
    swaps_ns: float  # until experts that were swapped after an earlier window are there
    host_ns: float  # commit, table of n-grams
    hand_over_ns: float = 0.0  # from one card to the next

    @property
    def total_ns(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class WindowCosts:
    """Costs of a window on a machine, with a pool of so many ``threads``, that of the host among them."""

    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    threads: int

    def with_setting(self, workers: int, kv_tokens: int) -> WindowCosts:
        """With so many workers, and the keys and values of so many tokens on the card."""
        same = kv_tokens == self.work.kv_tokens.value
        engine = self.engine if same else self.engine.with_numbers({"window.kv_tokens": kv_tokens})
        return replace(self, engine=engine, threads=workers + 1)

    @property
    def work(self) -> WindowWork:
        if self.engine.window is None:
            raise FitError(f"{self.engine.name}: expected an engine of windows, such as strata")
        return self.engine.window

    @cached_property
    def sparse(self) -> ModelShape:
        """The model with as many tokens of the context in its full attention as sparse attention selects."""
        return with_selected(self.shape, self.work.selected_tokens.value)

    @cached_property
    def table(self) -> CostTable:
        return fitted_costs(self.sparse, self.hardware, self.engine, MOST_ROWS, threads=self.threads)

    @cached_property
    def gpu(self) -> GpuProcessor:
        return GpuProcessor(self.hardware.gpu, self.engine.gpu, codings_of(self.shape))

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of an expert, in the mean over layers."""
        return fmean(self.shape.expert_bytes_by_layer)

    @cached_property
    def fetch_ns(self) -> float:
        """Copy of an expert by a kernel."""
        rate = self.hardware.link.h2d_bytes_per_s * self.work.fetch_share.value
        return self.expert_bytes / rate * _NS

    @property
    def swap_ns(self) -> float:
        """Copy of an expert that is swapped in, by the copy engine."""
        return self.expert_bytes / self.hardware.link.h2d_bytes_per_s * _NS

    @cached_property
    def row_ns(self) -> float:
        """A layer's further row outside the routed experts, as much longer than stated as the layer's fixed time is."""
        fixed = self.engine.gpu.layer_ns["state"].value
        return self.work.row_ns.value * self.gpu.attention_fixed_ns("state") / fixed

    def pool_expert_ns(self, rows: float) -> float:
        """An expert of the pool, with so many rows."""
        return between_rows(lambda number: self.table.experts[0].cpu_ns[number], max(rows, 1.0))

    def call_ns(self, experts: npt.NDArray[np.float64] | float, rows: float) -> npt.NDArray[np.float64]:
        """A grouped call for some experts of so many rows each; none takes no time."""
        work, count = self.work, np.asarray(experts, np.float64)
        rate = self.hardware.gpu.bandwidth_bytes_per_s * work.group_read_share.value
        each = self.expert_bytes / rate * _NS * (1 + work.group_row_share.value * (max(rows, 1.0) - 1))
        return np.minimum(count, 1.0) * work.group_ns.value + count * each

    def step(self, rows: float, context: int) -> StepCosts:
        """Costs outside the routed experts."""
        low, share = floor(rows), rows - floor(rows)
        steps = [self.table.step(number, (max(context, number),)) for number in {low, ceil(rows)}]
        values = zip(*(steps if len(steps) == 2 else steps * 2), strict=True)
        return StepCosts(*(round((1 - share) * min(pair) + share * max(pair)) for pair in values))

    def selection_ns(self, context: int) -> float:
        """Choice of the tokens that sparse attention reads, in the mean over layers."""
        return selection_ns(self.shape, self.gpu, self.work, context)


def window_time(
    costs: WindowCosts, counts: WindowCounts, context: int, pcie_share: float | None = None, swaps: float = 0.0, *,
    layers: int | None = None, final: bool = True, helpers_ns: float = 0.0,
) -> WindowTime:
    """The time of a window with so many tokens in the KV cache.

    ``pcie_share``: of missed experts, by the engine's rule, rounded down in each layer; None: as many in each layer as
    ``counts`` has in the mean. ``swaps``: experts that change places every ``EVERY`` windows. ``layers``: of the card,
    None for all; ``final``: they end with the head and the drafts. ``helpers_ns``: of other cards next to each layer.
    """
    work, layers = costs.work, layers or costs.shape.moe_layers
    step = costs.step(counts.rows, context)
    routing = step.attention_ns + costs.selection_ns(context) + step.gate_ns + work.handshake_ns.value
    routing += costs.row_ns * (counts.rows - 1) + step.combine_ns
    distinct, last = distinct_share(counts.rows, work.repeated.value), last_shares(counts.rows, work.repeated.value)
    hits_ns = float(costs.call_ns(counts.hits * distinct, 1 / distinct))
    entries = counts.cpu + counts.pcie
    number, chance = spread(entries * distinct)
    share = last.of_entries(counts.pcie / max(entries, 1e-9))
    crossing = number * share if pcie_share is None else np.floor(number * pcie_share)
    crossing = np.minimum(crossing, work.most_pcie_experts.value)
    left = number - crossing
    few_rows, many_rows = _rows(last, float(chance @ crossing) / max(entries * distinct, 1e-9), distinct)
    fetched, called = crossing * costs.fetch_ns, costs.call_ns(crossing, few_rows)
    pool = (left > 0) * work.pool_ns.value + left * costs.pool_expert_ns(many_rows)
    gpu = step.shared_ns + hits_ns + fetched + called
    waiting = np.maximum(np.maximum(pool, helpers_ns) - gpu, 0.0)
    drafts_ns = drafts_made(counts.drafts, work.rows.value) * draft_ns(costs)
    return WindowTime(
        routing_ns=layers * routing + final * step.head_ns,
        kv_ns=layers * streamed_ns(costs.shape, costs.hardware, work, counts.rows, context),
        gpu_experts_ns=layers * (step.shared_ns + hits_ns + float(chance @ called)),
        copies_ns=layers * float(chance @ fetched),
        waiting_ns=layers * float(chance @ waiting),
        drafts_ns=final * drafts_ns,
        swaps_ns=max(swaps * costs.swap_ns - drafts_ns - work.commit_ns.value, 0.0) / EVERY,
        host_ns=final * (work.commit_ns.value + work.host_ns.value),
    )


def drafts_made(verified: float, rows: int) -> float:
    """Drafts that are made where so many are verified: in a window that verifies none, the first one's probability was
    too low (``src/program/generate.cpp``); others have all."""
    return verified + max(1 - verified / (rows - 1), 0.0) if verified else 0.0


def draft_ns(costs: WindowCosts) -> float:
    """One draft: its layer and its head."""
    return costs.work.draft_ns.value + costs.gpu.read_ns(costs.work.draft_bytes.value, 16)


def _rows(last: LastShares, share: float, distinct: float) -> tuple[float, float]:
    """Mean rows of a missed expert that crosses the link, as such a share of them does, and of one of the pool."""
    crossing = last.of_experts(share)
    return crossing / max(share, 1e-9) / distinct, (1 - crossing) / max(1 - share, 1e-9) / distinct


def spread(mean: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Numbers of missed experts of a layer, and their chances, which sum to 1."""
    number = np.arange(floor(mean + 6 * mean**0.5) + 6, dtype=np.float64)
    logarithms = np.cumsum(np.log(np.maximum(number, 1.0)))
    chance = np.exp(number * np.log(max(mean, 1e-12)) - logarithms) * exp(-mean)
    return number, chance / chance.sum()


def between_rows(of: Callable[[int], float], rows: float) -> float:
    """A quantity of whole numbers of rows, for a mean between them."""
    low, share = floor(rows), rows - floor(rows)
    return (1 - share) * of(low) + (share * of(low + 1) if share else 0.0)
