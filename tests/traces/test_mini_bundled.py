"""The bundled traces, their training record and the checkpoint: complete, small enough, and of one making."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from traces.capture.prompts import KEPT
from traces.capture.vectors import popular_half, read_vectors
from traces.file import read_trace
from traces.trace import Trace

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
