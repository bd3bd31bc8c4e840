"""Weight formats: bits per weight from the layouts of their blocks, and the sizes of files that people download."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traces.models.catalogue import load_model, model_names
from traces.models.quantisation import quantisation_names, quantisation_source, quantisations_of, quantised
from traces.models.shape import ModelShape, ShapeError

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
    ("qwen3-next-80b-a3b@q4_k_m", 48.41),  # Qwen/Qwen3-Next-80B-A3B-Thinking-GGUF: 45.09 GiB; Q8_0: 78.99 GiB
    ("qwen3-next-80b-a3b@q8_0", 84.81),
    ("gpt-oss-20b@mxfp4", 12.110),  # lmstudio-community/gpt-oss-20b-GGUF: 12 109 566 624 bytes
    ("gpt-oss-120b", 65.28),  # OpenAI's model card, arXiv 2508.10925: 60.8 GiB
    ("deepseek-v2-lite@q4_k_m", 10.36),  # DeepSeek-V2-Lite-Chat-Q4_K_M.gguf: 9.65 GiB; its experts' rows are odd
])
def test_sizes_of_published_files(model: str, published: float) -> None:
    assert gigabytes(model) == pytest.approx(published, rel=0.03)


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
    """Q4_0: 2 x (1000 of attention + 512 x 4 of the gate), 51200 of the embedding; Q6_K: 51200 of the head."""
    made = quantised(SMALL, "q4_0")
    assert made.dense_bits == pytest.approx((4.5 * (6096 + 51200) + 6.5625 * 51200) / (6096 + 2 * 51200))


def test_a_tied_embedding_is_kept_as_the_head_is() -> None:
    made = quantised(replace(SMALL, tied_embeddings=True), "q4_0")
    assert made.dense_bits == pytest.approx((4.5 * 6096 + 6.5625 * 51200) / (6096 + 51200))


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
    assert max(made.weight_bits, made.dense_bits) <= 16
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


def test_an_unknown_format_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ShapeError, match=r"no quantisation 'q4_km'; did you mean 'q4_k_m'\? Choose from bf16, .*gptq"):
        load_model("mixtral-8x7b@q4_km")


def test_experts_that_are_published_in_4_bits_are_not_quantised_again() -> None:
    expected = "model 'gpt-oss-20b' has experts of 4.25 bits .* use 'gpt-oss-20b' or gpt-oss-20b@mxfp4"
    with pytest.raises(ShapeError, match=expected):
        load_model("gpt-oss-20b@q4_k_m")
    assert quantisations_of(load_model("gpt-oss-20b")) == ["mxfp4"]


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
