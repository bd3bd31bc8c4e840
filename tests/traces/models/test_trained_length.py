"""How many tokens a model was trained for."""

from __future__ import annotations

import json
from pathlib import Path

from tests.traces.models.gguf_files import Q4_K, grouped, mixture, model, write_gguf
from traces.models.catalogue import model_names, original, trained_lengths, trained_tokens

UNKNOWN = {"mini-deepseek", "mini-moe", "qwen3.8-flash-next"}


def test_it_is_known_of_the_catalogue() -> None:
    unknown = {name for name in model_names() if trained_tokens(name) is None}
    assert {original(name) for name in unknown} == UNKNOWN
    assert set(trained_lengths()) <= set(model_names())


def test_weights_and_layers_do_not_matter_and_an_alias_may_have_another() -> None:
    assert trained_tokens("qwen3-30b-a3b@q4_k_m:8") == 40_960
    assert trained_tokens("qwen3-30b-a3b-instruct-2507") == 262_144
    assert trained_tokens("deepseek-r1") == trained_tokens("deepseek-v3") == 163_840


def test_a_file_says_it_itself(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"text_config": {"max_position_embeddings": 65_536}}))
    assert trained_tokens(str(tmp_path)) == trained_tokens(f"{config}@q8_0") == 65_536
    config.write_text("{}")
    assert trained_tokens(str(config)) is None
    layers = [grouped(512, 8, 2, 64) + mixture(512, 256, 24)]
    metadata, tensors = model(
        "qwen3moe", {"context_length": 40_960, "embedding_length": 512}, 1000, layers, experts=Q4_K
    )
    assert trained_tokens(str(write_gguf(tmp_path / "mine.gguf", metadata, tensors))) == 40_960
