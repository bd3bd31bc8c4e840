"""GGUF headers: files of the package gguf, which llama.cpp's converters use, are read as that package reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from traces.models.gguf_model import read_gguf_model
from traces.models.gguf_reader import GgufKeys, read_gguf_header, tensor_types
from traces.models.shape import ShapeError


def keys(**values: Any) -> GgufKeys:
    """Of the architecture ``toy``."""
    named = {f"toy.{key}": value for key, value in values.items()}
    return GgufKeys({"general.architecture": "toy", **named}, "a.gguf")


def test_keys_begin_with_the_architecture() -> None:
    found = keys(expert_count=8)
    assert found.architecture == "toy"
    assert "expert_count" in found
    assert "general.architecture" not in found
    assert GgufKeys({}, "a.gguf").architecture == ""


@pytest.mark.parametrize(("value", "layer", "default", "least", "expected"), [
    (8, 0, None, 0, 8), (8, 5, None, 8, 8), ((4, 6), 0, None, 0, 4), ((4, 6), 1, None, 0, 6), (0, 0, 3, 0, 0),
    (10**9, 0, None, 0, 10**9),
])
def test_a_count_is_that_of_the_model_or_of_the_layer(
    value: object, layer: int, default: int | None, least: int, expected: int
) -> None:
    assert keys(size=value).count("size", layer, default, least) == expected


def test_without_the_key_a_count_is_the_default() -> None:
    assert keys().count("size", default=3) == 3


@pytest.mark.parametrize(
    ("value", "layer", "least"),
    [(None, 0, 0), (-1, 0, 0), (7, 0, 8), (10**9 + 1, 0, 0), (2.0, 0, 0), (True, 0, 0), ("8", 0, 0), ((4, 6), 2, 0),
     ((), 0, 0), ((4, -6), 1, 0)],
)
def test_any_other_count_is_refused(value: object, layer: int, least: int) -> None:
    """A list that ends before the layer has no value for it."""
    with pytest.raises(ShapeError, match=f"a.gguf: expected a whole number from {least} at the key 'toy.size', got "):
        keys(size=value).count("size", layer, least=least)


def test_layers_are_1_to_1000_without_those_that_predict_several_tokens() -> None:
    assert keys(block_count=1).layers == 1
    assert keys(block_count=1003, nextn_predict_layers=3).layers == 1000
    for values in ({"block_count": 0}, {"block_count": 1001}, {"block_count": 2, "nextn_predict_layers": 2}):
        with pytest.raises(ShapeError, match=r"a\.gguf: block_count: expected 1 to 1000 layers, got "):
            _ = keys(**values).layers


@pytest.mark.parametrize(
    ("value", "layer", "default", "expected"),
    [(True, 0, False, True), (0, 0, True, False), ((False, True), 1, False, True), ((False, True), 2, True, True),
     ((False, True), 2, False, False)],
)
def test_a_flag_is_that_of_the_layer_or_the_default(value: object, layer: int, default: bool, expected: bool) -> None:
    assert keys(gated=value).flag("gated", layer, default) is expected


def test_without_the_key_a_flag_is_not_set() -> None:
    assert keys().flag("gated") is False
    assert keys().flag("gated", default=True) is True


def test_only_a_list_has_a_value_for_each_layer() -> None:
    assert [keys(size=value).is_list("size") for value in ((4, 6), 4)] == [True, False]
    assert not keys().is_list("size")


HIDDEN, EXPERTS, VOCAB = 256, 4, 32
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4")
IK_TYPES = ("Q6_0", *(f"IQ{bits}_K" for bits in range(2, 7)), *(f"IQ{bits}_KS" for bits in range(2, 6)), "IQ4_KSS")


def write(path: Path, random: np.random.Generator, split_max_tensors: int = 0) -> list[Path]:
    """Four layers, the last of which predicts several tokens; each matrix in a type of its own, in a file or parts."""
    writer = gguf.GGUFWriter(path, "glm4moe", split_max_tensors=split_max_tensors)
    sizes = {
        "block_count": 4, "nextn_predict_layers": 1, "leading_dense_block_count": 1, "embedding_length": HIDDEN,
        "expert_count": EXPERTS, "expert_used_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"glm4moe.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(VOCAB)])
    writer.add_float32("glm4moe.rope.freq_base", 1e6)
    for name, shape in tensors():
        number = gguf.GGMLQuantizationType[random.choice(TYPES)] if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        rows = gguf.quant_shape_to_byte_shape(shape, number)
        content = random.integers(0, 256, rows, np.uint8)
        writer.add_tensor(name, content, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*"))


def tensors() -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, the length of a row last, as numpy has it."""
    found: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (VOCAB, HIDDEN)), ("output_norm.weight", (256,))]
    for layer in range(4):
        parts = {"attn_q": (256, 256), "attn_k": (512, 256), "attn_v": (512, 256), "attn_output": (256, 256)}
        sparse = {f"ffn_{name}_exps": (EXPERTS, 512, 256) for name in ("gate", "up")}
        more: Any = {**sparse, "ffn_down_exps": (EXPERTS, 256, 512), "ffn_gate_inp": (EXPERTS, 256)}
        dense = {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
        ahead = {"nextn.eh_proj": (256, 512)} if layer == 3 else {}
        its = {**parts, **(dense if layer == 0 else more), **ahead, "attn_norm": (256,)}
        found += [(f"blk.{layer}.{name}.weight", shape) for name, shape in its.items()]
    return found


@pytest.mark.parametrize(("seed", "split"), [(0, 0), (1, 0), (2, 0), (3, 7), (4, 20)])
def test_tensors_and_keys_are_the_same(seed: int, split: int, tmp_path: Path) -> None:
    files = write(tmp_path / "m.gguf", np.random.default_rng(seed), split)
    assert (len(files) > 1) == (split > 0)
    header = read_gguf_header(files[-1])
    readers = [gguf.GGUFReader(file) for file in files]
    expected = [
        (each.name, tuple(map(int, each.shape)), each.tensor_type.name, int(each.n_bytes), int(each.data_offset))
        for reader in readers for each in reader.tensors
    ]
    ours = [(each.name, each.shape, each.type.name, each.size_bytes, each.begin) for each in header.tensors]
    assert ours == expected
    fields = {key: field for key, field in readers[0].fields.items() if not key.startswith(("GGUF.", "token"))}
    assert dict(header.metadata) == {key: field.contents() for key, field in fields.items()}
    assert header.files == tuple(files)


def test_bytes_by_layer_are_those_of_its_tensors(tmp_path: Path) -> None:
    """Three layers count: one without experts, two with; those of the last, which predicts, do not."""
    (file,) = write(tmp_path / "m.gguf", np.random.default_rng(5))
    sizes = {each.name: int(each.n_bytes) for each in gguf.GGUFReader(file).tensors}
    shape = read_gguf_model(file)
    assert (shape.dense_layers, shape.moe_layers) == (1, 2)
    experts = {name: size for name, size in sizes.items() if "_exps" in name}
    by_layer = [sum(size for name, size in experts.items() if f"blk.{layer}." in name) for layer in (1, 2)]
    assert [size * EXPERTS for size in shape.expert_bytes] == by_layer
    assert len(set(by_layer)) == 2
    others = sum(size for name, size in sizes.items() if name not in experts and "blk.3." not in name)
    assert shape.non_expert_bytes == pytest.approx(others, abs=2)
    assert shape.embedding_bytes == sizes["token_embd.weight"]
    largest = max(size for name, size in experts.items() if "blk.3." not in name)
    assert shape.largest_expert_tensor_bytes == largest


def test_types_are_those_of_the_package_and_those_that_only_newer_engines_read() -> None:
    """The package also has Q8_1 and Q8_K, which are for products and never stored."""
    stored = [kind for kind in gguf.GGML_QUANT_SIZES if kind.name not in ("Q8_1", "Q8_K")]
    package = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in stored}
    table = {number: (kind.name, kind.weights, kind.size_bytes) for number, kind in tensor_types().items()}
    assert {number: table.get(number) for number in package} == package
    assert {table[number][0] for number in table.keys() - package.keys()} == {"Q2_0", *IK_TYPES}
