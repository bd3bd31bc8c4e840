"""The state of the layer that is being executed, the sizes of its buffers, and where they hold the CPU's results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from policies.mechanism.views import ExpertId, Plan
from realrun.execution.copying import CopyFuture
from realrun.execution.routed_tokens import RoutedTokens
from realrun.experts.ffn import Choices
from realrun.machine.cuda_memory import upload
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

    rows: dict[ExpertId, Rows] = field(default_factory=dict)  # also of experts that the layer before has deferred
    filled: int = 0  # used rows of the layer's result buffer

    def take(self, expert_id: ExpertId, choices: Tensor) -> Rows:
        """Reserve rows for another expert's results."""
        rows = self.rows[expert_id] = Rows(choices, self.filled)
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
    cpu: CpuShare  # includes what was computed ahead, and what the layer before has deferred
    on_gpu: Mapping[int, Choices]  # by expert
    pending: list[int]  # GPU experts that wait for copies
    since_ns: int  # when the host began to prepare its next launch
    activations: Completion | None = None  # of their copy to the host
    waits: list[Completion] = field(default_factory=list)  # also awaited at the end of the layer
    last: Completion | None = None  # of the GPU's work, which ends in order


class LayerSizes(NamedTuple):
    """The largest content of a layer's buffers: N = ``tokens`` with ``top_k`` choices each, hidden states [N, H] of
    ``dtype``, and weighted results of ``sum_dtype``. ``defers``: with results that the layer before has deferred."""

    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    sum_dtype: torch.dtype
    defers: bool = False


class Addresses(NamedTuple):
    """Results of CPU experts: their places in the host buffer, and the choices that they are of."""

    places: Choices
    choices: Tensor


def addresses_of(rows: Sequence[Rows], device: torch.device) -> Addresses | None:
    """Addresses of the results of ``rows``; None if there are none."""
    if not rows:
        return None
    return Addresses(places_of(rows, device), upload(torch.cat([row.choices for row in rows]), device))


def places_of(rows: Sequence[Rows], device: torch.device) -> Choices:
    """The places of the results of ``rows``, at least one, in the host buffer: a slice if they are adjacent."""
    ends = [row.begin + len(row.choices) for row in rows]
    if all(row.begin == end for row, end in zip(rows[1:], ends, strict=False)):
        return slice(rows[0].begin, ends[-1])
    places = [torch.arange(row.begin, end) for row, end in zip(rows, ends, strict=True)]
    return upload(torch.cat(places), device)
