"""The bundled traces, their training record and the checkpoint: complete, small enough, and of one making."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from traces.trace import Trace
from traces.trace_file import read_trace

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"
MODELS = {"mini-deepseek": (26, 64, 6), "mini-moe": (8, 16, 2)}
DOMAINS = ["code", "dialogue", "literature", "math", "wiki"]


def evaluated(model: str) -> Trace:
    return read_trace(BUNDLED / f"{model}.safetensors")


@pytest.mark.parametrize("model", MODELS)
def test_the_evaluated_trace_has_five_sequences_of_each_domain(model: str) -> None:
    trace = evaluated(model)
    assert (trace.shape.moe_layers, trace.shape.experts, trace.shape.top_k) == MODELS[model]
    assert trace.provenance["domains"] == [domain for domain in DOMAINS for _ in range(5)]
    lengths = [np.bincount(trace.phase[trace.sequence == s]).tolist() for s in range(25)]
    assert lengths == [[64, 64]] * 25
    names = {name for name in trace.tensors() if name.startswith("forecast/")}
    assert names == {f"forecast/{kind}/ids" for kind in ("gate@1", "gate@2", "gate@3", "residual@1")} | {
        f"forecast/{kind}/scores" for kind in ("gate@1", "residual@1")
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_calibration_trace_has_other_prompts_and_ids_and_weights_alone(model: str) -> None:
    trace = read_trace(BUNDLED / f"{model}-calibration.safetensors")
    assert trace.provenance["domains"] == [domain for domain in DOMAINS for _ in range(2)]
    assert trace.shape == evaluated(model).shape
    assert set(trace.tensors()) == {"sequence", "position", "phase", "topk_ids", "topk_weights"}
    assert trace.provenance["revision"] == evaluated(model).provenance["revision"]
    assert trace.provenance["prompts"] != evaluated(model).provenance["prompts"]
    assert trace.provenance["prompts"] in evaluated(model).provenance["calibration"]


@pytest.mark.parametrize("model", MODELS)
def test_forecasts_are_far_better_than_chance(model: str) -> None:
    trace = evaluated(model)
    top_k, chance = trace.shape.top_k, trace.shape.top_k / trace.shape.experts
    for name, ahead in (("gate@1", 1), ("gate@3", 3), ("residual@1", 1)):
        guessed = trace.tensors()[f"forecast/{name}/ids"][:, :-ahead, :top_k]
        found = (guessed[..., None] == trace.topk_ids[:, ahead:][..., None, :]).any(-1)
        assert found.mean() > 3 * chance, name


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
    assert traces < 30e6
    assert checkpoint < 12e6


def test_the_checkpoint_is_the_one_that_was_captured() -> None:
    weights = (BUNDLED / "mini-moe" / "model.safetensors").read_bytes()
    assert evaluated("mini-moe").provenance["revision"] == f"sha256:{hashlib.sha256(weights).hexdigest()[:16]}"
