"""The time of a piece of a prompt, or of a single token, from the parts of measured kernels."""

from __future__ import annotations

import numpy as np

from sim.costs.kernel_costs import KernelSteps
from traces.models.shape import ExpertWork


def piece_ns(steps: KernelSteps, tokens: int, context: int) -> float:
    """Of one sequence, that has ``context`` tokens after it.

    llama.cpp goes on with the piece's last token alone after the attention of the last layer.
    """
    costs, layers = steps.step(tokens, (context,)), steps.shape.moe_layers - 1
    mixture, of_one = (_mixture_ns(steps, count) for count in (tokens, 1))
    return (layers + 1) * costs.attention_ns + layers * mixture + of_one + costs.dense_ns + costs.head_ns


def routed_ns(steps: KernelSteps, tokens: int) -> float:
    """The routed experts of a layer."""
    work = ExpertWork.of(steps.shape, tokens)
    [expert_ns] = steps.expert_ns(np.array([work.rows]))
    return work.active * float(expert_ns)


def _mixture_ns(steps: KernelSteps, tokens: int) -> float:
    """Gate, shared and routed experts of a layer, and putting them together."""
    step = steps.step(tokens, (tokens,))
    return step.gate_ns + step.shared_ns + step.combine_ns + routed_ns(steps, tokens)
