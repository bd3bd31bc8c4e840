"""Which active experts were on the GPU when their layer was routed, and where each one ran."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from sim.results.columns import (
    Bools,
    Cells,
    Columns,
    Ints,
    cells_of,
    columns_of,
    first_at_or_after,
    routed_at,
)


class Memory(NamedTuple):
    """When experts came into and left GPU memory: sorted packed keys (``Cells.at``) of arrivals and departures."""

    arrivals: Ints
    departures: Ints

    def readable(self, cells: Cells, expert: Ints, time: Ints) -> Bools:
        """Whether each expert could be read at the moment a layer was routed.

        An arrival at that very ns counts as before it, a departure as after it: victims leave when a copy that this
        plan asked for starts. Who has arrived more often than left is there.
        """
        first, now = cells.at(expert, np.zeros_like(time)), cells.at(expert, time)
        came = np.searchsorted(self.arrivals, now, "right") - np.searchsorted(self.arrivals, first, "left")
        left = np.searchsorted(self.departures, now, "left") - np.searchsorted(self.departures, first, "left")
        return np.asarray(came > left)


class Uses(NamedTuple):
    """Active experts, one row for each (step, layer, expert) that was computed."""

    step: Ints
    layer: Ints
    expert: Ints
    tokens: Ints
    start: Ints  # ns
    decode: Bools
    on_gpu: Bools
    resident: Bools  # readable on the GPU when the layer was routed
    loaded: Bools  # copied by demand for this layer


class HitRates(NamedTuple):
    """DESIGN section 7; fractions of active experts, None where there was none."""

    resident: float | None  # resident when routed / active
    token: float | None  # the same, weighted by workload
    gpu: float | None  # resident when routed and run on the GPU / run on the GPU
    served: float | None  # run on the GPU without a demand load / active


def memory_of(c: Columns, cells: Cells) -> Memory:
    """Arrivals (placed, or a copy's end) and departures (evicted or released)."""
    came, left = c.where(c.of("place", "demand", "prefetch", "swap")), c.where(c.of("evict", "release"))
    return Memory(*(np.sort(cells.at(cells.expert(x.home, x.expert), x.end)) for x in (came, left)))


def uses_of(c: Columns, cells: Cells) -> Uses:
    """Every active expert of every layer, from the spans that computed it (ahead or not)."""
    computed = c.where(c.of("expert", "precompute"))
    key = cells.layer(computed.step, computed.home) * cells.experts + computed.expert
    order = np.argsort(computed.of("precompute"), kind="stable")  # a dropped precomputation was computed again
    key, rows = np.unique(key[order], return_index=True)
    used = computed.where(order[rows])
    routed = routed_at(c, cells)[cells.layer(used.step, used.home)]
    demand = c.where(c.of("demand"))
    loads = np.sort(cells.layer(demand.step, demand.home) * cells.experts + demand.expert)
    return Uses(
        used.step, used.home, used.expert, used.tokens, used.start, used.decode, used.on("gpu"),
        memory_of(c, cells).readable(cells, cells.expert(used.home, used.expert), routed),
        np.append(loads, -1)[first_at_or_after(loads, key)] == key,
    )  # fmt: skip


def hit_rates(uses: Uses, decode_only: bool) -> HitRates:
    """The four hit rates, over the whole run or its decode steps."""
    of = uses.decode if decode_only else np.ones(len(uses.step), dtype=np.bool_)
    hits = uses.resident & of
    gpu = uses.on_gpu & of
    return HitRates(
        resident=share(int(hits.sum()), int(of.sum())),
        token=share(int(uses.tokens[hits].sum()), int(uses.tokens[of].sum())),
        gpu=share(int((hits & gpu).sum()), int(gpu.sum())),
        served=share(int((gpu & ~uses.loaded).sum()), int(of.sum())),
    )


def share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None


def layer_frame(spans: pd.DataFrame) -> pd.DataFrame:
    """One row for each layer of each step: active experts, tokens, hits (resident when routed), gpu, cpu, loads."""
    c = columns_of(spans)
    uses = uses_of(c, cells_of(c))
    frame = pd.DataFrame({
        "step": uses.step, "phase": np.where(uses.decode, "decode", "prefill"), "layer": uses.layer, "active": 1,
        "tokens": uses.tokens, "hits": uses.resident.astype(int), "gpu": uses.on_gpu.astype(int),
        "cpu": (~uses.on_gpu).astype(int), "loads": uses.loaded.astype(int),
    })  # fmt: skip
    return frame.groupby(["step", "phase", "layer"], as_index=False).sum()
