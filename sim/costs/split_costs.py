"""Cost tables of a machine with a GPU, from the kernels of an engine that were measured on it (``sim.costs.kernels``,
``sim.costs.split_kernels``). A machine without one: ``sim.costs.kernel_costs``.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, by_layer
from sim.costs.kernel_costs import KernelSteps, whole_ns
from sim.costs.kernels import Floats, Kernels
from sim.costs.split_kernels import SplitKernels
from sim.machine.hardware import Hardware
from traces.models.gguf_blocks import blocks_of
from traces.models.shape import ModelShape
from trilane.common.names import unknown
from trilane.machines.plausibility import HardwareError


def split_costs(
    shape: ModelShape, hardware: Hardware, gpu: Kernels, split: SplitKernels, copies: Literal["pinned", "pageable"],
    max_tokens: int, threads: int,
) -> CostTable:  # fmt: skip
    """The cost table for workloads 0..``max_tokens``; ``copies``: host memory from which experts are copied.

    Raises HardwareError for weights that were not measured.
    """
    steps, place = KernelSteps(shape, blocks_of(shape), gpu, gpu.place(1)), split.place(threads)
    rows = np.arange(max_tokens + 1.0)
    gpu_ns, cpu_ns = whole_ns(steps.expert_ns(rows)), whole_ns(cpu_expert_ns(shape, split, rows, place))
    copied = split.pinned if copies == "pinned" else split.mapped

    def costs_of(size: int) -> ExpertCosts:
        copy_ns = max(round(copied.ns(size)), 1)
        return ExpertCosts(
            gpu_ns=gpu_ns, cpu_ns=cpu_ns, first_cpu_ns=round(split.layer_ns.value[place]), copy_ns=copy_ns,
            expert_bytes=size, writeback_ns=copy_ns,  # not measured: llama.cpp does not write experts back
            cpu_permille=hardware.contention.cpu_permille, copy_permille=hardware.contention.copy_permille,
            between_ns=0, both_ways_permille=hardware.both_ways_permille,
        )  # fmt: skip

    return CostTable(by_layer(shape, costs_of), steps, hardware.link.result_path)


def cpu_expert_ns(shape: ModelShape, split: SplitKernels, rows: Floats, place: int) -> Floats:
    """One expert on the CPU with each number of rows, and what becomes of its output."""
    blocks, matrix = blocks_of(shape), 2.0 * shape.hidden * shape.expert_width
    parts = [(blocks.gate_up, shape.matrices_per_expert - 1), (blocks.down, 1)]
    found = rows * shape.hidden * split.chosen_ns.value[place]
    for mix, matrices in parts:
        for block, part in mix.items():
            if block not in split.experts:
                raise HardwareError(
                    f"model {shape.name!r}: experts' weights were not measured on the CPU next to a GPU: "
                    f"{unknown('block', block, split.experts)}"
                )
            found = found + part * split.experts[block].value.ns(matrices * matrix, rows, place)
    return found
