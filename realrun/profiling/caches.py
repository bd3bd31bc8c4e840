"""Caches, and how many layers a probe takes in turn so that it does not find its weights in them."""

from __future__ import annotations

from pathlib import Path

import torch

from realrun.replay.attention import attention_params_of
from traces.models.shape import ModelShape

# sizes in kB, as "32768K": Documentation/ABI/testing/sysfs-devices-system-cpu of Linux
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Caches' worth of other weights read between two uses of a layer's: caches do not evict strictly in order. A choice.
TIMES_CACHE = 4


def cache_bytes(device: torch.device) -> int:
    """The second-level cache of a GPU, or, where a core plays it, the processor's largest; 0 where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in CPU_CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)


def layers_beyond(cache: int, shape: ModelShape, dtype: torch.dtype) -> int:
    """Layers whose attention weights are ``TIMES_CACHE`` times a cache of so many bytes."""
    return -(-TIMES_CACHE * cache // (attention_params_of(shape) * dtype.itemsize))
