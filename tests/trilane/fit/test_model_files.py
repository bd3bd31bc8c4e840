"""Whole answers for models that are given as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.traces.models.gguf_files import Q4_K, Q6_K, grouped, mixture, model, write_gguf
from trilane.engines.question import Question
from trilane.fit.fit import fit

SMALL = {
    "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 24,
    "num_experts_per_tok": 3, "moe_intermediate_size": 256, "vocab_size": 1000,
}


@pytest.mark.parametrize("given", ["", "config.json", "config.json@q8_0:2"])
def test_a_configuration_is_answered_for_as_the_catalogue_is(given: str, tmp_path: Path) -> None:
    """A folder, a file, and a file with weights and a cut; the q4_k_m of the first two is what most people run."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    question = Question(
        f"{tmp_path}/{given}".rstrip("/"),
        gpu="rtx-3060",
        ram="ddr4-3200",
        prompt_tokens=64,
        policies=("fiddler", "on-demand"),
    )
    found = fit(question)
    assert found.model == f"{tmp_path}/{given if '@' in given else 'config.json@q4_k_m'}"
    assert found.policies is not None
    assert found.policies.memory.experts == (2 if ":2" in given else 4) * 24
    assert found.policies.best.tpot_ms > 0
    assert f"synthetic, like {tmp_path}/config.json" in found.policies.routing
    assert found.engine is not None
    assert f" -m {tmp_path.name}-" in found.engine.command


def test_a_gguf_file_is_answered_for_with_its_own_weights(tmp_path: Path) -> None:
    """Layers of unequal size, as llama.cpp's mixtures have them."""
    keys = {"expert_count": 24, "expert_used_count": 3, "embedding_length": 512, "attention.head_count": 8}
    layers = [grouped(512, 8, 2, 64) + mixture(512, 256, 24)] * 4
    metadata, tensors = model("qwen3moe", keys, 1000, layers, experts=Q4_K)
    mixed = [(name, shape, Q6_K if name == "blk.1.ffn_down_exps.weight" else kind) for name, shape, kind in tensors]
    file = write_gguf(tmp_path / "mine.gguf", metadata, mixed)
    policies = ("on-demand", "fiddler")
    found = fit(Question(str(file), gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=64, policies=policies))
    assert found.model == str(file)
    assert found.policies is not None
    assert found.policies.memory.routed_bytes == 24 * 512 * 256 * (11 * 144 + 210) // 256
    assert found.policies.best.tpot_ms > 0
    assert found.engine is not None
    assert f" -m {file} " in found.engine.command
