"""What is known of the layer at work while its parts run, and the sizes of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from policies.mechanism.views import ExpertId, Plan
from realrun.execution.copy_future import CopyFuture
from realrun.execution.routed_tokens import RoutedTokens
from realrun.experts.ffn import Choices
from realrun.machine.lanes import Completion


@dataclass
class Rows:
    """An expert that the CPU has been given: choices, and where their results lie in the layer's host buffer."""

    choices: Tensor
    begin: int
    completion: Completion = field(init=False)
    began_ns: int = 0  # 0: not yet
    has_ended: bool = False

    def left_ns(self, cost_ns: int, now_ns: int) -> int:
        """What is left of work that is taken to last ``cost_ns``."""
        if self.has_ended:
            return 0
        return max(1, self.began_ns + cost_ns - now_ns) if self.began_ns else cost_ns


@dataclass
class CpuShare:
    """What the CPU has been given of one layer."""

    rows: dict[int, Rows] = field(default_factory=dict)  # by expert
    filled: int = 0  # rows of the layer's result buffer that are taken

    def take(self, expert: int, choices: Tensor) -> Rows:
        """Room for another expert's results."""
        rows = self.rows[expert] = Rows(choices, self.filled)
        self.filled += len(choices)
        return rows


@dataclass(frozen=True)
class RoutedInput:
    """A layer's input on the GPU: ``hidden()`` [N, H], there when ``ready`` has ended, and ``weights`` [N * k]."""

    hidden: Callable[[], Tensor]
    weights: Tensor
    ready: Completion


@dataclass
class ActiveLayer:
    """The layer at work. ``start`` makes another one, so that nothing is left of the layer before."""

    plan: Plan
    tokens: RoutedTokens
    inputs: RoutedInput
    futures: Mapping[ExpertId, CopyFuture]
    staged: Set[int]  # whose slots may be free when they have been computed
    cpu: CpuShare  # begins with what was computed ahead
    on_gpu: Mapping[int, Choices]  # of every expert
    pending: list[int]  # experts of the GPU that wait for copies
    since_ns: int  # when the host began what it launches next
    activations: Completion | None = None  # their way to the CPU
    waits: list[Completion] = field(default_factory=list)  # awaited at its end
    last: Completion | None = None  # of the GPU's work, which ends in order


class LayerSizes(NamedTuple):
    """What a layer's buffers hold at most: ``tokens`` N with ``top_k`` choices each, and hidden states [N, H] of
    ``dtype``; the experts' weighted results are of ``sum_dtype``.
    """

    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    sum_dtype: torch.dtype
