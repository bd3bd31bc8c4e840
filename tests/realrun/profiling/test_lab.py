"""Under cover: how long a GPU is kept busy, and that weights are not read from caches there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realrun.machine.cuda_lanes import CudaLanes
from realrun.profiling import lab as cover
from realrun.profiling import lab as lab_module
from realrun.profiling.lab import COVER_NS, WARM_NS, GpuCover, Lab, Points, cache_bytes, layers_beyond
from tests.kit.fake_cuda import BOOST_GHZ, IDLE_GHZ, FakeCuda
from tests.kit.fake_machine import FakeMachine, FakeModel
from traces.models.catalogue import load_model

pytestmark = pytest.mark.timeout(30)
POINTS = Points((1,), (4,), (2,))


def sleeping(cuda: FakeCuda) -> Any:
    """Work that takes a GPU of idle clocks some 30 ms."""
    return lambda: cuda.sleep(10**7)


@pytest.mark.parametrize("rises_after_ns", [0, WARM_NS // 2])
def test_a_cover_lasts_3_ms_however_low_the_clocks_are_at_first(
    cuda: FakeCuda, machine: CudaLanes, rises_after_ns: int
) -> None:
    cuda.rises_after_ns = rises_after_ns
    completion = GpuCover(machine, lambda: sleeping(cuda))()
    completion.wait()
    assert completion.end_ns - completion.start_ns == pytest.approx(COVER_NS, rel=1e-3)
    assert cuda.busy_ns > WARM_NS


def test_nor_does_it_depend_on_what_they_rise_to(cuda: FakeCuda, machine: CudaLanes) -> None:
    cuda.rises_after_ns = 10**15  # never
    completion = GpuCover(machine, lambda: sleeping(cuda))()
    completion.wait()
    assert completion.end_ns - completion.start_ns == pytest.approx(COVER_NS, rel=1e-3)
    assert BOOST_GHZ > 5 * IDLE_GHZ  # in which the sleep that was measured took longer


# --- caches -----------------------------------------------------------------------------------------------------------


def test_the_cache_of_a_gpu_is_what_its_driver_says(cuda: FakeCuda, machine: CudaLanes) -> None:
    assert cache_bytes(machine.device) == cuda.l2_bytes


def test_the_cache_of_a_processor_is_its_largest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(cover, "CPU_CACHES", tmp_path)
    assert cache_bytes(torch.device("cpu")) == 32 << 20
    monkeypatch.setattr(cover, "CPU_CACHES", tmp_path / "none")
    assert cache_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize(("l2_bytes", "layers"), [(0, 0), (50_000_000, 8), (72_000_000, 11)])  # none, H200, RTX 4090
def test_attention_is_read_from_memory(l2_bytes: int, layers: int) -> None:
    shape = load_model("deepseek-v2-lite")
    assert layers_beyond(l2_bytes, shape, torch.bfloat16) == layers
    assert 2 * layers * shape.attention_params >= 4 * l2_bytes


def test_a_shape_without_a_count_has_q_k_v_and_o_as_their_widths_say() -> None:
    shape = replace(load_model("deepseek-v2-lite"), attention_params=0, heads=16, kv_heads=16, head_dim=128)
    a_layer = 4 * 16 * 128 * shape.hidden * 2
    assert layers_beyond(a_layer, shape, torch.bfloat16) == 4
    assert layers_beyond(a_layer + 1, shape, torch.bfloat16) == 5


def test_more_layers_of_attention_need_no_more_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(load_model("mini-moe"), moe_layers=9)

    def lab(cache: int) -> Lab:
        monkeypatch.setattr(lab_module, "cache_bytes", lambda device: cache)
        monkeypatch.setattr(lab_module, "EXPERTS_BYTES", 1000)
        machine: Any = FakeMachine()
        model: Any = FakeModel(machine, shape.top_k)
        return Lab(machine, shape, POINTS, model)

    none, large, huge = lab(0), lab(7 * 2 * shape.attention_params // 4), lab(10**12)
    assert [each.shape.moe_layers for each in (none, large, huge)] == [4, 7, 9]
    assert none.arena.shape == large.arena.shape == huge.arena.shape
    assert {large.next_layer() for _ in range(7)} == set(range(7))
    assert {huge.next_experts(1)[0] for _ in range(9)} == set(range(4))
