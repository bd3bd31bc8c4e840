"""The catalogue of model shapes: the numbers add up to the published totals."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

import traces.models.catalogue
from tests.traces.models.gguf_files import Q4_K, grouped, mixture, model, write_gguf
from traces.file import bundled_trace
from traces.models.attention import Attention
from traces.models.catalogue import (
    aliases,
    load_model,
    model_names,
    original,
    recognise,
    trained_lengths,
    trained_tokens,
)
from traces.models.quantisation import quantisation_names, quantisation_source, quantisations_of, quantised
from traces.models.shape import ModelShape, PartBits, ShapeError
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


def test_an_unknown_name_is_refused_with_the_nearest_and_the_command_that_lists_all() -> None:
    with pytest.raises(
        ShapeError,
        match=r"no model 'Mixtral-8x7'; did you mean 'mixtral-8x7b' or 'mixtral-8x7b-instruct'\? `trilane models` "
        r"lists them all; any other: give the path of its config\.json or GGUF file",
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
    for wrong in ("phi-3.5-moe:0", "phi-3.5-moe:33", "phi-3.5-moe:"):
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


# --- Weight formats ---------------------------------------------------------------------------------------------------


SMALL = ModelShape(
    "small", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=512, expert_width=256, attention_params=1000,
    kv_width=64, vocab=100,
)


def gigabytes(model: str) -> float:
    """Weights of a model, 10^9 bytes."""
    shape = load_model(model)
    return (shape.routed_bytes + shape.non_expert_bytes) / 1e9


@pytest.mark.parametrize(("model", "published"), [
    ("qwen3-30b-a3b@q4_k_m", 18.557),  # Qwen/Qwen3-30B-A3B-GGUF: 18 556 685 824 bytes
    ("qwen3-30b-a3b@bf16", 61.10),  # from here to q5_k_m: bartowski/Qwen_Qwen3-30B-A3B-GGUF, model card
    ("qwen3-30b-a3b@q8_0", 32.48),
    ("qwen3-30b-a3b@q6_k", 25.10),
    ("qwen3-30b-a3b@q5_k_m", 21.74),
    ("qwen3-30b-a3b@iq4_xs", 16.6),  # steampunque/Qwen3-30B-A3B-Hybrid-GGUF, model card
    ("qwen3-30b-a3b@q3_k_m", 14.71),  # here, and q4_k_m and q3_k_m to glm-4.5-air: unsloth's and Qwen's file lists
    ("qwen3-235b-a22b@q4_k_m", 142.15),
    ("qwen3-235b-a22b@q3_k_m", 112.45),
    ("glm-4.7-flash@q4_k_m", 18.31),
    ("glm-4.7@q4_k_m", 216.456),  # unsloth/GLM-4.7-GGUF: 216 455 572 576 bytes; a layer of prediction is among them
    ("glm-4.5-air@q4_k_m", 72.98),  # with that layer, too
    ("qwen3.6-35b-a3b@q4_k_m", 21.17),  # lmstudio-community/Qwen3.6-35B-A3B-GGUF: Q4_K, Q6_K and F32
    ("qwen3.6-35b-a3b@q5_k_m", 24.72),  # Qwopus3.6-35B-A3B-v1, llama-bench: 23.02 GiB
    ("qwen3.6-35b-a3b@q8_0", 36.90),  # from here to ud-iq2_m: unsloth/Qwen3.6-35B-A3B-GGUF
    ("qwen3.6-35b-a3b@ud-q8_k_xl", 38.5),
    ("qwen3.6-35b-a3b@ud-q6_k_xl", 31.84),
    ("qwen3.6-35b-a3b@ud-q5_k_xl", 26.59),
    ("qwen3.6-35b-a3b@ud-q4_k_xl", 22.36),
    ("qwen3.6-35b-a3b@ud-q4_k_m", 22.1345),  # 22 134 528 992 bytes
    ("qwen3.6-35b-a3b@ud-q3_k_xl", 16.8),
    ("qwen3.6-35b-a3b@ud-iq3_xxs", 13.2112),  # 13 211 155 424 bytes
    ("qwen3.6-35b-a3b@ud-q2_k_xl", 12.3),
    ("qwen3.6-35b-a3b@ud-iq2_m", 11.5),
    ("qwen3.6-35b-a3b@ud-iq4_xs", 17.785),  # unsloth/Qwen-AgentWorld-35B-A3B-GGUF: 17 785 036 032 bytes
    ("qwen3.5-122b-a10b@ud-q4_k_xl", 77.02),  # llama-bench: 71.73 GiB
    ("gemma-4-26b-a4b@ud-q4_k_xl", 17.011),  # unsloth/gemma-4-26B-A4B-it-GGUF: 17 010 980 576 bytes; to ud-iq2_m
    ("gemma-4-26b-a4b@ud-q6_k_xl", 23.8),
    ("gemma-4-26b-a4b@ud-q5_k_xl", 21.3),
    ("gemma-4-26b-a4b@ud-q3_k_xl", 12.9),
    ("gemma-4-26b-a4b@ud-q2_k_xl", 10.5),
    ("gemma-4-26b-a4b@ud-iq2_m", 9.97),
    ("qwen3-30b-a3b@ud-q4_k_xl-2025", 17.7),  # unsloth/Qwen3-30B-A3B-GGUF
    ("qwen3-30b-a3b@ud-q3_k_xl-2025", 13.8),
    ("glm-4.7-flash@ud-q4_k_xl-2025", 17.51),  # unsloth/GLM-4.7-Flash-GGUF, llama-bench: 16.31 GiB
    ("glm-4.7@ud-q4_k_xl-2025", 205),  # unsloth/GLM-4.7-GGUF
    ("glm-4.7@ud-q3_k_xl-2025", 159),
    ("qwen3-next-80b-a3b@q4_k_m", 48.41),  # Qwen/Qwen3-Next-80B-A3B-Thinking-GGUF: 45.09 GiB; Q8_0: 78.99 GiB
    ("qwen3-next-80b-a3b@q8_0", 84.81),
    ("gpt-oss-20b@mxfp4", 12.110),  # lmstudio-community/gpt-oss-20b-GGUF: 12 109 566 624 bytes
    ("gpt-oss-120b", 65.28),  # OpenAI's model card, arXiv 2508.10925: 60.8 GiB
    ("deepseek-v2-lite@q4_k_m", 10.36),  # DeepSeek-V2-Lite-Chat-Q4_K_M.gguf: 9.65 GiB; its experts' rows are odd
])
def test_sizes_of_published_files(model: str, published: float) -> None:
    assert gigabytes(model) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(("weights", "experts", "whole"), [  # whole: without the table of n-grams, 28.8 GB in IQ4_NL
    ("ud-q4_k_xl", 76.99, 82.5), ("ud-iq4_xs", 59.49, None), ("ud-q3_k_xl", None, 61.2), ("ud-iq3_xxs", 48.64, None),
])
def test_sizes_of_qwen3_8_flash_next(weights: str, experts: float | None, whole: float | None) -> None:
    """Experts: GiB in Niko1221/Strata docs/MODELS.md and logs; files of unsloth: 111.33 GB, 89.99 GB."""
    shape = load_model(f"qwen3.8-flash-next@{weights}")
    assert experts is None or shape.routed_bytes / 1e9 == pytest.approx(experts, rel=0.015)
    assert whole is None or gigabytes(shape.name) == pytest.approx(whole, rel=0.02)


def test_mixtral_in_todays_mixture_and_in_that_of_its_time() -> None:
    """The files of December 2023, 26.4 GB, had their down matrices in Q4_K, as Q4_K_S has but for the first eighth."""
    assert gigabytes("mixtral-8x7b@q4_k_m") == pytest.approx(28.4, rel=0.03)
    assert gigabytes("mixtral-8x7b@q4_k_s") == pytest.approx(26.4, rel=0.03)


def test_bits_of_experts_by_hand() -> None:
    """Q4_K has 144 bytes for 256 weights, Q6_K 210; of three matrices one is half in Q6_K."""
    q4, q6 = 144 * 8 / 256, 210 * 8 / 256
    assert quantised(SMALL, "q4_k_m").weight_bits == pytest.approx((2 * q4 + (q4 + q6) / 2) / 3)
    assert quantised(SMALL, "q8_0").weight_bits == 8.5
    assert quantised(SMALL, "mxfp4").weight_bits == 4.25
    assert quantised(SMALL, "awq").weight_bits == pytest.approx(4 + 20 / 128)


def test_bits_of_the_rest_are_weighted_by_what_it_consists_of() -> None:
    """Q4_0: 2 x 1000 of attention, 51200 of the embedding; Q6_K: 51200 of the head; 32 bits: 2 x 512 x 4 of routers."""
    made = quantised(SMALL, "q4_0")
    bits = 4.5 * (2000 + 51200) + 6.5625 * 51200 + 32 * 4096
    assert made.dense_bits == pytest.approx(bits / (6096 + 2 * 51200))


def test_a_tied_embedding_is_kept_as_the_head_is() -> None:
    made = quantised(replace(SMALL, tied_embeddings=True), "q4_0")
    assert made.dense_bits == pytest.approx((4.5 * 2000 + 32 * 4096 + 6.5625 * 51200) / (6096 + 51200))
    assert (made.bits.embedding, made.embedding_bytes) == (6.5625, 51200 * 6.5625 / 8)


HYBRID = ModelShape(  # 2 ** 19 weights of attention in the first layer, which is dense, 2 ** 18 in each of the others
    "hybrid", moe_layers=3, dense_layers=1, experts=4, top_k=2, hidden=512, expert_width=256, shared_experts=1,
    shared_width=256, dense_width=512, kv_width=64, attention_params=2**19, vocab=100,
    attention=(Attention("full", 2**19, kv_width=64), Attention("state", 2**18, state_bytes=64)),
    attention_layers=(0, 1, 1, 1),
)
Q4, Q5, Q6, Q8 = 4.5, 5.5, 6.5625, 8.5


@pytest.mark.parametrize(("weights", "bits", "expert_bits"), [
    ("q4_k_m", PartBits(
        attention=(11 * Q4 + Q6) / 12, state=(3 * Q4 + Q6) / 4, router=32, shared=(2 * Q4 + (Q4 + Q6) / 2) / 3,
        dense=(2 * Q4 + (Q4 + Q6) / 2) / 3, embedding=Q4, head=Q6,
    ), (2 * Q4 + (Q4 + Q6) / 2) / 3),
    ("ud-q4_k_m", PartBits(attention=Q8, state=Q8, router=32, shared=Q8, dense=Q8, embedding=Q8, head=Q6),
     (2 * Q4 + (37 * Q5 + 3 * Q6) / 40) / 3),
])
def test_bytes_by_part_by_hand(weights: str, bits: PartBits, expert_bits: float) -> None:
    """A plain format gives the rest the experts' bits, a dynamic one Q8_0; a token reads all but the embedding."""
    made = quantised(HYBRID, weights)
    assert asdict(made.bits) == pytest.approx(asdict(bits))
    assert made.weight_bits == pytest.approx(expert_bits)
    params = {
        "attention": 2**19, "state": 3 * 2**18, "router": 3 * 512 * 4, "shared": 3 * 3 * 512 * 256,
        "dense": 3 * 512 * 512, "head": 512 * 100,
    }
    read = sum(count * getattr(bits, part) / 8 for part, count in params.items())
    assert made.product_params == sum(params.values())
    assert made.product_bytes == pytest.approx(read, abs=1)
    assert made.non_expert_bytes == pytest.approx(read + 512 * 100 * bits.embedding / 8, abs=1)


def test_bits_of_other_attention_are_the_attention_s_where_a_format_does_not_say() -> None:
    made = quantised(HYBRID, "q8_0")
    assert (made.bits.of_attention(HYBRID.attention_counts[0][0]), made.bits.state) == (8.5, 8.5)


def test_rows_that_blocks_do_not_divide_fall_back_to_smaller_blocks() -> None:
    """Rows of 96 take Q5_0 for Q4_K and Q8_0 for Q6_K, as llama.cpp does; rows of 100 stay in 16 bits."""
    odd = quantised(replace(SMALL, expert_width=96), "q4_k_m")
    assert odd.weight_bits == pytest.approx((2 * 4.5 + (5.5 + 8.5) / 2) / 3)
    assert quantised(replace(SMALL, expert_width=100), "q4_k_s").weight_bits == pytest.approx((2 * 4.5 + 16) / 3)


@pytest.mark.parametrize("name", quantisation_names())
def test_the_cache_stays_in_16_bits_and_every_number_has_a_source(name: str) -> None:
    shape = load_model("qwen3-30b-a3b")
    made = quantised(shape, name)
    assert made.cache_bytes(9) == shape.cache_bytes(9)
    assert max(made.weight_bits, *(bits for part, bits in asdict(made.bits).items() if part != "router")) <= 16
    assert quantisation_source(name) in made.sources["weight_bits"]
    assert made.params == shape.params


def test_a_shape_that_says_nothing_of_its_cache_has_it_as_wide_as_its_weights() -> None:
    assert replace(SMALL, dense_bits=32.0).cache_bytes(9) == 2 * SMALL.cache_bytes(9)
    assert replace(SMALL, dense_bits=32.0, kv_bits=8.0).cache_bytes(9) == SMALL.cache_bytes(9) / 2


def test_a_format_after_the_cut_is_refused_with_the_name_to_write() -> None:
    with pytest.raises(ShapeError, match=r"weights come before layers, as in phi-3\.5-moe@q4_k_m:8$"):
        load_model("phi-3.5-moe:8@q4_k_m")


def test_names_carry_the_format_and_the_cut() -> None:
    assert load_model("qwen3-30b-a3b@q4_k_m").name == "qwen3-30b-a3b@q4_k_m"
    cut = load_model("qwen3-30b-a3b@Q4_K_M:8")
    assert (cut.name, cut.moe_layers) == ("qwen3-30b-a3b@q4_k_m:8", 8)
    assert cut.weight_bits == load_model("qwen3-30b-a3b@q4_k_m").weight_bits


def test_16_bits_are_the_model_as_it_is() -> None:
    shape = load_model("deepseek-v2-lite")
    made = quantised(shape, "bf16")
    assert (made.routed_bytes, made.non_expert_bytes) == (shape.routed_bytes, shape.non_expert_bytes)


def test_experts_that_are_published_in_4_bits_are_not_quantised_again() -> None:
    expected = "model 'gpt-oss-20b' has experts of 4.25 bits .* use 'gpt-oss-20b' or gpt-oss-20b@mxfp4"
    with pytest.raises(ShapeError, match=expected):
        load_model("gpt-oss-20b@q4_k_m")
    assert quantisations_of(load_model("gpt-oss-20b")) == ["mxfp4"]


def test_a_format_of_one_model_is_not_offered_for_another() -> None:
    own, other = (quantisations_of(load_model(name)) for name in ("qwen3.8-flash-next", "qwen3-30b-a3b"))
    assert "gsq-q2_0" in own
    assert [name for name in own if not name.startswith("gsq-")] == other


def test_experts_that_are_published_in_4_bits_can_be_written_out_in_16() -> None:
    """36 layers of 128 experts, each of three matrices of 2880 by 2880: 229.3 GB (213 GiB)."""
    shape = load_model("gpt-oss-120b@bf16")
    assert (shape.weight_bits, shape.routed_bytes) == (16, 36 * 128 * 3 * 2880 * 2880 * 2)


@pytest.mark.parametrize(("name", "bits"), [
    ("iq4_nl", 4.5), ("iq4_k", 4.5), ("iq3_k", 3.4375), ("iq3_s", 3.4375), ("iq1_m", 42.875 / 24), ("int4", 4.5),
])
def test_formats_of_other_engines(name: str, bits: float) -> None:
    assert quantised(SMALL, name).weight_bits == pytest.approx(bits)


def test_a_format_is_chosen_once() -> None:
    with pytest.raises(ShapeError, match=r"not quantised again: use 'small@q4_0'$"):
        quantised(quantised(SMALL, "q4_0"), "q4_0")


def test_sizes_read_from_a_file_stay_as_they_are() -> None:
    measured = replace(SMALL, expert_bytes=(100, 200))
    assert quantisations_of(measured) == []
    with pytest.raises(ShapeError, match="'small' has experts of 16 bits a weight as it is"):
        quantised(measured, "q4_0")


@pytest.mark.parametrize("model", model_names())
def test_every_model_can_be_had_in_what_is_listed_for_it(model: str) -> None:
    shape = load_model(model)
    for name in quantisations_of(shape):
        assert quantised(shape, name).routed_bytes <= shape.routed_bytes
