"""Cost tables of an engine that was fitted to measured speeds, such as llama.cpp.

With R the rate at which a processor reads weights in this engine (``sim.costs.processors``):

====================  ==============================================================================================
attention, a layer    weights + max(keys and values / R x a factor, products) + fixed time of the layer
expert                weights; the first one of a layer on the CPU adds the time of handing over
others                weights; a step adds a fixed time
weights               GPU: weights / R + products of all rows but one; CPU: max(weights / R, products)
====================  ==============================================================================================

The fixed times of a layer hold what an engine's kernels cost in addition to their bytes, launches included, so that
launches are free here; one that decides nothing on the host waits for no routing. A machine without a GPU computes all
of it on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts, by_layer
from sim.costs.engine import FittedEngine
from sim.costs.fitted_engine import PromptWork
from sim.costs.kernel_costs import kernel_costs, split_costs
from sim.costs.processors import CpuProcessor, GpuProcessor, Processor, layer_kind, saturated
from sim.costs.roofline_costs import ACTIVATION_BYTES, ROUTING_BYTES, attention_work
from sim.machine.hardware import Hardware
from sim.machine.interpolation import table_ns, time_ns, whole
from sim.machine.plan_costs import PlanCosts
from traces.models.attention import Attention
from traces.models.shape import ModelShape


def fitted_costs(
    shape: ModelShape,
    hardware: Hardware,
    engine: FittedEngine,
    max_tokens: int,
    *,
    threads: int | None = None,
    repacked: bool = False,
) -> CostTable:
    """The cost table for workloads 0..``max_tokens``; ``threads`` None: one a core; ``repacked``: ``CpuProcessor``."""
    if engine.kernels is not None and hardware.cpu_only:
        return kernel_costs(shape, hardware, engine.kernels, max_tokens, threads or hardware.cpu.cores)
    if engine.gpu_kernels is not None and engine.split is not None and not hardware.cpu_only:
        return split_costs(
            shape, hardware, engine.gpu_kernels, engine.split, engine.prompt.copies.value, max_tokens,
            threads or hardware.cpu.cores,
        )
    cpu = CpuProcessor(hardware.cpu, engine.cpu, engine.prompt, threads or hardware.cpu.cores, repacked)
    main: Processor = cpu if hardware.cpu_only else GpuProcessor(hardware.gpu, engine.gpu)
    steps = FittedSteps(shape, hardware, engine, main, cpu)
    sync_ns = engine.spin_ns.value if engine.decides and engine.spin_ns else 0
    if engine.cpu_in_turn:
        sync_ns += round(engine.cpu.layer_ns.value)
    return CostTable(
        experts=by_layer(shape, hardware, lambda size: steps.expert(size, max_tokens)),
        steps=steps,
        sync_ns=sync_ns,
        serial=engine.cpu_in_turn,
        result_path=hardware.link.result_path,
        plan_costs=hardware.plan_costs if engine.decides else PlanCosts(),
        plan_factor=hardware.host.plan_factor,
    )


_COPIES_POWER = 3  # how sharply copies saturate


@dataclass(frozen=True)
class FittedSteps:
    """Step costs outside the routed experts, on the ``main`` processor, and those of one expert."""

    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    main: Processor
    cpu: CpuProcessor

    def expert(self, size: int, max_tokens: int) -> ExpertCosts:
        """Tables of one routed expert of ``size`` bytes."""
        shape, link = self.shape, self.hardware.link
        rows, flops = np.arange(max_tokens + 1), 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width
        copies_per_s = copy_bytes_per_s(self.hardware, self.engine.prompt)
        no_visit = self.hardware.cpu_only or self.engine.cpu_in_turn  # of the first expert: a wait of every layer then
        return ExpertCosts(
            gpu_ns=table_ns(self.main.expert_ns(size, shape.weight_bits, flops, rows)),
            cpu_ns=table_ns(self.cpu.expert_ns(size, shape.weight_bits, flops, rows)),
            first_cpu_ns=0 if no_visit else round(self.engine.cpu.layer_ns.value),
            copy_ns=time_ns(link.h2d_latency_ns + size / copies_per_s * 1e9),
            expert_bytes=size,
            writeback_ns=link.d2h_ns(size),
        )

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        shape, main, link = self.shape, self.main, self.hardware.link
        attention_ns = shape.mean_of_layers(lambda kind: self._kind(kind, tokens, context))
        hidden_bytes = tokens * shape.hidden * ACTIVATION_BYTES
        gate_ns = self._product(shape.hidden * shape.experts, tokens) + main.mixture_fixed_ns
        return StepCosts(
            attention_ns=time_ns(attention_ns),
            dense_ns=whole(
                shape.dense_layers
                * (attention_ns + self._product(shape.dense_ffn_params, tokens) + main.mixture_fixed_ns)
            ),
            gate_ns=time_ns(gate_ns),
            speculate_ns=time_ns(gate_ns),
            estimator_ns=time_ns(gate_ns),
            shared_ns=whole(self._product(shape.shared_params, tokens)),
            combine_ns=time_ns(main.read_ns((shape.top_k + 2) * hidden_bytes, 16)),
            head_ns=time_ns(self._product(shape.vocab * shape.hidden, len(context)) + main.step_ns),
            routing_ns=link.d2h_ns(tokens * shape.top_k * ROUTING_BYTES) if self.engine.decides else 0,
            activations_ns=link.d2h_ns(hidden_bytes),
            result_ns=link.h2d_ns(hidden_bytes),
        )

    def _kind(self, kind: Attention, tokens: int, context: Sequence[int]) -> float:
        """Norms and attention of a layer of one kind."""
        main, name = self.main, layer_kind(kind)
        read, pairs = attention_work(kind, tokens, context)
        cache_ns = main.cache_ns(read * kind.kv_width, self.shape.cache_bits, name)
        state_ns = main.cache_ns(2.0 * len(context) * kind.state_bytes, 8, "state")
        scores_ns = main.attention_ns(4.0 * kind.heads * kind.head_dim * pairs, self.shape.cache_bits, tokens)
        return self._product(kind.params, tokens) + max(cache_ns, scores_ns) + state_ns + main.attention_fixed_ns(name)

    def _product(self, weights: int, tokens: int) -> float:
        """``weights`` matrix elements applied to ``tokens`` rows."""
        bits = self.shape.dense_bits
        return self.main.matrix_ns(weights * bits / 8, bits, 2.0 * weights, tokens)


def copy_bytes_per_s(hardware: Hardware, prompt: PromptWork) -> float:
    """Rate of copies of experts. The link and the host's memory limit those from pinned memory; those from pageable
    memory cross the host's three times, since a thread of the driver puts them into pinned memory first.
    """
    link, memory = hardware.link.h2d_bytes_per_s, hardware.cpu.read_bytes_per_s
    if prompt.copies.value == "pinned":
        return saturated(link, memory, power=_COPIES_POWER)
    shares = link * prompt.link_share.value, memory * prompt.memory_share.value
    return saturated(*shares, prompt.staging_bytes_per_s.value, power=_COPIES_POWER)
