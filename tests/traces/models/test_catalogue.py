"""The catalogue of model shapes: the numbers add up to the published totals."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

import traces.models.catalogue
from tests.traces.models.gguf_files import Q4_K, grouped, mixture, model, write_gguf
from traces.file import bundled_trace
from traces.models.catalogue import (
    aliases,
    load_model,
    model_names,
    original,
    recognise,
    trained_lengths,
    trained_tokens,
)
from traces.models.shape import ModelShape, ShapeError
from traces.synthesis.named import nearest_routing
from trilane.common.yaml_files import read_yaml

MODELS = Path(traces.models.catalogue.__file__).with_name("models.yaml")
MINI_MODELS = ("mini-deepseek", "mini-moe")
PUBLISHED = [name for name in model_names() if name not in {*MINI_MODELS, *aliases()}]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_add_up_to_the_published_total(name: str) -> None:
    assert load_model(name).params == pytest.approx(float(read_yaml(MODELS)[name]["published_params"]), rel=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_number_has_a_source(name: str) -> None:
    shape = load_model(name)
    defaults = {f.name: f.default for f in fields(ModelShape)}
    given = {n for n, default in defaults.items() if n not in ("name", "sources") and getattr(shape, n) != default}
    assert given <= set(shape.sources)
    assert all(shape.sources.values())


# Latent attention, Gemma's two kinds of layers, gated queries and DeepSeek-V4 have formulas of their own, in
# models.yaml; test_hf_config.py compares those that are made from a configuration.
GATED = {"qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b"}
LATENT = {"deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "glm-4.7-flash", "kimi-k2"}
OF_THEIR_OWN = {*LATENT, "gemma-4-26b-a4b", "deepseek-v4-flash", *GATED}
CONFIGURED = {name for name, entry in read_yaml(MODELS).items() if "config" in entry}


@pytest.mark.parametrize("name", sorted({*PUBLISHED} - OF_THEIR_OWN - CONFIGURED))
def test_widths_of_attention_fit_its_weights(name: str) -> None:
    shape = load_model(name)
    assert shape.kv_width == 2 * shape.kv_heads * shape.head_dim
    assert shape.attention_params == 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim


@pytest.mark.parametrize(("name", "megabytes"), [
    ("mixtral-8x7b", 3 * 4096 * 14336 * 2 / 1e6),
    ("qwen2-57b-a14b", 3 * 3584 * 2560 * 2 / 1e6),
    ("gpt-oss-20b", 3 * 2880 * 2880 * 4.25 / 8 / 1e6),
])
def test_an_expert_has_the_bytes_of_its_three_matrices(name: str, megabytes: float) -> None:
    assert load_model(name).expert_bytes_by_layer[0] / 1e6 == pytest.approx(megabytes)


def test_the_layers_of_deepseek_v2_lite() -> None:
    shape = load_model("deepseek-v2-lite")
    assert (shape.layers, shape.moe_layers, shape.experts, shape.top_k) == (27, 26, 64, 6)
    assert shape.cache_bytes(10) == 10 * 27 * 576 * 2


def test_an_unknown_name_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ShapeError, match=r"no model 'Mixtral-8x7'; did you mean 'mixtral-8x7b'\? Choose from .*, "):
        load_model("Mixtral-8x7")
    with pytest.raises(
        ShapeError, match=r"path of its config\.json or GGUF file, or write an entry in .*/models\.yaml"
    ):
        load_model("Mixtral-8x7")


def test_capitals_do_not_matter() -> None:
    assert load_model("Qwen3-30B-A3B@q4_k_m:8") is load_model("qwen3-30b-a3b@q4_k_m:8")
    assert load_model("DeepSeek-R1-0528").name == "deepseek-r1-0528"


@pytest.mark.parametrize("name", aliases())
def test_an_alias_has_the_shape_of_its_model_under_its_own_name(name: str) -> None:
    assert name in model_names()
    assert load_model(f"{name}@q4_k_m:2").name == f"{name}@q4_k_m:2"
    assert replace(load_model(name), name="") == replace(load_model(aliases()[name].model), name="")
    assert nearest_routing(load_model(name)).experts == load_model(name).experts


def test_a_model_is_recognised_by_architecture_and_counts() -> None:
    assert recognise("qwen3moe", 48, 128) == load_model("qwen3-30b-a3b")
    assert recognise("qwen3moe", 94, 128) == load_model("qwen3-235b-a22b")
    assert recognise("qwen3moe", 12, 128) is None


@pytest.mark.parametrize("name", MINI_MODELS)
def test_a_mini_model_has_the_shape_of_its_bundled_trace(name: str) -> None:
    if not bundled_trace(name):
        pytest.skip(f"no trace of {name} is bundled in this checkout")
    assert name in model_names()
    assert load_model(name).name == name


def test_a_shape_survives_its_dict() -> None:
    for name in PUBLISHED:
        assert ModelShape.from_dict(load_model(name).to_dict()) == load_model(name)


def test_a_model_may_be_cut_after_some_of_its_layers() -> None:
    whole, cut = load_model("phi-3.5-moe"), load_model("phi-3.5-moe:8")
    assert (cut.name, cut.moe_layers, cut.experts) == ("phi-3.5-moe:8", 8, whole.experts)
    assert cut.routed_bytes == whole.routed_bytes // 4
    for wrong in ("phi-3.5-moe:0", "phi-3.5-moe:33", "phi-3.5-moe:x", "phi-3.5-moe:"):
        with pytest.raises(ShapeError, match="expected 1 to 32 layers after the colon"):
            load_model(wrong)


def test_no_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShapeError, match="there is no model ''"):
        load_model("")


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
