"""Plays of a row's policy at every step of its model's routing, and times of its steps.

A cache is replayed without time (``policies.mechanism.cache_replay``), slot by slot, text by text, in decode steps. Its
misses are copied and computed by the GPU: a step takes its loads and its work without them; where loads are made a
layer ahead, the work runs next to them. The work is the row's, or that of the engine with all experts on the GPU. A
registered policy is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.mechanism.cache_replay import ReplayEvent, replay
from policies.parts.belady import BeladyCache
from policies.parts.caches import LfuCache, LruCache, StaticCache
from policies.parts.future import Future
from policies.parts.placements import NoPlacement, Pooled, PoolPlacement, PopularityPlacement
from policies.protocols import Budget, Cache, Placement
from policies.registry import SYSTEMS
from sim.costs.engine_costs import costs_on
from sim.machine.hardware import Hardware, load_hardware
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from traces.batches import count_experts
from traces.layout import DECODE
from traces.library import load_trace
from traces.models.catalogue import load_model
from traces.models.names import parted
from trilane.common.names import unknown
from trilane.study.cache_logs.rows import CacheRow, LogError
from trilane.study.policy_choice import policy_in

TEXTS = 2  # that a cache is replayed on, one after the other; of a batch, one
_ACCEPTED = 0.7  # of drafts, by which a window moves on, as in trilane.engines.strata.cache
_PROFILE = "24x8+64/none"  # texts that a profile is counted on
_MOST_TEXTS = 64  # that a batch begins with
_ROOM_BYTES = 9e11  # of a GPU that holds everything
_NS_PER_MS = 1e6


class CacheKind(NamedTuple):
    """A cache, in one pool of all layers or with as many slots in each."""

    about: str
    make: Callable[[Sequence[ReplayEvent]], Cache]
    placement: Callable[[], Placement]


CACHES: Mapping[str, CacheKind] = {
    "lru": CacheKind("one LRU of all layers", lambda _: LruCache(), PoolPlacement),
    "layer-lru": CacheKind("an LRU in each layer", lambda _: LruCache(), NoPlacement),
    "lfu": CacheKind("one pool, the least often used so far goes", lambda _: LfuCache(), PoolPlacement),
    "layer-lfu": CacheKind("the same in each layer", lambda _: LfuCache(), NoPlacement),
    "belady": CacheKind("one pool, clairvoyant", lambda events: BeladyCache(_future(events)), PoolPlacement),
    "layer-belady": CacheKind("clairvoyant in each layer", lambda events: BeladyCache(_future(events)), NoPlacement),
    "static": CacheKind("the experts that a profile counted most, of all layers", lambda _: StaticCache(),
                        PopularityPlacement),
}


@dataclass(frozen=True)
class Played:
    """Predictions of a row; None where it lacks what they need. ``given_ms``: with the loads that were measured."""

    hit_rate: float
    loads: float
    prefetched: float
    step_ms: float | None = None
    given_ms: float | None = None


def play(row: CacheRow) -> Played:
    """Play a row. Raises LogError for an unknown policy, and what the loading of its model and machine raises."""
    if row.slots is not None and row.slots > (experts := load_model(row.model).experts):
        raise LogError(f"slots: expected at most the {experts} experts of a layer, got {row.slots:g}")
    if row.policy in CACHES:
        return _cached(row)
    name, _ = policy_in(row.policy, LogError)
    if name not in SYSTEMS:
        raise LogError(f"policy: {unknown('policy', name, (*CACHES, *SYSTEMS))}")
    if not row.machine:
        raise LogError(f"machine: expected one, on which {name} is simulated, got none")
    return _simulated(row)


# --- caches that are replayed -----------------------------------------------------------------------------------------


def _cached(row: CacheRow) -> Played:
    layers = load_model(row.model).moe_layers
    texts = _texts(row.model, row.batch, row.window, row.steps, row.active)
    misses = np.array([of for events in texts for of in _misses(row, events)]).reshape(-1, layers)
    lookups = sum(len(event.active) for events in texts for event in events)
    loads = float(misses.sum()) / len(misses)
    prefetched = float(np.minimum(misses, row.prefetch).sum()) / len(misses)
    given = step_ms(row, row.loads, row.prefetched or 0.0) if row.machine and row.loads is not None else None
    predicted = step_ms(row, loads, prefetched) if row.machine else None
    return Played(1 - float(misses.sum()) / lookups, loads, prefetched, predicted, given)


def _misses(row: CacheRow, events: Sequence[ReplayEvent]) -> tuple[int, ...]:
    """Experts of each event that a fresh cache lacks."""
    kind, shape = CACHES[row.policy], load_model(row.model)
    pooled = kind.placement is PoolPlacement
    placement = kind.placement()
    if row.start == "profile" and row.policy != "static":
        placement = Pooled(PopularityPlacement()) if pooled else PopularityPlacement()
    popularity = _popularity(row.model) if row.start == "profile" or row.policy == "static" else None
    slots = round((row.slots or 0) * shape.moe_layers)
    budget = Budget(shape.experts, (1,) * shape.moe_layers, slots, popularity)  # a slot holds any expert
    return replay(events, kind.make(events), budget, placement).misses


def _future(events: Sequence[ReplayEvent]) -> Future:
    return Future([(event.step, event.layer, event.active) for event in events])


@lru_cache(maxsize=2)
def _texts(
    model: str, batch: int, window: int, steps: int, active: float | None
) -> tuple[tuple[ReplayEvent, ...], ...]:
    """Events of the decode steps of each text; a batch counts as one."""
    if batch > 1:
        return (_batch(model, batch, steps, active),)
    forward = max(round(1 + _ACCEPTED * (window - 1)), 1)
    ids, experts = _answers(model, TEXTS, steps * forward + window)
    starts = range(0, steps * forward, forward)
    return tuple(tuple(_events((text[first : first + window] for first in starts), experts)) for text in ids)


def _batch(model: str, batch: int, steps: int, active: float | None) -> tuple[ReplayEvent, ...]:
    """Events of a batch: as many texts in each step; or, where ``active`` says that they were not, many at first, of
    which one is left at the end, so that both means are met."""
    most = batch if active is None else _MOST_TEXTS
    ids, experts = _answers(model, most, steps)
    rows = np.stack(ids, axis=1)[:steps]
    if active is None:
        return tuple(_events(rows, experts))
    top_k = rows.shape[-1]
    used = [np.mean([np.count_nonzero(count_experts(step[:texts], experts)) for step in rows]) / rows.shape[2]
            for texts in range(batch, most + 1)]
    full = [(batch - 1) / (texts - 1) for texts in range(batch, most + 1)]  # share of steps
    means = [share * mean + (1 - share) * top_k for share, mean in zip(full, used, strict=True)]
    nearest = int(np.argmin(np.abs(np.array(means) - active)))
    until = round(full[nearest] * steps)
    return tuple(_events((step[: batch + nearest if number < until else 1] for number, step in enumerate(rows)),
                         experts))


def _answers(model: str, texts: int, tokens: int) -> tuple[list[NDArray[np.int16]], int]:
    """Expert ids [tokens, layers, k] of the decoded tokens of each text, and the experts of a layer."""
    trace = load_trace(f"synthetic:{parted(model).model}/{texts}x8+{tokens}/none")
    decoded = [trace.topk_ids[(trace.sequence == one) & (trace.phase == DECODE)] for one in np.unique(trace.sequence)]
    return decoded, trace.shape.experts


def _events(steps: Iterable[NDArray[np.int16]], experts: int) -> Iterator[ReplayEvent]:
    """Events of steps, each the expert ids [rows, layers, k] of its rows."""
    for number, ids in enumerate(steps):
        counts = count_experts(ids, experts)
        for layer, row in enumerate(counts):
            yield ReplayEvent(number, layer, "decode", tuple(np.flatnonzero(row).tolist()))


@lru_cache(maxsize=4)
def _popularity(model: str) -> NDArray[np.int64]:
    """Uses [layers, experts] by decode tokens of other texts."""
    trace = load_trace(f"synthetic:{parted(model).model}-calibration/{_PROFILE}")
    return count_experts(trace.topk_ids[trace.phase == DECODE], trace.shape.experts)


def step_ms(row: CacheRow, loads: float, prefetched: float) -> float:
    """Time of a step: its loads, one after the other, and its work, of which as large a share runs next to them as of
    the loads is made ahead."""
    copy_ms = costs_on(_machine(row), load_model(row.model), 1, row.engine).experts[0].copy_ns / _NS_PER_MS
    work_ms = row.compute_ms if row.compute_ms is not None else _resident_ms(row)
    waits = 1 - prefetched / loads if loads else 1.0
    return max(loads * copy_ms + waits * work_ms, work_ms)


def _machine(row: CacheRow) -> Hardware:
    return load_hardware(row.machine, _overrides(row))


def _overrides(row: CacheRow) -> dict[str, float]:
    return {} if row.link_gb_s is None else {"link.h2d_bytes_per_s": row.link_gb_s * 1e9}


def _resident_ms(row: CacheRow) -> float:
    """A step with all experts on the GPU."""
    whole = replace(row, slots=load_model(row.model).experts, policy="layer-wise")
    return _tpot_ms(simulate(_scenario(whole)))


def _tpot_ms(run: Run) -> float:
    assert run.metrics.tpot_ms is not None, "a row has decode steps"
    return run.metrics.tpot_ms


# --- policies that are simulated --------------------------------------------------------------------------------------


def _simulated(row: CacheRow) -> Played:
    run = simulate(_scenario(row))
    hit_rate = run.metrics.decode_resident_hit_rate
    assert hit_rate is not None, "a row has decode steps"
    loads = run.spans[run.spans.kind.isin(("demand", "prefetch", "swap")) & (run.spans.phase == "decode")]
    return Played(hit_rate, len(loads) / row.steps, 0.0, _tpot_ms(run))


def _scenario(row: CacheRow) -> Scenario:
    policy, parameters = policy_in(row.policy, LogError)
    shape = load_model(row.model)
    return Scenario(
        trace=f"synthetic:{parted(row.model).model}/{max(row.batch, 1)}x{row.prompt_tokens}+{row.steps}",
        model=row.model, hardware=row.machine, hardware_overrides=_overrides(row) | {"gpu.memory_bytes": _ROOM_BYTES},
        engine=row.engine, policy=policy, parameters=parameters, batch=row.batch,
        cached_share=min((row.slots or 0) / shape.experts, 1.0),
    )
