"""Python as a run wants it, around runs and around what is measured for them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Python's threads change places that soon, not after 5 ms: lanes hand over often. Against 1e-4, kernels that run while
# the host thread works take less: forecasts on host lanes 0.9 and not 1.4 ms a step.
SWITCH_INTERVAL_S = 1e-5


@contextmanager
def low_jitter() -> Iterator[None]:
    """No garbage collection, which may take longer than a layer; threads that change places soon; no autograd."""
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with torch.inference_mode():
            yield
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()
