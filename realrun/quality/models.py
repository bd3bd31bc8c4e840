"""A model on the CPU, to be run under policies."""

from __future__ import annotations

from pathlib import Path

import torch

from realrun.generation.hosted_model import HostedModel, load_model, look_at
from realrun.machine.pinned import plain


def model_on_cpu(model: str | Path) -> HostedModel:
    """A model, by its folder or id, in float32: what differs is then the routing and not rounding. Raises RefusedError.
    """
    return look_at(*load_model(model, "float32", torch.device("cpu"), plain))
