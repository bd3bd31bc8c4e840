"""Interpreter settings for measurements: no garbage collection, and short intervals between thread switches."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trilane.common.gc_paused import gc_paused

# Instead of Python's 5 ms, since lanes hand over often. Compared with 1e-4, kernels that run while the host thread
# works take less time: forecasts on host lanes 0.9 instead of 1.4 ms a step.
SWITCH_INTERVAL_S = 1e-5


@contextmanager
def low_jitter() -> Iterator[None]:
    """In the block: no garbage collection, which may take longer than a layer; fast thread switches; no autograd."""
    interval = sys.getswitchinterval()
    gc.collect()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with gc_paused(), torch.inference_mode():
            yield
    finally:
        sys.setswitchinterval(interval)
