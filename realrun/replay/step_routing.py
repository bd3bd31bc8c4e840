"""The routing of a trace's steps, on the host and on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traces.batches import StepRows
from traces.trace import Trace


@dataclass(frozen=True)
class StepRouting:
    """The trace's routing of one step: ``ids`` [N, L, k], and ``weights`` [N, L, k] on the host and on the GPU."""

    ids: NDArray[np.integer]
    weights: Tensor
    on_gpu: Tensor


def step_routings(trace: Trace, steps: Sequence[StepRows], device: torch.device) -> list[StepRouting]:
    """The routing of all steps, copied to the GPU before the run, where a model would have its own."""
    made = []
    for step in steps:
        weights = torch.from_numpy(np.asarray(trace.topk_weights[step.rows], np.float32))
        made.append(StepRouting(np.asarray(trace.topk_ids[step.rows], np.int64), weights, weights.to(device)))
    return made
