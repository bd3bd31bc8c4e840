"""Cost tables made without measuring: a roofline from data-sheet numbers.

With B the effective bytes/s and F the effective flop/s of the device (``Hardware``):

====================  ==============================================================================================
expert, GPU, w > 0    max(expert bytes / B, 2 x weights x w / F) + 5 kernels
expert, CPU, w > 0    max(expert bytes / B, 2 x weights x w / F); the first one of a layer adds ``first_expert_ns``
copy                  latency + bytes / link rate
attention, a layer    max((weights + KV or state read and written) / B, (projections + scores) / F) + 12 kernels
gate, forecast        max(weights / B, 2 x weights x tokens / F) + 3 kernels; also shared expert, head
combine               tokens x (top_k + 2) rows of ``hidden`` / B + 2 kernels
====================  ==============================================================================================

Weights of fewer than 16 bits are read at a fraction of B (``sim.machine.parts``), since they are unpacked; F and copies
are unchanged. Results are whole ns, rounded half up, and at least 1 where there is work. Not modelled: weights that
stay in the L2 cache, activations of wide experts, tile steps in w, arithmetic on the state of linear attention (a
twentieth of that of its projections).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts, by_layer
from sim.machine.hardware import Hardware
from sim.machine.interpolation import table_ns, time_ns
from sim.machine.parts import read_fraction
from traces.models.attention import Attention
from traces.models.shape import ModelShape

# Kernels of each group in an unfused PyTorch layer: they cost launches on the host and a fixed time on the GPU.
ATTENTION_KERNELS = 12  # two norms, q k v o, two rotations, cache write, attention, two residual additions
GATE_KERNELS = 3  # product, softmax, top-k
EXPERT_KERNELS = 5  # gate, up, activation, multiplication, down
COMBINE_KERNELS = 2  # weighted sum, residual addition
HEAD_KERNELS = 2  # norm, product
ESTIMATOR_KERNELS = 8  # two products in, two in the MLP, activation, addition, norm, top-k
ROUTING_BYTES = 8  # one expert id and one weight, 32-bit each
ACTIVATION_BYTES = 2  # hidden states travel in 16 bits


def roofline(shape: ModelShape, hardware: Hardware, max_tokens: int) -> CostTable:
    """The cost table of ``shape`` on ``hardware`` for workloads 0..``max_tokens`` (formulas: top of this file)."""
    steps = RooflineSteps(shape, hardware)
    one = steps.step(1, (1,))
    between_ns = one.combine_ns + one.attention_ns + one.gate_ns + one.routing_ns + hardware.host.sync_ns
    launch_ns = hardware.host.launch_ns
    return CostTable(
        experts=by_layer(shape, hardware, lambda size: _expert_costs(shape, hardware, size, max_tokens, between_ns)),
        steps=steps,
        attention_launch_ns=ATTENTION_KERNELS * launch_ns,
        gate_launch_ns=GATE_KERNELS * launch_ns,
        shared_launch_ns=EXPERT_KERNELS * launch_ns if shape.shared_width else 0,
        expert_launch_ns=EXPERT_KERNELS * launch_ns,
        combine_launch_ns=COMBINE_KERNELS * launch_ns,
        head_launch_ns=HEAD_KERNELS * launch_ns,
        dense_launch_ns=shape.dense_layers * (ATTENTION_KERNELS + EXPERT_KERNELS) * launch_ns,
        sync_ns=hardware.host.sync_ns,
        result_path=hardware.link.result_path,
        plan_costs=hardware.plan_costs,
        plan_factor=hardware.host.plan_factor,
        lead_ns=launch_ns,  # one kernel's launch,
        tail_ns=hardware.gpu.kernel_ns,  # and one kernel
    )


def _expert_costs(shape: ModelShape, hardware: Hardware, size: int, max_tokens: int, between_ns: int) -> ExpertCosts:
    """Tables of one expert of ``size`` bytes."""
    flops = 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width * np.arange(max_tokens + 1)
    gpu, cpu, link = hardware.gpu, hardware.cpu, hardware.link
    gpu_size, cpu_size = (size / read_fraction(processor, shape.weight_bits) for processor in ("gpu", "cpu"))
    on_gpu_ns = np.maximum(gpu_size / gpu.read_bytes_per_s, flops / gpu.effective_flops_per_s) * 1e9
    on_cpu_ns = np.maximum(cpu_size / cpu.read_bytes_per_s, flops / cpu.flops_per_s) * 1e9
    return ExpertCosts(
        gpu_ns=table_ns(on_gpu_ns + EXPERT_KERNELS * gpu.kernel_ns),
        cpu_ns=table_ns(on_cpu_ns),
        first_cpu_ns=cpu.first_expert_ns,
        copy_ns=link.expert_ns(size),
        expert_bytes=size,
        writeback_ns=link.d2h_ns(size),
        between_ns=between_ns,
    )


@dataclass(frozen=True)
class RooflineSteps:
    """Step costs outside the routed experts, from sizes and rates."""

    shape: ModelShape
    hardware: Hardware
    _known: dict[tuple[int, int], StepCosts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        attention_ns = time_ns(self.shape.mean_of_layers(lambda kind: self._attention_ns(kind, tokens, context)))
        size = tokens, len(context)
        if size not in self._known:
            self._known[size] = self._without_attention(*size)
        costs = self._known[size]
        return costs._replace(
            attention_ns=attention_ns, dense_ns=costs.dense_ns + self.shape.dense_layers * attention_ns
        )

    def _without_attention(self, tokens: int, sequences: int) -> StepCosts:
        """A step's costs without attention, of which nothing depends on the contexts."""
        shape, link, bits = self.shape, self.hardware.link, self.shape.bits
        gate_ns = self._product_ns(shape.hidden * shape.experts, bits.router, tokens, GATE_KERNELS)
        dense_ns = self._product_ns(shape.dense_ffn_params, bits.dense, tokens, EXPERT_KERNELS)
        hidden_bytes = tokens * shape.hidden * ACTIVATION_BYTES
        return StepCosts(
            attention_ns=0,
            dense_ns=shape.dense_layers * dense_ns,
            gate_ns=gate_ns,
            speculate_ns=gate_ns,
            estimator_ns=self._product_ns(_estimator_params(shape), shape.dense_bits, tokens, ESTIMATOR_KERNELS),
            shared_ns=self._product_ns(shape.shared_params, bits.shared, tokens, EXPERT_KERNELS),
            combine_ns=self._gpu_ns((shape.top_k + 2) * hidden_bytes, 0, COMBINE_KERNELS),
            head_ns=self._product_ns(shape.vocab * shape.hidden, bits.head, sequences, HEAD_KERNELS),
            routing_ns=link.d2h_ns(tokens * shape.top_k * ROUTING_BYTES),
            activations_ns=link.d2h_ns(hidden_bytes),
            result_ns=link.h2d_ns(hidden_bytes),
        )

    def _attention_ns(self, kind: Attention, tokens: int, context: Sequence[int]) -> int:
        """Time in ns of norms and attention of a layer of one kind."""
        read, pairs = attention_work(kind, tokens, context)
        cache = read * kind.kv_width * self.shape.cache_bits / 8 + 2 * len(context) * kind.state_bytes
        flops = 2.0 * kind.params * tokens + 4.0 * kind.heads * kind.head_dim * pairs
        weights = _weight_bytes(kind.params, self.shape.bits.of_attention(kind))
        return self._gpu_ns(weights + cache, flops, ATTENTION_KERNELS)

    def _product_ns(self, weights: int, bits: float, tokens: int, kernels: int) -> int:
        """Time in ns of ``weights`` elements of ``bits`` each, applied to ``tokens`` rows; 0 if there are none."""
        return self._gpu_ns(_weight_bytes(weights, bits), 2.0 * weights * tokens, kernels) if weights else 0

    def _gpu_ns(self, size: float, flops: float, kernels: int) -> int:
        gpu = self.hardware.gpu
        work_ns = max(size / gpu.read_bytes_per_s, flops / gpu.effective_flops_per_s) * 1e9
        return time_ns(work_ns + kernels * gpu.kernel_ns)


def _weight_bytes(weights: int, bits: float) -> float:
    """Bytes of ``weights``, increased by the factor by which unpacking slows their reading."""
    return weights * bits / 8 / read_fraction("gpu", bits)


def _estimator_params(shape: ModelShape) -> int:
    """Weights of the estimator of Speculating Experts (Appendix): in, two MLP matrices of 4 x its width, out.

    The width is published for no model; the count of 17 M for Qwen3-30B gives 0.65 x hidden.
    """
    width = round(0.65 * shape.hidden)
    return width * (shape.hidden + 8 * width + shape.experts)


def attention_work(kind: Attention, tokens: int, context: Sequence[int]) -> tuple[float, float]:
    """Work of the attention of a layer of one kind: positions of the cache read and written, and pairs of positions.

    If the contexts hold no more than this step's tokens, each sequence is prefilled from nothing; otherwise the step's
    tokens are assumed to be spread evenly over the sequences (one each in decode, a chunk each in chunked prefill).
    """
    fresh, share = sum(context) == tokens, tokens / len(context)
    new = [(length if fresh else min(share, length), length) for length in context]
    return sum(kind.read(*lengths) for lengths in new) + tokens, sum(kind.pairs(*lengths) for lengths in new)
