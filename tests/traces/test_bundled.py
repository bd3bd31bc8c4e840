"""The bundled traces, calibration traces and vectors: of the mini models, and of gpt-oss-20b."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.runs.calibration import check_other_prompts
from sim.runs.scenario import Scenario
from tests.kit.depth import thinned
from traces.capture.prompts import KEPT
from traces.capture.vectors import popular_half, read_vectors
from traces.file import read_trace
from traces.library import calibration_of, load_trace
from traces.models.catalogue import load_model
from traces.statistics import token_overlap
from traces.trace import Trace
from trilane.study.cache_curve import CacheCurve

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"
KINDS = ("gate@1", "gate@2", "gate@3", "residual@1", "quasi_hidden@1", "partial@1", "estimator@1")
MODELS = {"mini-deepseek": (26, 64, 6), "mini-moe": (8, 16, 2)}
DOMAINS = ["code", "dialogue", "literature", "math", "wiki"]


def evaluated(model: str) -> Trace:
    return read_trace(BUNDLED / f"{model}.safetensors")


@pytest.mark.parametrize("model", MODELS)
def test_the_evaluated_trace_has_four_sequences_of_each_domain(model: str) -> None:
    trace = evaluated(model)
    assert (trace.shape.moe_layers, trace.shape.experts, trace.shape.top_k) == MODELS[model]
    assert trace.provenance["domains"] == [domain for domain in DOMAINS for _ in range(4)]
    lengths = [np.bincount(trace.phase[trace.sequence == s]).tolist() for s in range(20)]
    assert lengths == [[64, 64]] * 20
    names = {name for name in trace.tensors() if name.startswith("forecast/")}
    assert names == {f"forecast/{kind}/ids" for kind in KINDS} | {"forecast/partial@1/scores"}


@pytest.mark.parametrize("model", MODELS)
def test_the_calibration_trace_has_other_prompts_and_what_speculation_is_calibrated_on(model: str) -> None:
    trace = read_trace(BUNDLED / f"{model}-calibration.safetensors")
    assert trace.provenance["domains"] == [domain for domain in DOMAINS for _ in range(2)]
    assert trace.shape == evaluated(model).shape
    plain = {"sequence", "position", "phase", "topk_ids", "topk_weights"}
    assert set(trace.tensors()) == plain | {f"forecast/{kind}/ids" for kind in ("quasi_hidden@1", "estimator@1")}
    assert trace.provenance["revision"] == evaluated(model).provenance["revision"]
    assert trace.provenance["prompts"] != evaluated(model).provenance["prompts"]


@pytest.mark.parametrize("model", MODELS)
def test_the_vectors_are_of_the_captured_model_and_of_training_text(model: str) -> None:
    vectors, trace = read_vectors(BUNDLED / f"{model}-vectors.safetensors"), evaluated(model)
    layers, experts, top_k = MODELS[model]
    assert vectors.default is not None
    assert vectors.default.shape == (layers, experts, trace.shape.hidden)
    assert (vectors.tokens.sum(1) == top_k * vectors.provenance["tokens"]).all()
    assert (vectors.resident == popular_half(vectors.tokens)).all()
    assert vectors.estimator["position"].shape[0] == layers - 1
    assert (vectors.provenance["model"], vectors.provenance["revision"]) == (model, trace.provenance["revision"])
    assert vectors.provenance["prompts"] in trace.provenance["calibration"]
    assert "first 80% of training text" in vectors.provenance["prompts"]
    assert vectors.read is not None
    assert len(vectors.read.hashes) == KEPT


@pytest.mark.parametrize("model", MODELS)
def test_forecasts_are_far_better_than_chance(model: str) -> None:
    trace = evaluated(model)
    top_k, chance = trace.shape.top_k, trace.shape.top_k / trace.shape.experts
    for name in KINDS:
        assert recall(trace, name, top_k) > 3 * chance, name


@pytest.mark.parametrize("model", MODELS)
def test_forecasts_that_know_more_find_more(model: str) -> None:
    trace = evaluated(model)
    found = [recall(trace, name, trace.shape.top_k) for name in ("gate@1", "quasi_hidden@1", "partial@1")]
    assert found == sorted(found)


def recall(trace: Trace, name: str, top_k: int) -> float:
    ahead = int(name[-1])
    guessed = trace.tensors()[f"forecast/{name}/ids"][:, :-ahead, :top_k]
    return float((guessed[..., None] == trace.topk_ids[:, ahead:][..., None, :]).any(-1).mean())


@pytest.mark.parametrize("model", MODELS)
def test_the_model_learnt_and_uses_all_of_its_experts(model: str) -> None:
    record = json.loads((BUNDLED / "training" / f"{model}.json").read_text())
    assert record["settings"]["model"] == model
    for domain in DOMAINS:
        loss = record["held_out"]["loss"][domain]
        assert loss["nats_per_token"] < 0.75 * loss["unigram_nats_per_token"], domain
    assert max(record["held_out"]["balance"]["dead_fraction"]) == 0
    last = json.loads((BUNDLED / "training" / f"{model}.jsonl").read_text().splitlines()[-1])
    assert last["held_out"] == record["held_out"]


def test_the_bundle_is_small() -> None:
    traces = sum(path.stat().st_size for path in BUNDLED.glob("*.safetensors"))
    checkpoint = sum(path.stat().st_size for path in (BUNDLED / "mini-moe").iterdir())
    assert traces < 38e6
    assert checkpoint < 12e6


def test_the_checkpoint_is_the_one_that_was_captured() -> None:
    weights = (BUNDLED / "mini-moe" / "model.safetensors").read_bytes()
    assert evaluated("mini-moe").provenance["revision"] == f"sha256:{hashlib.sha256(weights).hexdigest()[:16]}"


NAMES = ("gpt-oss-20b", "gpt-oss-20b-calibration")
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
