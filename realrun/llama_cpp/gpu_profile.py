"""What is measured of an engine on a machine with a GPU: its kernels there, and experts that stay with the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from realrun.llama_cpp.bench_sizes import ON_GPU
from realrun.llama_cpp.benchmark_models import BenchModel, bench_models, split_models
from realrun.llama_cpp.kernel_engine import GpuNumbers
from realrun.llama_cpp.kernel_numbers import KernelNumbers
from realrun.llama_cpp.product_times import Samples
from realrun.llama_cpp.split_numbers import SplitNumbers

_HOST_THREADS = (1,)  # of models that are on the GPU throughout


def gpu_models(blocks: tuple[str, ...], threads: tuple[int, ...]) -> Iterator[BenchModel]:
    """All models that are timed; ``threads``: of the CPU, for experts that stay there."""
    yield from bench_models(blocks, _HOST_THREADS, ON_GPU)
    yield from split_models(blocks, threads)


def gpu_numbers(samples: Samples, blocks: tuple[str, ...], threads: tuple[int, ...], where: str) -> GpuNumbers:
    """The numbers that follow from their times. Raises KernelError where a machine was too busy."""
    gpu = KernelNumbers(samples, blocks, _HOST_THREADS, where, ON_GPU).kernels()
    return GpuNumbers(gpu, SplitNumbers(samples, blocks, threads, gpu, where).kernels())
