"""Results of the native kernel of experts: torch's but for rounding, and its place among the executor's kernels."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realrun.experts import ffn as expert_shape
from realrun.experts.ffn import ExpertShape, NativeSwiGlu, SwiGlu, addressed, compute_into, expert_ffn, weighted_ffn
from realrun.experts.store import ExpertLayout
from realrun.machine.native_ffn import (
    SOURCE,
    NativeFfn,
    NotCompiledError,
    loaded,
)
from realrun.replay.replay import ReplayBench, room_for
from tests.kit.tiny_bench import machine, tiny_setting
from tests.realrun.experts.test_store import TOY
from tests.realrun.machine.test_native_ffn import needs_compiler

VARIANTS: dict[str, Sequence[str]] = {
    "this processor": (),
    "AVX-512 without BF16": ("-mno-avx512bf16",),
    "AVX2": ("-mno-avx512f",),
    "no vectors but SSE2": ("-mno-avx512f", "-mno-avx2", "-mno-fma"),
}


@lru_cache
def variant(name: str) -> NativeFfn:
    """Skips what is for other processors than this one."""
    try:
        return loaded(SOURCE, VARIANTS[name])
    except NotCompiledError as error:
        pytest.skip(str(error))


class Expert:
    """Weights and inputs that are small multiples of 1/8: gate and up are exact in any order of additions."""

    def __init__(self, hidden: int, width: int, gated: bool, tokens: int, top_k: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return (torch.randint(-2, 3, shape, generator=random) / 8).bfloat16()

        layout = ExpertLayout.from_shape(hidden, width, torch.bfloat16, gated)
        self.views = layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8))
        for value in self.views.values():
            value.copy_(draw(*value.shape))
        self.x, self.top_k = draw(tokens, hidden) * 8, top_k
        self.choices = torch.randperm(tokens * top_k, generator=random)[:tokens]
        self.weights = torch.rand(tokens * top_k, generator=random)

    def given(self, choices: Tensor | slice | None = None) -> tuple[Any, ...]:
        return self.views, self.x, self.choices if choices is None else choices, self.weights, self.top_k

    def new(self, rows: int | None = None) -> Tensor:
        return torch.full((len(self.choices) if rows is None else rows, self.x.shape[1]), torch.nan)


@st.composite
def experts(draw: st.DrawFn) -> Expert:
    size = st.integers(1, 200)
    return Expert(
        draw(size), draw(size), draw(st.booleans()), draw(st.integers(1, 40)), draw(st.integers(1, 4)),
        draw(st.integers(0, 999)),
    )


def spread(expert: Expert, gated: bool) -> Tensor:
    """The most that each result may be off: a rounding of itself, and of one inner value if SiLU falls between two."""
    rows = expert.x[expert.choices // expert.top_k]
    views = {name: value.float() for name, value in expert.views.items()}
    inner = rows.float() @ next(iter(views.values())).T
    inner = SwiGlu()._apply_gate(inner) if gated else SwiGlu().act_fn(inner)
    largest = (inner[:, None, :] * views["down_proj"]).abs().amax(-1)
    total = expert_ffn(SwiGlu(gated), views, rows.float()).abs()
    return (2**-7 * (largest + total) + 1e-6) * expert.weights[expert.choices].unsqueeze(1)


@needs_compiler
class TestResults:
    @pytest.mark.parametrize("name", VARIANTS)
    @settings(max_examples=40)
    @given(expert=experts(), threads=st.integers(1, 3))
    def test_are_torchs_but_for_rounding(self, name: str, expert: Expert, threads: int) -> None:
        ffn, gated = variant(name), "gate_up_proj" in expert.views
        first, down = expert.views.values()
        parts = expert.new(len(expert.weights))
        ffn(first, down, *expert.given()[1:], parts, scattered=True, threads=threads)
        expected = weighted_ffn(SwiGlu(gated), *expert.given())
        off = (parts[expert.choices] - expected).abs()
        assert (off <= spread(expert, gated)).all(), float(off.max())
        assert parts.isnan().all(1).sum() == len(expert.weights) - len(expert.choices)  # other rows: as they were

    @pytest.mark.parametrize("name", VARIANTS)
    @settings(max_examples=10)
    @given(expert=experts())
    def test_do_not_depend_on_rows_or_threads(self, name: str, expert: Expert) -> None:
        ffn = variant(name)
        first, down = expert.views.values()

        def computed(choices: Tensor, threads: int) -> Tensor:
            out = expert.new(len(choices))
            ffn(first, down, expert.x, choices, expert.weights, expert.top_k, out, scattered=False, threads=threads)
            return out

        together = computed(expert.choices, 1)
        assert torch.equal(computed(expert.choices, 3), together)
        assert torch.equal(torch.cat([computed(row, 1) for row in expert.choices.split(1)]), together)

    def test_are_right_in_the_memory_of_many_calls_from_several_threads(self) -> None:
        ffn, expert = variant("this processor"), Expert(96, 80, True, 3, 2, 0)
        first, down = expert.views.values()
        expected = expert.new()
        ffn(first, down, *expert.given()[1:], expected, scattered=False, threads=1)
        wrong: list[int] = []

        def call(threads: int) -> None:
            for turn in range(200):
                out = expert.new()
                ffn(first, down, *expert.given()[1:], out, scattered=False, threads=threads)
                if not torch.equal(out, expected):
                    wrong.append(turn)

        callers = [threading.Thread(target=call, args=(threads,)) for threads in (1, 2, 3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong


@needs_compiler
class TestKernel:
    """``NativeSwiGlu`` among the executor's kernels."""

    def test_computes_rows_into_their_places(self) -> None:
        expert, kernel = Expert(64, 48, True, 5, 2, 1), NativeSwiGlu(ffn=variant("this processor"))
        rows, parts = weighted_ffn(kernel, *expert.given(), expert.new()), expert.new(10)
        compute_into(parts, kernel, *expert.given())
        assert torch.equal(parts[expert.choices], rows)
        one = expert.choices[2:3]
        compute_into(alone := expert.new(10), kernel, *expert.given(addressed(one)))
        assert torch.equal(alone[one], rows[2:3])

    @pytest.mark.parametrize("bits", [16.0, 8.5, 4.5])
    def test_is_used_on_both_lanes_of_a_replay(self, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: set[str] = set()
        call = NativeFfn.__call__

        def watched(self: NativeFfn, *given: Any, **options: Any) -> None:
            seen.add(threading.current_thread().name)
            call(self, *given, **options)

        monkeypatch.setattr(expert_shape, "native_ffn", lambda: variant("this processor"))
        monkeypatch.setattr(NativeFfn, "__call__", watched)
        setting = tiny_setting(policy="fiddler")
        setting = replace(setting, shape=replace(setting.shape, weight_bits=bits, expert_width=32))
        with machine() as lanes:
            ReplayBench(lanes, setting.shape, room_for([setting])).measure(setting.with_policy("fiddler"))
        assert seen == {"gpu", "cpu"}

    @pytest.mark.parametrize("change", ["rows", "type", "gaps"])
    def test_leaves_to_torch_what_it_is_not_for(self, change: str) -> None:
        expert, ffn = Expert(64, 48, True, 9, 2, 1), variant("this processor")
        if change == "rows":
            monkey = NativeFfn.__new__(NativeFfn)
            monkey.__dict__.update(vars(ffn), only_up_to=8)
            ffn = monkey
        if change == "type":
            expert.views = {name: value.float() for name, value in expert.views.items()}
            expert.x = expert.x.float()
        if change == "gaps":
            expert.x = expert.x.repeat(1, 2)[:, ::2]
        kernel, given = NativeSwiGlu(ffn=ffn), expert.given()
        assert not kernel.compute(*given, expert.new(), scattered=False)
        assert torch.equal(weighted_ffn(kernel, *given, expert.new()), weighted_ffn(SwiGlu(), *given))

    def test_is_of_bfloat16_alone(self) -> None:
        kinds = {bits: type(ExpertShape.of(replace(TOY, weight_bits=bits)).kernel) for bits in (16.0, 32.0)}
        assert kinds == {16.0: NativeSwiGlu, 32.0: SwiGlu}
