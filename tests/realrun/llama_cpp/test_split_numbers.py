"""Numbers of a GPU and of experts that stay with the CPU, from the times of an engine of known kernels."""

from __future__ import annotations

import numpy as np
import pytest

from realrun.llama_cpp.bench import BenchPoint, quartiles, time_points
from realrun.llama_cpp.benchmark_models import ON_GPU, bench_models, split_models
from realrun.llama_cpp.kernel_numbers import KernelError, KernelNumbers, plausible_rates
from realrun.llama_cpp.split_numbers import SplitNumbers
from sim.costs.kernel_costs import Kernels, SplitKernels
from tests.kit.fake_engine import FakeSplitContext, known_gpu_kernels, known_split

BLOCKS, THREADS = ("q4_0", "q8_0"), (4, 8)


@pytest.fixture(scope="module")
def samples() -> dict[str, dict[BenchPoint, float]]:
    gpu, split, found = known_gpu_kernels(BLOCKS), known_split(BLOCKS), {}
    for model in (*bench_models(BLOCKS, (1,), ON_GPU), *split_models(BLOCKS, THREADS)):
        times = time_points(FakeSplitContext(model.shape, model.blocks, gpu, split, model.settings), model.points)
        found[model.samples_name] = {point: quartiles(each)[0] for point, each in times.items()}
    return found


@pytest.fixture(scope="module")
def gpu(samples: dict[str, dict[BenchPoint, float]]) -> Kernels:
    return KernelNumbers(samples, BLOCKS, (1,), "made up", ON_GPU).kernels()


@pytest.fixture(scope="module")
def found(samples: dict[str, dict[BenchPoint, float]], gpu: Kernels) -> SplitKernels:
    return SplitNumbers(samples, BLOCKS, THREADS, gpu, "made up").kernels()


def test_rates_of_the_gpu_come_out(gpu: Kernels) -> None:
    for block in BLOCKS:
        for which in ("experts", "others"):
            known, measured = (getattr(each.products[block], which).value for each in (known_gpu_kernels(BLOCKS), gpu))
            assert measured.rows == known.rows
            np.testing.assert_allclose(measured.flops_per_s, known.flops_per_s, rtol=0.05)


def test_fixed_times_and_attention_of_the_gpu_come_out(gpu: Kernels) -> None:
    known = known_gpu_kernels(BLOCKS)
    assert gpu.layer_ns["grouped"].value == pytest.approx(known.layer_ns["grouped"].value, rel=0.05)
    assert gpu.layer_ns["latent"].value == pytest.approx(known.layer_ns["latent"].value, rel=0.05)
    assert gpu.step_ns.value == pytest.approx(known.step_ns.value, rel=0.2)
    assert gpu.attention.tile_rows.value == 2
    for name in ("cache_byte_ns", "pair_ns", "width_ns", "tile_pair_ns", "tile_width_ns"):
        measured, wanted = (getattr(kernels.attention, name).value for kernels in (gpu, known))
        np.testing.assert_allclose(measured, wanted, rtol=0.1, err_msg=name)


def test_rates_of_experts_on_the_cpu_come_out(found: SplitKernels) -> None:
    for block, rates in known_split(BLOCKS).experts.items():
        assert found.experts[block].value.rows == rates.value.rows
        np.testing.assert_allclose(found.experts[block].value.flops_per_s, rates.value.flops_per_s, rtol=0.03)


def test_the_time_of_handing_over_comes_out(found: SplitKernels) -> None:
    known = known_split(BLOCKS)
    assert found.threads == (4, 8)
    assert found.layer_ns.value == pytest.approx(known.layer_ns.value, rel=0.1)
    assert found.chosen_ns.value == pytest.approx(known.chosen_ns.value, rel=0.3)


@pytest.mark.parametrize("memory", ["mapped", "pinned"])
def test_copies_come_out(found: SplitKernels, memory: str) -> None:
    copies, known = getattr(found, memory), getattr(known_split(BLOCKS), memory)
    assert copies.byte_ns.value == pytest.approx(known.byte_ns.value, rel=0.02)
    assert copies.expert_ns.value == pytest.approx(known.expert_ns.value, rel=0.2)
    assert memory in copies.byte_ns.source


def test_more_threads_are_as_fast_as_fewer_at_least_and_in_proportion_at_most() -> None:
    """With 8 threads: slower than with 4, faster by half, and four times as fast, of which twice is taken."""
    found = plausible_rates((1, 2, 4), (4, 8), [[2.0, 3.0, 4.0], [5.0, 2.0, 1.0]], 1e12, "")
    assert found.flops_per_s == ((1e9 / 2, 1e9 / 3, 1e9 / 4), (1e9 / 2, 1e9 / 2, 1e9 / 2))


def test_experts_with_more_threads_that_other_programs_held_up_are_as_fast_as_with_fewer(
    samples: dict[str, dict[BenchPoint, float]], gpu: Kernels
) -> None:
    slow = {
        name: {point: ns * (3 if point.threads == 8 else 1) for point, ns in times.items()}
        for name, times in samples.items()
    }
    found = SplitNumbers(slow, BLOCKS, THREADS, gpu, "").kernels()
    for rates in found.experts.values():
        few, many = rates.value.flops_per_s
        assert many == few


def test_times_from_which_no_rate_follows_are_refused(
    samples: dict[str, dict[BenchPoint, float]], gpu: Kernels
) -> None:
    same = {name: dict.fromkeys(times, 1.0) if "-split" in name else times for name, times in samples.items()}
    with pytest.raises(KernelError, match="on the GPU and on the CPU: no rate follows from their times; measure again"):
        SplitNumbers(same, BLOCKS, THREADS, gpu, "").kernels()
