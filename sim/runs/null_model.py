"""The null model: a decode step from bandwidths and bytes alone, without any timeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.machine.hardware import Hardware
from sim.runs.demand import StepDemand
from sim.runs.sampling import weights_of
from traces.models.shape import ModelShape


def active_expert_bytes(steps: Sequence[StepDemand], shape: ModelShape, answer_tokens: int | None = None) -> float:
    """Bytes of the experts that a decode step activates, averaged over the answer for which ``steps`` stand
    (``sim.runs.sampling``); None: over themselves."""
    sizes = [shape.expert_bytes_of(layer) for layer in range(shape.moe_layers)]
    active = [sum(size * len(r.active) for size, r in zip(sizes, step.routings, strict=True)) for step in steps]
    numbers = [step.index for step in steps]
    return float(np.average(active, weights=weights_of(numbers, answer_tokens or len(steps)).of(np.array(numbers))))


def null_model(
    shape: ModelShape, hardware: Hardware, active_bytes: float, cached_share: float, gpu_only: bool
) -> float:
    """Seconds of one decode step from bandwidths and bytes alone, as if everything happened one after the other.

    Every non-expert weight and the cached share of ``active_bytes`` (routed experts of a step) is read at the GPU's
    bandwidth, the rest at the CPU's, or at the link's where the policy computes on the GPU alone. The idea is llmfit's
    closed form (AlexsJones/llmfit, llmfit-core/src/fit.rs), which adds the same two terms; the effective bandwidths are
    the hardware profile's own.
    """
    embedding = 0 if shape.tied_embeddings else shape.vocab * shape.hidden * shape.dense_bits / 8  # one row is read
    on_gpu = shape.non_expert_bytes - embedding + cached_share * active_bytes
    slow = hardware.link.expert_bytes_per_s if gpu_only else hardware.cpu.read_bytes_per_s
    return on_gpu / hardware.gpu.read_bytes_per_s + (1 - cached_share) * active_bytes / slow
