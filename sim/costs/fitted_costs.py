"""Cost tables of an engine that was fitted to measured speeds, such as llama.cpp.

With R the rate at which a processor reads weights in this engine (``Processor``):

====================  ==============================================================================================
attention, a layer    weights + max(keys and values / R x a factor, products; a GPU's of all rows but one a sequence)
                      + the state of linear attention / R + its reads for all rows but one + fixed time of the layer
expert                weights; the first one of a layer on the CPU adds the time of handing over and of three regions
others                weights; a step adds a fixed time
weights               GPU: weights / R + products of all rows but one, at most what each row takes by itself;
                      CPU: max(weights / R, products)
====================  ==============================================================================================

The fixed times of a layer hold what an engine's kernels cost in addition to their bytes, launches included, so that
launches are free here; one that decides nothing on the host waits for no routing. A machine without a GPU computes all
of it on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts, by_layer
from sim.costs.engine import FittedEngine, LatentProducts, NumaMode, PromptWork
from sim.costs.kernel_costs import kernel_costs, split_costs
from sim.costs.processors import AttentionWork, CpuProcessor, GpuProcessor, Processor, layer_kind, saturated
from sim.costs.roofline_costs import ACTIVATION_BYTES, ROUTING_BYTES, attention_work
from sim.machine.hardware import Hardware
from sim.machine.interpolation import table_ns, time_ns, whole
from sim.machine.plan_costs import PlanCosts
from traces.models.attention import STATE_BYTES, Attention
from traces.models.codings import codings_of
from traces.models.shape import ModelShape

UNPACKED_FROM = 128  # tokens: keys and values of all heads are made of a latent (ikawrakow/ik_llama.cpp, pp_opt)
ROTARY_WIDTH = 64  # of a latent: elements that are keys and no values, in every DeepSeek and GLM
_COPIES_POWER = 3  # estimate: how sharply copies saturate


def fitted_costs(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, max_tokens: int, *, threads: int | None = None,
    repacked: bool = False, numa: NumaMode | None = None,
) -> CostTable:
    """The cost table for workloads 0..``max_tokens``. ``threads``: None is one a fast core. ``repacked``,
    ``numa``: see ``CpuProcessor``."""
    if engine.kernels is not None and hardware.cpu_only:
        return kernel_costs(shape, hardware, engine.kernels, max_tokens, threads or hardware.cpu.cores)
    if engine.gpu_kernels is not None and engine.split is not None and not hardware.cpu_only:
        return split_costs(
            shape, hardware, engine.gpu_kernels, engine.split, engine.prompt.copies.value, max_tokens,
            threads or hardware.cpu.cores,
        )
    threads = threads or hardware.cpu.fast_cores
    cpu = CpuProcessor(hardware.cpu, engine.cpu, engine.prompt, threads, repacked, codings_of(shape), numa)
    main: Processor = cpu if hardware.cpu_only else GpuProcessor(hardware.gpu, engine.gpu, codings_of(shape))
    steps = FittedSteps(shape, hardware, engine, main, cpu)
    sync_ns = engine.spin_ns.value if engine.decides and engine.spin_ns else 0
    if engine.cpu_in_turn:
        sync_ns += round(engine.cpu.layer_ns.value + cpu.mixture_fixed_ns)
    return CostTable(
        experts=by_layer(shape, hardware, lambda size: steps.expert(size, max_tokens)),
        steps=steps,
        sync_ns=sync_ns,
        serial=engine.cpu_in_turn,
        result_path=hardware.link.result_path,
        plan_costs=hardware.plan_costs if engine.decides else PlanCosts(),
        plan_factor=hardware.host.plan_factor,
    )


@dataclass(frozen=True)
class FittedSteps:
    """Step costs outside the routed experts, on the ``main`` processor, and those of one expert."""

    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    main: Processor
    cpu: CpuProcessor
    _steps: dict[tuple[int, int], StepCosts] = field(default_factory=dict, init=False, repr=False, compare=False)
    _products: dict[tuple[int, float, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def expert(self, size: int, max_tokens: int) -> ExpertCosts:
        """Tables of one routed expert of ``size`` bytes."""
        shape, link = self.shape, self.hardware.link
        rows, flops = np.arange(max_tokens + 1), 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width
        copies_per_s = copy_bytes_per_s(self.hardware, self.engine.prompt)
        no_visit = self.hardware.cpu_only or self.engine.cpu_in_turn  # of the first expert: a wait of every layer then
        return ExpertCosts(
            gpu_ns=table_ns(self.main.expert_ns(size, shape.weight_bits, flops, rows)),
            cpu_ns=table_ns(self.cpu.expert_ns(size, shape.weight_bits, flops, rows)),
            first_cpu_ns=0 if no_visit else round(self.engine.cpu.layer_ns.value + self.cpu.mixture_fixed_ns),
            copy_ns=time_ns(link.h2d_latency_ns + size / copies_per_s * 1e9),
            expert_bytes=size,
            writeback_ns=link.d2h_ns(size),
        )

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        shape = self.shape
        attention_ns = shape.mean_of_layers(lambda kind: self._kind(kind, tokens, context))
        dense_ns = attention_ns + self._product(shape.dense_ffn_params, shape.bits.dense, tokens)
        dense_ns += self.main.mixture_fixed_ns
        return self._without_context(tokens, len(context))._replace(
            attention_ns=time_ns(attention_ns), dense_ns=whole(shape.dense_layers * dense_ns)
        )

    def _without_context(self, tokens: int, sequences: int) -> StepCosts:
        """Return the costs that the lengths of the sequences do not change; attention and dense layers are 0."""
        if (known := self._steps.get((tokens, sequences))) is not None:
            return known
        shape, main, link, bits = self.shape, self.main, self.hardware.link, self.shape.bits
        hidden_bytes = tokens * shape.hidden * ACTIVATION_BYTES
        gate_ns = time_ns(self._product(shape.hidden * shape.experts, bits.router, tokens) + main.mixture_fixed_ns)
        known = self._steps[tokens, sequences] = StepCosts(
            attention_ns=0,
            dense_ns=0,
            gate_ns=gate_ns,
            speculate_ns=gate_ns,
            estimator_ns=gate_ns,
            shared_ns=whole(self._product(shape.shared_params, bits.shared, tokens)),
            combine_ns=time_ns(main.read_ns((shape.top_k + 2) * hidden_bytes, 16)),
            head_ns=time_ns(self._product(shape.vocab * shape.hidden, bits.head, sequences) + main.step_ns),
            routing_ns=link.d2h_ns(tokens * shape.top_k * ROUTING_BYTES) if self.engine.decides else 0,
            activations_ns=link.d2h_ns(hidden_bytes),
            result_ns=link.h2d_ns(hidden_bytes),
        )
        return known

    def _kind(self, kind: Attention, tokens: int, context: Sequence[int]) -> float:
        """Norms and attention of a layer of one kind."""
        main, name = self.main, layer_kind(kind)
        read, pairs = attention_work(kind, tokens, context)
        cache_ns = main.cache_ns(read * kind.kv_width, self.shape.cache_bits, name)
        state_ns = main.cache_ns(2.0 * len(context) * kind.state_bytes, 8, "state")
        state_ns += main.state_ns(kind.state_bytes / STATE_BYTES, tokens - len(context))
        flops = attention_flops(kind, self.engine.prompt.latent.value, tokens, pairs, read)
        work = AttentionWork(flops, pairs * kind.heads, read * kind.kv_width, self.shape.cache_bits)
        scores_ns = main.attention_ns(work, name, tokens, len(context))
        product_ns = self._product(kind.params, self.shape.bits.of_attention(kind), tokens)
        return product_ns + max(cache_ns, scores_ns) + state_ns + main.attention_fixed_ns(name)

    def _product(self, weights: int, bits: float, tokens: int) -> float:
        """``weights`` matrix elements of ``bits`` each, applied to ``tokens`` rows."""
        if (known := self._products.get((weights, bits, tokens))) is None:
            known = self.main.matrix_ns(weights * bits / 8, bits, 2.0 * weights, tokens)
            self._products[weights, bits, tokens] = known
        return known


def attention_flops(kind: Attention, latent: LatentProducts, tokens: int, pairs: float, read: float) -> float:
    """Arithmetic within attention of a layer, for so many tokens: so many pairs of positions, so many read.

    In llama.cpp all heads meet a latent as it is kept, whose whole width are keys and all but the rotary part values:
    two to three times what keys and values of heads need (ggml-org/llama.cpp src/models/deepseek2.cpp, which multiplies
    queries and results by the matrices that unpack it). Others unpack all that is read for each large piece.
    """
    if layer_kind(kind) != "latent":
        return 4.0 * kind.heads * kind.head_dim * pairs
    values = kind.kv_width - ROTARY_WIDTH
    if latent == "compressed" or tokens < UNPACKED_FROM:
        return 2.0 * kind.heads * (kind.kv_width + values) * pairs
    return 4.0 * kind.heads * (kind.head_dim * pairs + values * (kind.head_dim - ROTARY_WIDTH) * read)


def copy_bytes_per_s(hardware: Hardware, prompt: PromptWork) -> float:
    """Rate of copies of experts. The link and the host's memory limit those from pinned memory; those from pageable
    memory cross the host's three times, since a thread of the driver puts them into pinned memory first.
    """
    link, memory = hardware.link.h2d_bytes_per_s, hardware.cpu.read_bytes_per_s
    if prompt.copies.value == "pinned":
        return saturated(link, memory, power=_COPIES_POWER)
    shares = link * prompt.link_share.value, memory * prompt.memory_share.value
    return saturated(*shares, prompt.staging_bytes_per_s.value, power=_COPIES_POWER)
