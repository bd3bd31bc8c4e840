"""The null model: a decode step from bandwidths and bytes alone, without any timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.machine.hardware import Hardware
from sim.runs.demand import StepDemand
from sim.runs.sampling import weights_of
from traces.models.shape import ModelShape


class StepBytes(NamedTuple):
    """Bytes that a decode step reads in addition to the weights that every token needs, averaged over an answer."""

    experts: float  # active routed experts
    cache: float  # keys and values, and states
    tokens: float = 1  # that the step makes of each sequence


def step_bytes(steps: Sequence[StepDemand], shape: ModelShape, answer_tokens: int | None = None) -> StepBytes:
    """The mean over the answer for which ``steps`` stand (``sim.runs.sampling``); None: over themselves."""
    sizes = shape.expert_bytes_by_layer
    experts = [sum(size * len(r.active) for size, r in zip(sizes, step.routings, strict=True)) for step in steps]
    cache = [sum(map(shape.cache_bytes, step.context)) for step in steps]
    numbers, made = [step.index for step in steps], [step.generated for step in steps]
    weights = weights_of(numbers, answer_tokens or sum(made), made).of(np.array(numbers))
    return StepBytes(*(float(np.average(each, weights=weights)) for each in (experts, cache, made)))


def null_model(shape: ModelShape, hardware: Hardware, read: StepBytes, cached_share: float, gpu_only: bool) -> float:
    """Seconds a token of a decode step from bandwidths and bytes alone, as if everything happened one after the other.

    Every non-expert weight, the KV cache and the cached share of the active experts is read at the GPU's bandwidth, the
    other experts at the CPU's, or at the link's where the policy computes on the GPU alone. The idea is llmfit's
    closed form (AlexsJones/llmfit, llmfit-core/src/fit.rs), which adds the same two terms; the effective bandwidths are
    the hardware profile's own. Drafts, where a step verifies some, are made in no time.
    """
    embedding = 0 if shape.tied_embeddings else shape.vocab * shape.hidden * shape.dense_bits / 8  # one row is read
    on_gpu = shape.non_expert_bytes - embedding + read.cache + cached_share * read.experts
    slow = hardware.link.expert_bytes_per_s if gpu_only else hardware.cpu.read_bytes_per_s
    step_s = on_gpu / hardware.gpu.read_bytes_per_s + (1 - cached_share) * read.experts / slow
    return step_s / read.tokens
