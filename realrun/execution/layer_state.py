"""The state of the layer that is being executed, and the sizes of its buffers."""

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
    """An expert on the CPU: its choices, and the place of its results in the layer's host buffer."""

    choices: Tensor
    begin: int
    completion: Completion = field(init=False)
    began_ns: int = 0  # 0: not yet
    has_ended: bool = False

    def left_ns(self, cost_ns: int, now_ns: int) -> int:
        """The rest of the work, which is expected to take ``cost_ns`` in all."""
        if self.has_ended:
            return 0
        return max(1, self.began_ns + cost_ns - now_ns) if self.began_ns else cost_ns


@dataclass
class CpuShare:
    """The CPU's share of one layer."""

    rows: dict[int, Rows] = field(default_factory=dict)  # by expert
    filled: int = 0  # used rows of the layer's result buffer

    def take(self, expert: int, choices: Tensor) -> Rows:
        """Reserve rows for another expert's results."""
        rows = self.rows[expert] = Rows(choices, self.filled)
        self.filled += len(choices)
        return rows


@dataclass(frozen=True)
class RoutedInput:
    """The input of a layer's routed experts on the GPU: ``hidden()`` [N, H], valid when ``ready`` has ended, and the
    router's ``weights`` [N * k]."""

    hidden: Callable[[], Tensor]
    weights: Tensor
    ready: Completion


@dataclass
class ActiveLayer:
    """The layer that is being executed. Every layer has a new one, so that nothing is left of the last."""

    plan: Plan
    tokens: RoutedTokens
    inputs: RoutedInput
    futures: Mapping[ExpertId, CopyFuture]
    staged: Set[int]  # experts whose slots may be free after they have been computed
    cpu: CpuShare  # includes what was computed ahead
    on_gpu: Mapping[int, Choices]  # by expert
    pending: list[int]  # GPU experts that wait for copies
    since_ns: int  # when the host began to prepare its next launch
    activations: Completion | None = None  # of their copy to the host
    waits: list[Completion] = field(default_factory=list)  # also awaited at the end of the layer
    last: Completion | None = None  # of the GPU's work, which ends in order


class LayerSizes(NamedTuple):
    """The largest content of a layer's buffers: N = ``tokens`` with ``top_k`` choices each, hidden states [N, H] of
    ``dtype``, and weighted results of ``sum_dtype``."""

    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    sum_dtype: torch.dtype
