"""Experts whose weights are in blocks of ggml's: unpacked by torch, or multiplied as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from realrun.errors import RefusedError
from realrun.experts.ffn import (
    MOST_ROWS,
    BlockSwiGlu,
    ExpertShape,
    SwiGlu,
    addressed,
    compute_into,
    weighted_ffn,
)
from realrun.experts.store import (
    ExpertLayout,
    random_store,
)
from realrun.machine.pinned import plain
from realrun.machine.weight_formats import BAND, BLOCK, FORMATS, Q4_0, Q4_K, Q8_0, BlockFormat
from tests.realrun.machine.test_native_ffn import needs_compiler
from tests.realrun.machine.test_native_ffn_results import VARIANTS, variant
from traces.models.catalogue import load_model
from traces.models.quantisation import bits_of_block

HALF, NAMES = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8), tuple(FORMATS)  # two bytes


Array = np.ndarray[Any, Any]


def dequantised(name: str, blocks: Tensor) -> Array:
    """Blocks uint8 [R, blocks, bytes] -> float64 [R, C], byte by byte, as dequantize_row_* of ggml-quants.c."""
    weights = _WEIGHTS[name](np.moveaxis(blocks.numpy().astype(np.int64), -1, 0))
    return np.stack(weights, -1).reshape(len(blocks), -1)


def _half(block: Array, place: int) -> Array:
    return (block[place] + 256 * block[place + 1]).astype(np.uint16).view(np.float16).astype(np.float64)


def _of_q8_0(block: Array) -> list[Array]:
    return [_half(block, 0) * (byte - 256 * (byte > 127)) for byte in block[2:]]


def _of_q4_0(block: Array) -> list[Array]:
    return [_half(block, 0) * ((byte >> shift & 15) - 8) for shift in (0, 4) for byte in block[2:]]


def _of_q4_k(block: Array) -> list[Array]:
    weights, q = [], block[4:16]
    for j in range(8):
        scale, least = q[j] & 63, q[j + 4] & 63
        if j >= 4:
            scale, least = q[j + 4] & 15 | q[j - 4] >> 6 << 4, q[j + 4] >> 4 | q[j] >> 6 << 4
        numbers = [byte >> (4 if j % 2 else 0) & 15 for byte in block[16 + j // 2 * 32 : 48 + j // 2 * 32]]
        weights += [_half(block, 0) * scale * number - _half(block, 2) * least for number in numbers]
    return weights


_WEIGHTS = {"q8_0": _of_q8_0, "q4_0": _of_q4_0, "q4_k": _of_q4_k}


class TestUnpacked:
    def test_q8_0_is_a_scale_and_32_signed_bytes(self) -> None:
        numbers = torch.arange(-16, 16).to(torch.int8)
        blocks = torch.cat((HALF, numbers.view(torch.uint8))).repeat(BAND, 2, 1)
        assert torch.equal(Q8_0.unpacked(Q8_0.packed(blocks)), (numbers * 0.5).bfloat16().repeat(BAND, 2))

    def test_q4_0_is_a_scale_and_32_halves_of_bytes_the_lower_ones_first(self) -> None:
        numbers = torch.cat((torch.arange(16), torch.arange(16).flip(0)))
        blocks = torch.cat((HALF, (numbers[:16] + 16 * numbers[16:]).to(torch.uint8))).repeat(BAND, 2, 1)
        assert torch.equal(Q4_0.unpacked(Q4_0.packed(blocks)), ((numbers - 8) * 0.5).bfloat16().repeat(BAND, 2))

    def test_q4_k_has_scales_and_minima_of_six_bits(self) -> None:
        """Scales 2, 0, .. of 0.5, minima 0, 3, 0, ..: the first 32 weights are their numbers, the next 32 are -1.5."""
        six_bits = torch.tensor([2, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)
        blocks = torch.cat((HALF, HALF, six_bits, torch.full((128,), 0x97, dtype=torch.uint8))).repeat(BAND, 1, 1)
        expected = torch.tensor([7.0] * 32 + [-1.5] * 32 + [0.0] * 192).bfloat16()
        assert torch.equal(Q4_K.unpacked(Q4_K.packed(blocks)), expected.repeat(BAND, 1))

    @pytest.mark.parametrize("name", NAMES)
    def test_random_blocks_are_those_of_ggml(self, name: str) -> None:
        form = FORMATS[name]
        blocks = form.random_blocks(32, 512, torch.Generator().manual_seed(1))
        expected = torch.from_numpy(dequantised(name, blocks))
        off = (form.unpacked(form.packed(blocks)).double() - expected).abs()
        assert (off <= 2**-8 * expected.abs() + 1e-9).all()  # of bfloat16

    @pytest.mark.llama
    @pytest.mark.parametrize("name", NAMES)
    def test_random_blocks_are_those_of_the_package_gguf(self, name: str) -> None:
        from gguf import GGMLQuantizationType, dequantize

        blocks = FORMATS[name].random_blocks(32, 512, torch.Generator().manual_seed(2))
        kind = GGMLQuantizationType[name.upper()]
        theirs = dequantize(blocks.flatten(1).numpy(), kind)
        assert np.allclose(theirs, dequantised(name, blocks), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_band_has_the_scales_of_16_rows_first_then_four_bytes_of_each(self, name: str) -> None:
        form = FORMATS[name]
        blocks = torch.randint(0, 256, (32, 2, form.size_bytes), dtype=torch.uint8)
        second = form.packed(blocks)[16:].flatten()[BAND * form.size_bytes :]  # block 1 of rows 16 to 31
        assert torch.equal(second[:32], blocks[16:, 1, :2].flatten())
        columns = second[BAND * 2 * form.scales :]
        assert torch.equal(columns[:64], blocks[16:, 1, 2 * form.scales :][:, :4].flatten())

    @pytest.mark.parametrize("blocks", FORMATS.values())
    def test_random_experts_are_neither_large_nor_denormal(self, blocks: BlockFormat) -> None:
        store = random_store(ExpertLayout.from_shape(256, 512, blocks), 1, 3, plain)
        for expert in range(3):
            for view in store.layouts[0].views(store.buffer(0, expert)).values():
                magnitudes = blocks.unpacked(view).abs()
                assert 1e-4 < magnitudes.median() < 1
                assert magnitudes.max() < 1

    @pytest.mark.parametrize(("name", "bits"), [("q8_0", 8.5), ("q4_0", 4.5), ("q4_k", 4.5)])
    def test_rows_have_the_bytes_that_their_bits_say(self, name: str, bits: float) -> None:
        assert FORMATS[name].row_bytes(256) * 8 == bits * 256 == bits_of_block(name) * 256
        assert FORMATS[name].weights_of(FORMATS[name].row_bytes(512)) == 512


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen3-30b-a3b@q4_0", Q4_0), ("qwen3-30b-a3b@q8_0", Q8_0), ("qwen3-30b-a3b@ud-q4_k_xl-2025", Q4_K),
        ("deepseek-v2-lite@q4_0", Q4_0),
    ],
)
def test_a_models_experts_are_in_the_blocks_of_its_format(model: str, expected: BlockFormat) -> None:
    shape = ExpertShape.of(load_model(model))
    assert shape.kernel.blocks is expected  # type: ignore[attr-defined]
    assert shape.layout.size_bytes == load_model(model).expert_bytes_by_layer[0]


@pytest.mark.parametrize("model", ["qwen3-30b-a3b@q4_k_m", "deepseek-v2-lite@ud-q4_k_xl-2025"])
def test_experts_in_several_blocks_are_refused(model: str) -> None:
    """q4_k_m has half of its down matrices in q6_k; rows of 1408 are no whole blocks of q4_k."""
    with pytest.raises(RefusedError, match=r"4\.5 \(q4_0, q4_k\), got .* mixed ones, and rows that are not"):
        ExpertShape.of(load_model(model))


class Expert:
    def __init__(self, name: str, hidden: int, width: int, gated: bool, tokens: int, seed: int) -> None:
        random, self.blocks = torch.Generator().manual_seed(seed), FORMATS[name]
        first = self.blocks.random_blocks(width * (1 + gated), hidden, random)
        down = self.blocks.random_blocks(hidden, width, random)
        self.views = {
            "gate_up_proj" if gated else "up_proj": self.blocks.packed(first), "down_proj": self.blocks.packed(down)
        }
        self.exact = [torch.from_numpy(dequantised(name, each)) for each in (first, down)]
        self.gated, self.width = gated, width
        self.x = torch.randn(tokens, hidden, generator=random).bfloat16()
        self.choices = torch.randperm(2 * tokens, generator=random)[:tokens]
        self.weights = torch.rand(2 * tokens, generator=random)

    def given(self) -> tuple[Any, ...]:
        return self.x, self.choices, self.weights, 2

    def new(self) -> Tensor:
        return torch.full((len(self.weights), self.x.shape[1]), torch.nan)

    def expected(self) -> tuple[Tensor, Tensor]:
        """As llama.cpp computes it, in float64; and how much one other rounding of an inner value is worth."""
        first, down = self.exact
        inner = in_blocks(self.x[self.choices // 2].double()) @ first.T
        inner = functional.silu(inner[:, : self.width]) * (inner[:, self.width :] if self.gated else 1)
        shares = self.weights[self.choices].unsqueeze(1)
        return in_blocks(inner) @ down.T * shares, inner.abs().amax(1, keepdim=True) / 127 * down.abs().max() * shares


def in_blocks(values: Tensor) -> Tensor:
    """Rounded to 8 bits, blocks of 32 with one scale each: ggml's quantize_row_q8_0, in float32 as there."""
    blocks = values.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    inverse = torch.full_like(largest, 127) / largest  # 127 / largest is rounded twice
    return ((blocks * inverse).round().double() * (largest / 127)).flatten(1)


@st.composite
def experts(draw: st.DrawFn) -> Expert:
    name = draw(st.sampled_from(NAMES))
    size = st.integers(1, 5 if name != "q4_k" else 2).map(lambda count: count * FORMATS[name].weights)
    return Expert(name, draw(size), draw(size), draw(st.booleans()), draw(st.integers(1, 40)), draw(st.integers(0, 99)))


@needs_compiler
class TestNative:
    @pytest.mark.parametrize("name", VARIANTS)
    @settings(max_examples=40)
    @given(expert=experts(), threads=st.integers(1, 3))
    def test_results_are_those_of_blocks_times_blocks(self, name: str, expert: Expert, threads: int) -> None:
        out = expert.new()
        ffn, matrices = variant(name), expert.views.values()
        ffn(*matrices, *expert.given(), out, scattered=True, threads=threads, blocks=expert.blocks)
        expected, step = expert.expected()
        off = (out[expert.choices] - expected).abs()
        assert (off <= 1.2 * step + 1e-6).all(), float((off / step).max())

    @pytest.mark.parametrize("tokens", [1, 2, 3, 4])
    @pytest.mark.parametrize("name", NAMES)
    def test_one_to_four_rows_of_a_real_width(self, name: str, tokens: int) -> None:
        expert = Expert(name, 256, 768, True, tokens, tokens)
        out, (expected, step) = expert.new(), expert.expected()
        variant("this processor")(
            *expert.views.values(), *expert.given(), out, scattered=True, threads=2, blocks=expert.blocks
        )
        off = (out[expert.choices] - expected).abs()
        assert (off <= 1.2 * step + 1e-6).all(), float((off / step).max())
        assert expected.abs().median() > 4 * step.median()  # so that a wrong row would be seen

    @pytest.mark.parametrize("name", VARIANTS)
    @settings(max_examples=10)
    @given(expert=experts())
    def test_results_do_not_depend_on_rows_or_threads(self, name: str, expert: Expert) -> None:
        ffn, matrices, (x, choices, weights, top_k) = variant(name), expert.views.values(), expert.given()
        together, alone = expert.new(), expert.new()
        ffn(*matrices, *expert.given(), together, scattered=True, threads=3, blocks=expert.blocks)
        for row in choices.split(1):
            ffn(*matrices, x, row, weights, top_k, alone, scattered=True, threads=1, blocks=expert.blocks)
        assert torch.equal(alone[choices], together[choices])


class TestKernel:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("gated", [True, False])
    def test_is_torchs_of_unpacked_weights_on_a_gpu_and_without_a_compiler(self, name: str, gated: bool) -> None:
        expert, blocks = Expert(name, 512, 256, gated, 5, 0), FORMATS[name]
        kernel, parts = BlockSwiGlu(gated, blocks=blocks, ffn=None), expert.new()
        unpacked = {name: blocks.unpacked(view) for name, view in expert.views.items()}
        expected = weighted_ffn(SwiGlu(gated), unpacked, *expert.given())
        compute_into(parts, kernel, expert.views, *expert.given())
        assert torch.equal(parts[expert.choices], expected)
        assert torch.equal(weighted_ffn(kernel, expert.views, *expert.given(), torch.empty(5, 512)), expected)

    @needs_compiler
    @pytest.mark.parametrize("tokens", [1, 5, MOST_ROWS, MOST_ROWS + 1])
    def test_is_nearly_the_same_on_the_cpu(self, tokens: int) -> None:
        expert = Expert("q8_0", 64, 96, True, tokens, 0)
        found, wanted = expert.new(), expert.new()
        ffn = variant("this processor")
        choices = addressed(expert.choices)
        x, _, weights, top_k = expert.given()
        compute_into(found, BlockSwiGlu(blocks=Q8_0, ffn=ffn), expert.views, x, choices, weights, top_k)
        compute_into(wanted, BlockSwiGlu(blocks=Q8_0, ffn=None), expert.views, x, choices, weights, top_k)
        off = (found - wanted)[expert.choices].abs().max() / wanted[expert.choices].abs().max()
        assert off < 2**-5
        assert bool(off == 0) == (tokens > MOST_ROWS)
