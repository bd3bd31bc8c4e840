"""The shape of a model, the parts of its name, and the work of its experts in a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from traces.models.attention import Attention, Reach
from traces.models.catalogue import load_model, model_names
from traces.models.names import ModelName, parted
from traces.models.shape import ExpertWork, ModelShape, ShapeError
from trilane.testing.worlds import toy_shape


@pytest.mark.parametrize(("name", "base"), [
    ("phi-3.5-moe", "phi-3.5-moe"),
    ("phi-3.5-moe:8", "phi-3.5-moe"),
    ("qwen3-30b-a3b@q4_k_m:8", "qwen3-30b-a3b@q4_k_m"),  # other bytes, and so another model to a profile
])
def test_a_model_that_is_cut_keeps_the_name_of_the_whole(name: str, base: str) -> None:
    assert replace(toy_shape(2, 4, 2), name=name).base_name == base


def test_a_quantised_file_gives_the_size_of_an_expert_in_every_layer() -> None:
    shape = toy_shape(2, 4, 2)
    assert replace(shape, expert_bytes=(70, 50)).routed_bytes == 4 * (70 + 50)
    for sizes in ((70,), (70, 50, 30)):
        with pytest.raises(ShapeError, match=f"an entry for each of the 2 MoE layers, got {len(sizes)}"):
            replace(shape, expert_bytes=sizes)


def test_the_most_experts_that_later_products_hold() -> None:
    shape = replace(toy_shape(1, 4, 2), moe_layers=64)
    assert replace(shape, experts=2**13).moe_layers == 64
    with pytest.raises(ShapeError, match=r"at most 524,288 experts in all layers together.* got 524,352"):
        replace(shape, experts=2**13 + 1)


GOOD = toy_shape(2, 4, 2).to_dict()
COUNTS = [name for name, value in GOOD.items() if type(value) is int]


@pytest.mark.parametrize("value", [-3, True, "2", 2.5, None, 10**15, float("nan"), [2]])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number_in_a_range(name: str, value: object) -> None:
    """Once, a trace that said ``dense_layers: -3`` made every policy faster."""
    with pytest.raises(ShapeError, match=rf"model shape: {name}: expected a whole number from [01] to "):
        ModelShape.from_dict({**GOOD, name: value})


@pytest.mark.parametrize("wrong", [
    {"weight_bits": 0}, {"dense_bits": -16}, {"kv_bits": 1e308}, {"weight_bits": True}, {"expert_bytes": [0, 192]},
    {"expert_bytes": [192, -1]}, {"expert_bytes": [192]}, {"norm_topk": 1}, {"tied_embeddings": "no"},
    {"sources": {"vocab": 3}}, {"name": 3}, {"name": "toy\x1b[31m"}, {"name": "\u202eyot"}, {"name": "\ud800"},
    {"name": "two\nlines"}, {"name": "x" * 301}, {"top_k": 5}, {"moe_layers": 1000, "experts": 32768},
    {"hidden": 10**6, "expert_width": 10**6, "experts": 10000}, {"weight_bits": 0.01},
    {"attention_params": 10**12, "dense_layers": 1000}, {"attention": [{"reach": "full", "params": -1}]},
])
def test_a_shape_that_no_model_has_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ShapeError):
        ModelShape.from_dict({**GOOD, **wrong})


def test_the_limits_are_far_from_every_known_model() -> None:
    for name in model_names():
        shape = load_model(name)
        larger = {name: 3 * getattr(shape, name) for name in ("moe_layers", "experts", "hidden", "expert_width")}
        replace(shape, **larger, expert_bytes=(), attention=None, attention_layers=None, moe_blocks=None)


def test_blocks_of_experts_follow_the_dense_layers_or_are_listed() -> None:
    shape = toy_shape(3, 4, 2)
    assert replace(shape, dense_layers=2).expert_blocks == (2, 3, 4)
    assert replace(shape, moe_blocks=(1, 3, 5, 7)).expert_blocks == (1, 3, 5)
    with pytest.raises(ShapeError, match="moe_blocks needs an entry for each of the 3 MoE layers, got 2"):
        replace(shape, moe_blocks=(1, 3))


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 2, 1), (4, 2, 2), (4, 2, 3), (4, 4, 2), (5, 1, 4)])
def test_active_experts_are_the_mean_over_all_that_the_tokens_may_choose(experts: int, top_k: int, tokens: int) -> None:
    """Counted one by one. Their rows add up to the tokens' choices."""
    choices = list(product(combinations(range(experts), top_k), repeat=tokens))
    active = sum(len({expert for chosen in each for expert in chosen}) for each in choices) / len(choices)
    work = ExpertWork.of(toy_shape(1, experts, top_k), tokens)
    assert work.active == pytest.approx(active)
    assert work.active * work.rows == pytest.approx(tokens * top_k)


@pytest.mark.parametrize(("rows", "most", "ns"), [(1.0, 1, 2 * 10), (2.0, 2, 2 * 30), (1.25, 2, 2 * 15)])
def test_time_between_whole_numbers_of_rows_is_interpolated(rows: float, most: int, ns: float) -> None:
    work = ExpertWork(active=2, rows=rows)
    assert work.most_rows == most
    assert work.ns([0, 10, 30]) == pytest.approx(ns)


def test_an_active_expert_has_a_row_whatever_rounding_makes_of_it() -> None:
    """64 experts x (1 - (1 - 6 / 64)) is a little more than 6 in floating point."""
    rows = [ExpertWork.of(toy_shape(1, experts, top_k), 1).rows for experts in range(8, 129) for top_k in (1, 6, 8)]
    assert min(rows) == 1.0
    assert max(rows) < 1 + 1e-9


@pytest.mark.parametrize(("name", "parts"), [
    ("phi-3.5-moe", ("phi-3.5-moe", None, None)),
    ("phi-3.5-moe@q4_k_m", ("phi-3.5-moe", "q4_k_m", None)),
    ("phi-3.5-moe@q4_k_m:8", ("phi-3.5-moe", "q4_k_m", "8")),
    ("phi-3.5-moe:8@q4_k_m", ("phi-3.5-moe", None, "8@q4_k_m")),
    ("a@b/c:d/config.json@q8_0:2", ("a@b/c:d/config.json", "q8_0", "2")),
    ("mine@home.gguf", ("mine@home.gguf", None, None)),
    ("mine-00001-of-00002.gguf:4", ("mine-00001-of-00002.gguf", None, "4")),
    ("folder@1/model@q8_0", ("folder@1/model", "q8_0", None)),
])
def test_the_parts_of_a_name(name: str, parts: tuple[str | None, ...]) -> None:
    assert tuple(parted(name)) == parts


@given(st.text())
def test_the_parts_give_the_name_again(name: str) -> None:
    assert str(parted(name)) == name


@given(st.from_regex(r"[a-z0-9.-]{1,9}", fullmatch=True), st.sampled_from([None, "q4_0"]), st.sampled_from([None, "3"]))
def test_a_name_gives_its_parts_again(model: str, weights: str | None, layers: str | None) -> None:
    made = ModelName(model, weights, layers)
    assert parted(str(made)) == made


# --- Attention by kind of layer ---------------------------------------------------------------------------------------


FULL = Attention("full", params=0, kv_width=8)
KINDS = (FULL, replace(FULL, reach="window", span=4), replace(FULL, reach="chunk", span=4))


def seen(kind: Attention, token: int) -> range:
    """The tokens, counted from 0, that ``token`` attends to, by the definitions."""
    first = {"full": 0, "window": max(token - kind.span + 1, 0), "chunk": token // max(kind.span, 1) * kind.span}
    return range(first[kind.reach], token + 1)


@given(st.sampled_from(KINDS), st.integers(1, 20), st.integers(0, 20))
def test_pairs_and_reads_are_those_of_the_definitions(kind: Attention, new: int, earlier: int) -> None:
    """Against a count of every token, for any ``new`` tokens after ``earlier`` ones."""
    each = [seen(kind, token) for token in range(earlier, earlier + new)]
    assert kind.pairs(new, earlier + new) == sum(map(len, each))
    assert kind.read(new, earlier + new) == len(set().union(*each))


def test_a_window_and_a_chunk_keep_no_more_tokens_than_their_span() -> None:
    assert [[kind.kept(tokens) for tokens in (3, 4, 9)] for kind in KINDS] == [[3, 4, 9], [3, 4, 4], [3, 4, 4]]
    assert KINDS[1].cache_bytes(9, bits=16) == 4 * 8 * 2


def test_a_state_is_as_large_after_any_number_of_tokens() -> None:
    state = Attention("state", params=0, state_bytes=100)
    assert [state.cache_bytes(tokens, 16) for tokens in (1, 1000)] == [100, 100]
    assert (state.read(1, 1000), state.pairs(1, 1000)) == (0, 0)


def cache_of(config: transformers.PreTrainedConfig, tokens: int) -> float:
    """Bytes of keys and values in 16 bits after ``tokens``, from the configuration's own numbers."""
    span = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kept = {"full_attention": tokens, "sliding_attention": min(tokens, span), "chunked_attention": min(tokens, span)}
    width = 2 * config.num_key_value_heads * config.head_dim
    return sum(kept[kind] * width * 2 for kind in config.layer_types)


@pytest.mark.parametrize("tokens", [100, 32_768, 131_072])
@pytest.mark.parametrize(("name", "config"), [
    ("gpt-oss-20b", transformers.GptOssConfig(num_hidden_layers=24)),
    ("gpt-oss-120b", transformers.GptOssConfig()),
    ("llama-4-scout", transformers.Llama4TextConfig()),
    ("llama-4-maverick", transformers.Llama4TextConfig(num_local_experts=128, interleave_moe_layer_step=2)),
])
def test_caches_of_windows_and_chunks(name: str, config: transformers.PreTrainedConfig, tokens: int) -> None:
    assert load_model(name).cache_bytes(tokens) == cache_of(config, tokens)


@pytest.mark.parametrize(("tokens", "gigabytes"), [(32_768, 0.881), (131_072, 2.894)])
def test_the_cache_of_gemma_4(tokens: int, gigabytes: float) -> None:
    """25 layers of 8 heads with 256 elements keep 1,024 tokens; 5 layers of 2 heads with 512 keep all."""
    size = load_model("gemma-4-26b-a4b").cache_bytes(tokens)
    assert size == 2 * (25 * 1024 * 2 * 8 * 256 + 5 * tokens * 2 * 2 * 512)
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.001)


@pytest.mark.parametrize(("name", "config"), [
    ("qwen3-next-80b-a3b", transformers.Qwen3NextConfig()),
    ("qwen3.5-35b-a3b", transformers.Qwen3_5MoeTextConfig()),
    ("qwen3.5-122b-a10b", transformers.Qwen3_5MoeTextConfig(num_hidden_layers=48, linear_num_value_heads=64)),
    ("qwen3.5-397b-a17b", transformers.Qwen3_5MoeTextConfig(num_hidden_layers=60, linear_num_value_heads=64)),
])
def test_linear_attention_keeps_a_state(name: str, config: transformers.PreTrainedConfig) -> None:
    """Three of four layers: a matrix a head and the convolution's last rows, in 32 bits."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = 4 * (config.linear_key_head_dim * values + (config.linear_conv_kernel_dim - 1) * (2 * keys + values))
    full = config.layer_types.count("full_attention")
    linear = config.layer_types.count("linear_attention")
    width = 2 * config.num_key_value_heads * config.head_dim
    assert load_model(name).cache_bytes(32_768) == full * 32_768 * width * 2 + linear * state


def test_the_cache_of_nemotron_3_nano() -> None:
    """23 Mamba-2 layers of 64 heads with 64 x 128 elements and 3 rows of 6,144; 6 layers of 2 heads with 128."""
    states, tokens = 23 * 4 * (64 * 64 * 128 + 3 * 6144), 32_768
    assert load_model("nemotron-3-nano-30b").cache_bytes(tokens) == states + 6 * tokens * 2 * 2 * 128 * 2


def test_the_cache_of_kimi_linear() -> None:
    """20 layers of 32 heads with 128 x 128 elements, 3 rows of three times 4,096 before them; 7 of latent attention."""
    states, tokens = 20 * 4 * (32 * 128 * 128 + 3 * 3 * 4096), 32_768
    assert load_model("kimi-linear-48b-a3b").cache_bytes(tokens) == states + 7 * tokens * (512 + 64) * 2


def test_the_cache_of_deepseek_v4_flash() -> None:
    """43 windows of 128 tokens with 512 elements; 20 layers keep 512 and an indexer's 128 for every 4 tokens, 20 for
    every 128 tokens 512."""
    tokens = 32_768
    elements = 43 * 128 * 512 + 20 * tokens // 4 * (512 + 128) + 20 * tokens // 128 * 512
    assert load_model("deepseek-v4-flash").cache_bytes(tokens) == 2 * elements


def test_the_cache_of_lfm2() -> None:
    """18 convolutions that look back two rows of 2,048; 6 layers of 8 heads with 64 elements."""
    tokens = 32_768
    assert load_model("lfm2-8b-a1b").cache_bytes(tokens) == 18 * 4 * 2 * 2048 + 6 * tokens * 2 * 8 * 64 * 2


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "gpt-oss-20b", "llama-4-scout", "qwen3.5-35b-a3b"])
def test_a_model_of_one_layer_has_one_kind(name: str) -> None:
    """Once, a second kind that no layer was left to have was refused."""
    cut, whole = load_model(f"{name}:1"), load_model(name)
    assert whole.attention is not None
    assert (cut.attention, cut.attention_layers) == (whole.attention[:1], (0,))


def test_a_cut_model_has_the_kinds_of_its_first_layers() -> None:
    assert load_model("gemma-4-26b-a4b:7").attention_layers == (0, 0, 0, 0, 0, 1, 0)


def shape(kinds: tuple[Attention, ...] | None, layers: tuple[int, ...] | None) -> ModelShape:
    return ModelShape("toy", 2, 1, 4, 2, 8, 8, attention=kinds, attention_layers=layers)


@pytest.mark.parametrize(("kinds", "layers", "words"), [
    ((FULL,), (0, 0), "an entry for each of the 3 layers"),
    ((FULL,), None, "an entry for each of the 3 layers"),
    (None, (0, 0, 0), "none where it does not"),
    ((FULL,), (0, 1, 0), "numbers of the 1 kinds"),
])
def test_kinds_that_do_not_match_the_layers_are_refused(
    kinds: tuple[Attention, ...] | None, layers: tuple[int, ...] | None, words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        shape(kinds, layers)


@pytest.mark.parametrize(("reach", "span"), [("full", 4), ("window", 0), ("state", 1)])
def test_a_span_belongs_to_a_window_or_chunk(reach: Reach, span: int) -> None:
    with pytest.raises(ShapeError, match="span"):
        shape((Attention(reach, params=0, span=span),), (0, 0, 0))
