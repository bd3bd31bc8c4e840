"""Hits: active experts that were on the GPU when their layer was routed, and where they ran; and the outcomes of
prefetches, with the bytes that they copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.runs.columns import Bools, Cells, Columns, Ints, among, cells_of, columns_of, first_at_or_after, routed_at
from sim.runs.vocabulary import READS

if TYPE_CHECKING:
    import pandas as pd


class Occupancy(NamedTuple):
    """Times at which experts came into and left GPU memory: sorted packed keys (``Cells.at``)."""

    arrivals: Ints
    departures: Ints

    def readable(self, cells: Cells, expert: Ints, time_ns: Ints) -> Bools:
        """True for experts that could be read at ``time_ns``, when their layer was routed.

        An arrival at that very ns counts as before it, a departure as after it: victims leave when a copy that this
        plan asked for starts. An expert that has arrived more often than left is there.
        """
        first, now = np.arange(cells.layers * cells.experts) * cells.horizon, cells.at(expert, time_ns)
        before = np.searchsorted(self.arrivals, first, "left") - np.searchsorted(self.departures, first, "left")
        until = np.searchsorted(self.arrivals, now, "right") - np.searchsorted(self.departures, now, "left")
        return np.asarray(until > before[expert])

    def left_after(self, cells: Cells, expert: Ints, time_ns: Ints) -> Ints:
        """Time in ns at which experts first leave memory at or after ``time_ns``; the horizon for those that stay."""
        key = np.append(self.departures, -1)[first_at_or_after(self.departures, cells.at(expert, time_ns))]
        return np.where(key // cells.horizon == expert, key % cells.horizon, cells.horizon)


class Uses(NamedTuple):
    """Active experts, one row for each (step, layer, expert) that was computed."""

    step: Ints
    layer: Ints
    expert: Ints
    tokens: Ints
    start: Ints  # ns
    routed: Ints  # when its layer was, ns
    decode: Bools
    on_gpu: Bools
    resident: Bools  # readable on the GPU when the layer was routed
    loaded: Bools  # copied by demand for this layer


class HitRates(NamedTuple):
    """Hit rates by kind (docs/design.md, Metrics); fractions of active experts, None where there was none."""

    resident: float | None  # resident when routed / active
    token: float | None  # the same, weighted by workload
    gpu: float | None  # resident when routed and run on the GPU / run on the GPU
    served: float | None  # run on the GPU without a demand load / active


def memory_of(c: Columns, cells: Cells) -> Occupancy:
    """Arrivals (placed, or a copy's end) and departures (evicted or released)."""
    return _occupancy(c, cells, c.of("place", "demand", "prefetch", "swap"), c.of("evict", "release"))


def held_by_host(c: Columns, cells: Cells) -> Occupancy:
    """Arrivals in the host's memory (held at first, or a read's end) and departures."""
    return _occupancy(c, cells, c.of("keep", *READS), c.of("drop"))


def _occupancy(c: Columns, cells: Cells, came: Bools, left: Bools) -> Occupancy:
    return Occupancy(*(np.sort(cells.at(cells.expert(c.home[x], c.expert[x]), c.end[x])) for x in (came, left)))


def uses_of(c: Columns, cells: Cells) -> Uses:
    """Every active expert of every layer, from the spans that computed it (ahead or not)."""
    # Of each expert the first counts: a precomputation that was dropped was computed again
    computed = np.concatenate([np.flatnonzero(c.of(kind)) for kind in ("expert", "deferred", "precompute")])
    key, first = np.unique(cells.use(c.step[computed], c.home[computed], c.expert[computed]), return_index=True)
    used = c.where(computed[first])
    routed = routed_at(c, cells)[cells.layer(used.step, used.home)]
    demand = c.where(c.of("demand"))
    loads = np.sort(cells.use(demand.step, demand.home, demand.expert))
    return Uses(
        used.step, used.home, used.expert, used.tokens, used.start, routed, used.decode, used.on_gpu,
        memory_of(c, cells).readable(cells, cells.expert(used.home, used.expert), routed),
        among(loads, key),
    )


def hit_rates(uses: Uses, weights: NDArray[Any]) -> HitRates:
    """The four hit rates. ``weights``: how often each use counts."""
    hits, gpu, tokens = uses.resident, uses.on_gpu, uses.tokens * weights
    return HitRates(
        resident=share(weights[hits].sum().item(), weights.sum().item()),
        token=share(tokens[hits].sum().item(), tokens.sum().item()),
        gpu=share(weights[hits & gpu].sum().item(), weights[gpu].sum().item()),
        served=share(weights[gpu & ~uses.loaded].sum().item(), weights.sum().item()),
    )


def share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None


def layer_frame(spans: pd.DataFrame) -> pd.DataFrame:
    """One row for each layer of each step: active experts, tokens, hits (resident when routed), gpu, cpu, loads."""
    import pandas as pd

    c = columns_of(spans)
    uses = uses_of(c, cells_of(c))
    first = np.flatnonzero(np.diff(uses.step, prepend=-1) | np.diff(uses.layer, prepend=-1))  # uses come in this order
    counted = {
        "active": np.ones_like(uses.step), "tokens": uses.tokens, "hits": uses.resident, "gpu": uses.on_gpu,
        "cpu": ~uses.on_gpu, "loads": uses.loaded,
    }
    return pd.DataFrame({
        "step": uses.step[first], "phase": np.where(uses.decode, "decode", "prefill")[first],
        "layer": uses.layer[first],
        **{name: np.add.reduceat(column.astype(np.int64), first) for name, column in counted.items()},
    })


class Prefetches(NamedTuple):
    """Every prefetch that started, in order; exactly one of used, late and wasted holds for each."""

    step: Ints
    decode: Bools
    size_bytes: Ints
    used: Bools  # had arrived when the layer that ran it on the GPU was routed
    late: Bools  # ran on the GPU, but arrived after its layer was routed
    wasted: Bools  # left memory, or the run ended, before the GPU ran it
    active: Bools  # its expert was active when its layer's next plan took effect, wherever it ran


def prefetches_of(c: Columns, cells: Cells, uses: Uses) -> Prefetches:
    """Outcomes of all prefetches that started, given the uses of all experts."""
    copies = c.where(c.of("prefetch"))
    expert = cells.expert(copies.home, copies.expert)
    use_start, routed = _first_use(uses, cells, expert, copies.end)
    used = (use_start >= 0) & (use_start <= memory_of(c, cells).left_after(cells, expert, copies.end))
    late = used & (routed < copies.end)
    active = _active(c, cells, uses, copies)
    return Prefetches(copies.step, copies.decode, copies.size_bytes, used & ~late, late, ~used, active)


def _first_use(uses: Uses, cells: Cells, expert: Ints, after: Ints) -> tuple[Ints, Ints]:
    """First GPU run of experts from ``after`` on: its start, and the routing of its layer, in ns; -1 without one."""
    runs = np.flatnonzero(uses.on_gpu)
    run = cells.expert(uses.layer[runs], uses.expert[runs])
    keys = cells.at(run, uses.start[runs])
    order = np.argsort(keys, kind="stable")
    row = np.append(order, -1)[first_at_or_after(keys[order], cells.at(expert, after))]
    runs_again = (row >= 0) & (np.append(run, -1)[row] == expert)
    start, routed = (np.append(times[runs], -1)[row] for times in (uses.start, uses.routed))
    return np.where(runs_again, start, -1), np.where(runs_again, routed, -1)


def _active(c: Columns, cells: Cells, uses: Uses, copies: Columns) -> Bools:
    """True for copies whose expert was active in the next run of its layer: the one whose plan took effect at or after
    the start of the copy, which may have started while that plan was being made.
    """
    plans = c.where(c.of("plan"))
    keys = plans.layer * cells.horizon + plans.end
    order = np.argsort(keys, kind="stable")
    row = np.append(order, -1)[first_at_or_after(keys[order], copies.home * cells.horizon + copies.start)]
    planned = (row >= 0) & (np.append(plans.layer, -1)[row] == copies.home)
    step = np.append(plans.step, 0)[row]
    active = cells.use(uses.step, uses.layer, uses.expert)  # in order
    return np.asarray(planned & among(active, cells.use(step, copies.home, copies.expert)))
