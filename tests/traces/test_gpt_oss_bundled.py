"""The bundled traces of gpt-oss-20b: complete, small, of different texts, and as routing of that model was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.runs.calibration import check_other_prompts
from sim.runs.scenario import Scenario
from tests.kit.depth import thinned
from traces.library import calibration_of, load_trace
from traces.models.catalogue import load_model
from traces.statistics import token_overlap
from traces.trace import Trace
from trilane.study.cache_curve import CacheCurve

NAMES = ("gpt-oss-20b", "gpt-oss-20b-calibration")
BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"
MEASURED_LRU = {
    4: 0.432,
    8: 0.637,
    16: 0.864,
    24: 0.952,
}  # by experts cached a layer, of 80 sequences


def first_sequences(trace: Trace, count: int) -> Trace:
    rows = trace.sequence < count
    return Trace.from_tensors(trace.shape, {name: array[rows] for name, array in trace.tensors().items()}, {})


@pytest.mark.parametrize("name", NAMES)
def test_it_has_forty_sequences_and_says_what_was_not_recorded(name: str) -> None:
    trace = load_trace(name)
    known = replace(load_model("gpt-oss-20b"), expert_biases=None, sources=trace.shape.sources)  # not in the file
    assert trace.shape == known
    assert [np.bincount(trace.phase[trace.sequence == s]).tolist() for s in range(40)] == [[64, 192]] * 40
    np.testing.assert_allclose(trace.topk_weights.astype(np.float32).sum(axis=2), 1, atol=0.01)
    assert (trace.scores, dict(trace.forecasts)) == (None, {})
    header = trace.provenance
    assert header["text"] == "generated"
    assert "the first 64 generated tokens" in header["synthetic_prompts"]
    assert header["licence"].startswith("Apache-2.0; changed")
    assert len(set(header["domains"][:20])) >= 7


def test_both_are_small_and_of_different_texts() -> None:
    assert sum((BUNDLED / f"{name}.safetensors").stat().st_size for name in NAMES) < 10e6
    assert calibration_of(NAMES[0]) == NAMES[1]
    check_other_prompts(Scenario(trace=NAMES[0], model=None), load_trace(NAMES[0]))


# --- statistics, as measured on more sequences of the same data -------------------------------------------------------


def test_adjacent_tokens_share_as_many_experts_as_measured() -> None:
    assert token_overlap(load_trace(NAMES[0])).mean().item() == pytest.approx(0.44, abs=0.02)


def test_use_within_a_sequence_is_as_skewed_as_measured() -> None:
    """Gini over the first 128 tokens."""
    ids = load_trace(NAMES[0]).topk_ids.reshape(40, 256, 24, 4)[:, :128]
    uses = np.sort([[np.bincount(ids[s, :, layer].ravel(), minlength=32) for layer in range(24)] for s in range(40)])
    ranks = 2 * np.arange(1, 33) - 33
    assert (uses @ ranks / 32 / (128 * 4)).mean() == pytest.approx(0.59, abs=0.02)


@pytest.mark.parametrize("slots", MEASURED_LRU)
def test_lru_hits_as_often_as_measured(slots: int) -> None:
    """Every third layer by itself, empty at first."""
    ids = load_trace(NAMES[0]).topk_ids.reshape(40, 256, 24, 4)[:12, :, ::3]
    rates = [
        replayed([(layer, tuple(token)) for token in ids[sequence, :, layer].tolist()], slots, least_recent).rate
        for sequence in range(12)
        for layer in range(8)
    ]
    assert np.mean(rates) == pytest.approx(MEASURED_LRU[slots], abs=0.03)


# --- hit rates over capacity, replayed here ---------------------------------------------------------------------------

Key = tuple[int, int]  # layer, expert
Event = tuple[int, tuple[int, ...]]  # layer, experts
Rank = Callable[[list[Event]], Callable[[int, Key, bool], tuple[int, ...]]]  # the least is evicted


class Hits:
    hits = lookups = 0

    @property
    def rate(self) -> float:
        return self.hits / self.lookups


def replayed(events: list[Event], slots: int, rank: Rank) -> Hits:
    """Lookups of an event are one: what it uses is not evicted, and admitted in descending order of rank."""
    cache: dict[Key, tuple[int, ...]] = {}
    rank_of, found = rank(events), Hits()
    for place, (layer, experts) in enumerate(events):
        keys = [(layer, expert) for expert in sorted(experts)]
        missing = [key for key in keys if key not in cache]
        found.lookups += len(keys)
        found.hits += len(keys) - len(missing)
        cache |= {key: rank_of(place, key, False) for key in keys if key in cache}
        for key in sorted(missing, key=lambda key: rank_of(place, key, True), reverse=rank is farthest_use):
            if len(cache) == slots:
                evictable = [other for other in cache if other not in keys]
                if not evictable:
                    continue
                del cache[min(evictable, key=cache.__getitem__)]
            cache[key] = rank_of(place, key, True)
    return found


def least_recent(events: list[Event]) -> Callable[[int, Key, bool], tuple[int, ...]]:
    return lambda place, key, missed: (place, missed, key[1])


def farthest_use(events: list[Event]) -> Callable[[int, Key, bool], tuple[int, ...]]:
    after: dict[tuple[int, Key], int] = {}
    coming: dict[Key, int] = {}
    for place in reversed(range(len(events))):
        for key in ((events[place][0], expert) for expert in events[place][1]):
            after[place, key] = coming.get(key, len(events))
            coming[key] = place
    return lambda place, key, missed: (-after[place, key],)


def events_of(trace: Trace) -> Iterator[Event]:
    """The prompt of a sequence is one step, and then every token."""
    for sequence in range(int(trace.sequence.max()) + 1):
        ids = trace.topk_ids[trace.sequence == sequence]
        for step in (ids[:64], *ids[64:, None]):
            yield from ((layer, tuple(set(step[:, layer].ravel().tolist()))) for layer in range(24))


POLICIES: Mapping[str, Rank] = {"lru": least_recent, "belady": farthest_use}


@thinned(5)
@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_hit_rates_over_capacity_are_those_of_a_replay_written_here(policy: str, share: float) -> None:
    trace = first_sequences(load_trace(NAMES[0]), 2)
    found = replayed(list(events_of(trace)), round(share * 24 * 32), POLICIES[policy])
    point = CacheCurve(trace).point(policy, round(share * trace.shape.routed_bytes))
    assert (point.lookups, point.hit_rate) == (found.lookups, found.rate)
