"""Experts whose weights are in blocks of ggml's: unpacked by torch, or multiplied as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from realrun.experts.ffn import MOST_ROWS, BlockSwiGlu, SwiGlu, addressed, compute_into, weighted_ffn
from realrun.experts.store import (
    ExpertLayout,
    random_store,
)
from realrun.machine.native_ffn import BLOCK, FORMATS, Q4_0, Q8_0, BlockFormat
from realrun.machine.pinned import plain
from tests.realrun.machine.test_native_ffn import needs_compiler
from tests.realrun.machine.test_native_ffn_results import VARIANTS, variant

HALF = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)  # two bytes


class TestUnpacked:
    def test_q8_0_is_a_scale_and_32_signed_bytes(self) -> None:
        numbers = torch.arange(-16, 16).to(torch.int8)
        packed = torch.cat((HALF, numbers.view(torch.uint8))).repeat(3, 2)
        assert torch.equal(Q8_0.unpacked(packed), (numbers * 0.5).bfloat16().repeat(3, 2))

    def test_q4_0_is_a_scale_and_32_halves_of_bytes_the_lower_ones_first(self) -> None:
        numbers = torch.cat((torch.arange(16), torch.arange(16).flip(0)))
        packed = torch.cat((HALF, (numbers[:16] + 16 * numbers[16:]).to(torch.uint8))).repeat(3, 2)
        assert torch.equal(Q4_0.unpacked(packed), ((numbers - 8) * 0.5).bfloat16().repeat(3, 2))

    @pytest.mark.parametrize("blocks", FORMATS.values())
    def test_random_experts_are_neither_large_nor_denormal(self, blocks: BlockFormat) -> None:
        store = random_store(ExpertLayout.from_shape(64, 96, blocks), 1, 3, plain)
        for expert in range(3):
            for view in store.layouts[0].views(store.buffer(0, expert)).values():
                magnitudes = blocks.unpacked(view).abs()
                assert 1e-4 < magnitudes.median() < 0.1
                assert magnitudes.max() < 0.1

    @pytest.mark.parametrize(("bits", "blocks"), FORMATS.items())
    def test_rows_have_the_bytes_that_their_bits_say(self, bits: float, blocks: BlockFormat) -> None:
        assert blocks.row_bytes(256) * 8 == bits * 256


class Expert:
    def __init__(self, blocks: BlockFormat, hidden: int, width: int, gated: bool, tokens: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        first = "gate_up_proj" if gated else "up_proj"
        self.views = {
            first: blocks.random(width * (1 + gated), hidden, random), "down_proj": blocks.random(hidden, width, random)
        }
        self.blocks, self.gated, self.width = blocks, gated, width
        self.x = torch.randn(tokens, hidden, generator=random).bfloat16()
        self.choices = torch.randperm(2 * tokens, generator=random)[:tokens]
        self.weights = torch.rand(2 * tokens, generator=random)

    def given(self) -> tuple[Any, ...]:
        return self.x, self.choices, self.weights, 2

    def new(self) -> Tensor:
        return torch.full((len(self.weights), self.x.shape[1]), torch.nan)

    def expected(self) -> tuple[Tensor, Tensor]:
        """As llama.cpp computes it, in float64; and how much one other rounding of an inner value is worth."""
        first, down = (exact(self.blocks, view) for view in self.views.values())
        inner = in_blocks(self.x[self.choices // 2].double()) @ first.T
        inner = functional.silu(inner[:, : self.width]) * (inner[:, self.width :] if self.gated else 1)
        shares = self.weights[self.choices].unsqueeze(1)
        return in_blocks(inner) @ down.T * shares, inner.abs().amax(1, keepdim=True) / 127 * down.abs().max() * shares


def exact(blocks: BlockFormat, packed: Tensor) -> Tensor:
    """Weights in float64, which ``unpacked`` rounds to bfloat16."""
    each = packed.unflatten(1, (-1, blocks.block_bytes))
    return (blocks.numbers(each[..., 2:]) * each[..., :2].contiguous().view(torch.float16).double()).flatten(1)


def in_blocks(values: Tensor) -> Tensor:
    """Rounded to 8 bits, blocks of 32 with one scale each: ggml's quantize_row_q8_0, in float32 as there."""
    blocks = values.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    inverse = torch.full_like(largest, 127) / largest  # 127 / largest is rounded twice
    return ((blocks * inverse).round().double() * (largest / 127)).flatten(1)


@st.composite
def experts(draw: st.DrawFn) -> Expert:
    size = st.integers(1, 5).map(lambda count: count * BLOCK)
    return Expert(
        draw(st.sampled_from(tuple(FORMATS.values()))), draw(size), draw(size), draw(st.booleans()),
        draw(st.integers(1, 40)), draw(st.integers(0, 999)),
    )


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
    @pytest.mark.parametrize("blocks", FORMATS.values())
    @pytest.mark.parametrize("gated", [True, False])
    def test_is_torchs_of_unpacked_weights_on_a_gpu_and_without_a_compiler(
        self, blocks: BlockFormat, gated: bool
    ) -> None:
        expert = Expert(blocks, 64, 32, gated, 5, 0)
        kernel, parts = BlockSwiGlu(gated, blocks=blocks, ffn=None), expert.new()
        unpacked = {name: blocks.unpacked(view) for name, view in expert.views.items()}
        expected = weighted_ffn(SwiGlu(gated), unpacked, *expert.given())
        compute_into(parts, kernel, expert.views, *expert.given())
        assert torch.equal(parts[expert.choices], expected)
        assert torch.equal(weighted_ffn(kernel, expert.views, *expert.given(), torch.empty(5, 64)), expected)

    @needs_compiler
    @pytest.mark.parametrize("tokens", [1, 5, MOST_ROWS, MOST_ROWS + 1])
    def test_is_nearly_the_same_on_the_cpu(self, tokens: int) -> None:
        expert = Expert(Q8_0, 64, 96, True, tokens, 0)
        found, wanted = expert.new(), expert.new()
        ffn = variant("this processor")
        choices = addressed(expert.choices)
        x, _, weights, top_k = expert.given()
        compute_into(found, BlockSwiGlu(blocks=Q8_0, ffn=ffn), expert.views, x, choices, weights, top_k)
        compute_into(wanted, BlockSwiGlu(blocks=Q8_0, ffn=None), expert.views, x, choices, weights, top_k)
        off = (found - wanted)[expert.choices].abs().max() / wanted[expert.choices].abs().max()
        assert off < 2**-5
        assert bool(off == 0) == (tokens > MOST_ROWS)
