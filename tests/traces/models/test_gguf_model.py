"""Shapes and blocks from GGUF files: the catalogue's, mixed types, files in parts, and files that are refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realrun.llama_cpp.kernel_numbers import piece_ns
from sim.costs.engine import load_engine
from sim.costs.kernel_costs import kernel_steps
from tests.kit.commands import ROOT
from tests.kit.loadable_ggufs import write_loadable
from tests.traces.models.gguf_files import (
    F16,
    F32,
    MXFP4,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    Matrices,
    delta,
    feed_forward,
    grouped,
    keys,
    latent,
    mamba,
    mixture,
    model,
    qwen3moe,
    write_gguf,
)
from traces.models.catalogue import load_model
from traces.models.gguf_model import gguf_blocks
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape, ShapeError


def deepseek2() -> Any:
    mixer = latent(7168, 128, 1536)
    layers = [mixer + feed_forward(7168, 18432)] * 3 + [mixer + mixture(7168, 2048, 256, 2048)] * 59
    sizes = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64, "attention.key_length_mla": 192}
    more = {"attention.key_length": 576, "nextn_predict_layers": 1, "expert_shared_count": 1}
    return model("deepseek2", {**keys(256, 8, 7168, 128), **sizes, **more}, 129280, layers)


def gpt_oss() -> Any:
    layer = grouped(2880, 64, 8, 64) + mixture(2880, 2880, 32)
    window = keys(32, 4, 2880, 64, attention__sliding_window=128)
    return model("gpt-oss", window, 201088, [layer] * 24, experts=MXFP4)


def llama4() -> Any:
    layer = grouped(5120, 40, 8, 128) + mixture(5120, 8192, 16, 8192)
    return model("llama4", keys(16, 1, 5120, 40, expert_weights_norm=False), 202048, [layer] * 48)


def gemma4() -> Any:
    near, far = grouped(2816, 16, 8, 256), [part for part in grouped(2816, 16, 2, 512) if part[0] != "attn_v"]
    ffn = mixture(2816, 704, 128) + feed_forward(2816, 2112)
    pattern = ([True] * 5 + [False]) * 5
    windows = keys(128, 8, 2816, 16, attention__sliding_window=1024, attention__sliding_window_pattern=pattern)
    return model("gemma4", windows, 262144, [(near if each else far) + ffn for each in pattern], tied=True)


def qwen3next() -> Any:
    state, full = delta(2048, 8192, 4096, 32), grouped(2048, 16, 2, 256, gate=True)
    ffn = mixture(2048, 512, 512, 512)
    sizes = keys(512, 10, 2048, 16, ssm__conv_kernel=4, ssm__inner_size=4096, ssm__state_size=128)
    groups = {"ssm.group_count": 16, "ssm.time_step_rank": 32}
    return model("qwen3next", {**sizes, **groups}, 151936, [state + ffn, state + ffn, state + ffn, full + ffn] * 12)


def nemotron() -> Any:
    kinds = {"M": mamba(2688, 10304, 6144, 4096), "*": grouped(2688, 32, 2, 128)}
    kinds["E"] = mixture(2688, 1856, 128, 3712, gated=False)
    blocks = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    heads = [32 if block == "*" else 0 for block in blocks]
    sizes = keys(128, 6, 2688, 32, ssm__conv_kernel=4, ssm__inner_size=4096, ssm__state_size=128)
    groups = {"ssm.group_count": 8, "ssm.time_step_rank": 64, "attention.head_count": heads}
    return model("nemotron_h_moe", {**sizes, **groups}, 131072, [kinds[block] for block in blocks])


FAMILIES = {
    "qwen3-30b-a3b": qwen3moe, "deepseek-v3": deepseek2, "gpt-oss-20b": gpt_oss, "llama-4-scout": llama4,
    "gemma-4-26b-a4b": gemma4, "qwen3-next-80b-a3b": qwen3next, "nemotron-3-nano-30b": nemotron,
}
MEANS = {  # of two kinds of layers; and what the file here is without
    "gemma-4-26b-a4b": {"head_dim", "kv_heads", "kv_width", "attention_params"}, "gpt-oss-20b": {"expert_biases"},
}


def sizes(shape: ModelShape) -> dict[str, Any]:
    """What does not follow from the weights' format."""
    given = {"name", "sources", "dense_bits", "kv_bits", "expert_bytes"}
    return {key: value for key, value in shape.to_dict().items() if key not in given}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_shape_of_the_catalogue(name: str, tmp_path: Path) -> None:
    made = load_model(str(write_gguf(tmp_path / "model.gguf", *FAMILIES[name]())))
    known = load_model(name)
    expected, found = sizes(known), sizes(made)
    differ = {key for key in expected if expected[key] != found.get(key)} - MEANS.get(name, set())
    assert {key: (found[key], expected[key]) for key in differ} == {}
    assert made.name == str(tmp_path / "model.gguf")
    assert made.routed_bytes == known.routed_bytes
    assert made.non_expert_bytes == pytest.approx(known.non_expert_bytes, rel=0.002)  # norms are counted here
    assert made.cache_bytes(9999) == known.cache_bytes(9999)


def test_biases_of_experts_are_seen(tmp_path: Path) -> None:
    files = (write_loadable(family, tmp_path / f"{family}.gguf") for family in ("gpt-oss", "olmoe"))
    assert [load_model(str(file)).expert_biases for file in files] == [True, None]
    assert load_model("gpt-oss-120b").expert_biases


def test_bytes_are_those_of_each_tensor(tmp_path: Path) -> None:
    """Q4_K has 144 bytes for 256 weights, Q6_K 210; here the down matrices of layer 1 are in Q6_K."""
    metadata, tensors = qwen3moe(2, Q4_K)
    mixed = [(name, shape, Q6_K if name == "blk.1.ffn_down_exps.weight" else kind) for name, shape, kind in tensors]
    made = load_model(str(write_gguf(tmp_path / "model.gguf", metadata, mixed)))
    matrix = 2048 * 768
    assert made.expert_bytes == (3 * matrix * 144 // 256, 2 * matrix * 144 // 256 + matrix * 210 // 256)
    assert made.weight_bits == pytest.approx(8 * sum(made.expert_bytes) / (6 * matrix))
    others = 2 * 2048 * 151936 * 2 + 2 * (18874368 * 2 + 2048 * 128 * 2 + 2048 * 4)
    assert made.non_expert_bytes == pytest.approx(others, rel=1e-6)


def test_files_of_2023_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    """As Mixtral's first files; the architecture is llama."""
    parts: Matrices = grouped(512, 8, 2, 64)
    for expert in range(4):
        parts += [(f"ffn_gate.{expert}", (512, 256)), (f"ffn_up.{expert}", (512, 256))]
        parts.append((f"ffn_down.{expert}", (256, 512)))
    made = load_model(str(write_gguf(tmp_path / "model.gguf", *model("llama", keys(4, 2, 512, 8), 99, [parts] * 2))))
    assert (made.experts, made.expert_width, made.expert_bytes) == (4, 256, (3 * 512 * 256 * 2,) * 2)


def test_tables_that_the_host_looks_up_and_layers_of_prediction_are_not_counted(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(3)
    plain = load_model(str(write_gguf(tmp_path / "plain.gguf", *qwen3moe(2))))
    more = [*tensors, ("per_layer_token_embd.weight", (160, 320_000_000), F16)]
    made = load_model(str(write_gguf(tmp_path / "more.gguf", {**metadata, "qwen3moe.nextn_predict_layers": 1}, more)))
    assert (made.mtp_layers, plain.mtp_layers) == (1, 0)
    assert replace(made, name="", sources={}, mtp_layers=0) == replace(plain, name="", sources={})


def test_a_file_in_parts(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(4)
    whole = load_model(str(write_gguf(tmp_path / "whole.gguf", metadata, tensors)))
    for number, some in enumerate((tensors[:9], [], tensors[9:]), 1):
        write_gguf(tmp_path / f"my-0000{number}-of-00003.gguf", metadata if number == 1 else {}, some)
    for number in (1, 3):
        made = load_model(str(tmp_path / f"my-0000{number}-of-00003.gguf"))
        assert replace(made, name="", sources={}) == replace(whole, name="", sources={})


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "my-00003-of-00003.gguf", *qwen3moe(1))
    with pytest.raises(ShapeError, match=r"expected all 3 parts next to each other, my-00001-of-00003\.gguf is missi"):
        load_model(str(file))


@pytest.mark.parametrize(
    ("parts", "words"), [(1000, "expected all 1000 parts"), (1001, "in 1 to 1000 parts, its name")]
)
def test_a_name_may_say_a_thousand_parts(parts: int, words: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / f"my-00001-of-{parts:05}.gguf", *qwen3moe(1))
    with pytest.raises(ShapeError, match=words):
        load_model(str(file))


def test_keys_of_heads_tell_the_widths_that_one_matrix_of_queries_keys_and_values_does_not(tmp_path: Path) -> None:
    """Eight heads of 64, and two of keys and of values."""
    layer: Matrices = [("attn_qkv", (512, 768)), ("attn_output", (512, 512)), *mixture(512, 256, 4)]
    made = model("qwen3moe", keys(4, 2, 512, 8, attention__head_count_kv=2), 99, [layer] * 2)
    assert load_model(str(write_gguf(tmp_path / "model.gguf", *made))).kv_width == 2 * 2 * 64


def test_keys_and_values_of_heads_may_have_lengths_of_their_own(tmp_path: Path) -> None:
    layer: Matrices = [("attn_qkv", (512, 768)), ("attn_output", (512, 512)), *mixture(512, 256, 4)]
    lengths = {"attention__head_count_kv": 2, "attention__key_length": 96, "attention__value_length": 80}
    made = model("qwen3moe", keys(4, 2, 512, 8, **lengths), 99, [layer] * 2)
    assert load_model(str(write_gguf(tmp_path / "model.gguf", *made))).kv_width == 2 * 96 + 2 * 80


def test_a_quantised_file_is_not_quantised_again(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", *qwen3moe(2, Q4_K))
    assert load_model(f"{file}:1").moe_layers == 1
    with pytest.raises(ShapeError, match="is not quantised again"):
        load_model(f"{file}@q4_k_m")

def test_gate_and_up_may_be_one_tensor(tmp_path: Path) -> None:
    layer = grouped(512, 8, 2, 64)
    fused: Matrices = [("ffn_gate_up_exps", (512, 512, 4)), ("ffn_down_exps", (256, 512, 4))]
    parts: Matrices = [("ffn_gate_exps", (512, 256, 4)), ("ffn_up_exps", (512, 256, 4)), fused[1]]
    files = [model("gemma4", keys(4, 2, 512, 8), 99, [layer + each]) for each in (fused, parts)]
    made = [load_model(str(write_gguf(tmp_path / "m.gguf", *each))) for each in files]
    assert (made[0].matrices_per_expert, made[0].expert_width) == (3, 256)
    assert [each.largest_expert_tensor_bytes for each in made] == [512 * 512 * 4 * 2, 512 * 256 * 4 * 2]
    assert replace(made[0], expert_tensor_bytes=None) == replace(made[1], expert_tensor_bytes=None)


def test_layers_that_predict_several_tokens_are_known_by_their_tensors_too(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(3)
    ahead = [*tensors, ("blk.2.nextn.eh_proj.weight", (4096, 2048), F16)]
    made = load_model(str(write_gguf(tmp_path / "m.gguf", metadata, ahead)))
    said = load_model(str(write_gguf(tmp_path / "n.gguf", {**metadata, "qwen3moe.nextn_predict_layers": 1}, ahead)))
    assert (made.moe_layers, said.moe_layers) == (2, 2)
    assert said.sources["moe_layers"] == f"{tmp_path / 'n.gguf'}, without 1 that predict several tokens"


@pytest.mark.parametrize(
    ("arch", "near"), [("afmoe", [True, True, True, False]), ("smallthinker", [False, True, True, True])]
)
def test_windows_are_where_llama_cpp_has_them(arch: str, near: list[bool], tmp_path: Path) -> None:
    layer = grouped(512, 8, 2, 64) + mixture(512, 256, 4)
    metadata, tensors = model(arch, keys(4, 2, 512, 8, attention__sliding_window=128), 99, [layer] * 4)
    made = load_model(str(write_gguf(tmp_path / "m.gguf", metadata, tensors)))
    assert made.attention is not None
    assert made.attention_layers is not None
    assert [made.attention[number].reach == "window" for number in made.attention_layers] == near


def test_each_kind_of_matrix_has_its_own_types(tmp_path: Path) -> None:
    file = write_loadable("olmoe", tmp_path / "m.gguf")
    experts = {"gate_up": {"q4_0": 1.0}, "down": {"q4_0": 1.0}}
    assert gguf_blocks(file) == WeightBlocks.uniform("q8_0")._replace(**experts, state={}, shared={}, dense={})


def test_shares_are_those_of_the_weights_and_tied_heads_are_the_embeddings(tmp_path: Path) -> None:
    """Of attention a quarter is in q4_0; norms, routers and biases are no such matrices."""
    table = [
        ("token_embd.weight", (64, 100), Q4_0), ("blk.0.attn_q.weight", (64, 64), Q4_0),
        ("blk.0.attn_k.weight", (64, 192), Q8_0), ("blk.0.attn_norm.weight", (64,), F32),
        ("blk.0.ffn_gate_inp.weight", (64, 4), F32), ("blk.0.ffn_gate_up_exps.weight", (64, 64, 4), Q8_0),
        ("blk.0.ffn_down_exps.weight", (32, 64, 4), Q4_0), ("blk.0.ffn_down_exps.bias", (64, 4), F32),
    ]
    keys = {"general.architecture": "olmoe", "olmoe.block_count": 1, "olmoe.embedding_length": 64}
    keys |= {"olmoe.attention.head_count": 1, "olmoe.attention.key_length": 64}
    found = gguf_blocks(write_gguf(tmp_path / "m.gguf", keys, table))
    q4_0, q8_0 = {"q4_0": 1.0}, {"q8_0": 1.0}
    expected = WeightBlocks(q8_0, q4_0, {"q4_0": 0.25, "q8_0": 0.75}, {}, {}, {}, q4_0, q4_0)
    assert found == expected


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "deepseek-v3"])
@pytest.mark.parametrize(("weights", "experts", "others"), [
    ("q6_k", (Q6_K, Q6_K), Q6_K), ("ud-q6_k_xl", (Q6_K, Q8_0), Q8_0),
])
def test_a_format_and_a_file_of_its_layout_agree(
    name: str, weights: str, experts: tuple[int, int], others: int, tmp_path: Path
) -> None:
    """Linear and latent attention, shared experts, dense layers. Routers and convolutions have 32 bits, and rows of 128
    (attn_k_b) eight, which a name does not know."""
    def kind(tensor: str, row: int) -> int:
        if tensor.endswith(("_inp.weight", "conv1d.weight", "norm.weight")):
            return F32
        return experts["down" in tensor] if "_exps" in tensor else Q8_0 if row % 256 else others

    metadata, tensors = FAMILIES[name]()
    typed = [(tensor, shape, kind(tensor, shape[0])) for tensor, shape, _ in tensors]
    made, named = load_model(str(write_gguf(tmp_path / "m.gguf", metadata, typed))), load_model(f"{name}@{weights}")
    assert made.weight_bits == pytest.approx(named.weight_bits)
    assert made.product_bytes == pytest.approx(named.product_bytes, rel=0.02)
    for part, count in named.part_params.items():
        if count:
            assert getattr(made.bits, part) == pytest.approx(getattr(named.bits, part), rel=0.02), part


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    first = gguf_blocks(write_loadable("olmoe", tmp_path / "m.gguf"))
    file = write_loadable("olmoe", tmp_path / "m.gguf", experts=Q8_0)
    os.utime(file, ns=(1, 1))
    assert (first.down, gguf_blocks(file).down) == ({"q4_0": 1.0}, {"q8_0": 1.0})


def test_measured_kernels_compute_a_file_with_its_own_blocks(tmp_path: Path) -> None:
    kernels = load_engine(str(ROOT / "docs/validation/llama.cpp/engine.yaml")).kernels
    assert kernels is not None
    small, large = (load_model(str(write_loadable("olmoe", tmp_path / f"{each}.gguf", each))) for each in (Q4_0, Q8_0))
    ns = [piece_ns(kernel_steps(shape, kernels, 2), 1, 64) for shape in (small, large)]
    assert ns[1] / ns[0] == pytest.approx(1.3, abs=0.25)
