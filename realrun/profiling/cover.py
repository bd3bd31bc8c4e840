"""Conditions of a measurement: a GPU that is busy while the host launches, and weights that are not in caches.

``torch.cuda._sleep`` counts cycles of the GPU's processors: 6 million are 3 ms at 1.98 GHz, and 17 ms at the 345 MHz of
an idle GPU. So the GPU's clocks are raised first, and then a short sleep is measured (as in torch's own tests:
``get_cycles_per_ms`` in torch/testing/_internal/common_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from realrun.machine.lanes import Completion, Machine, Work, took_ns
from realrun.replay.attention import attention_params_of
from traces.models.shape import ModelShape

# Sizes in kB, such as "32768K": Documentation/ABI/testing/sysfs-devices-system-cpu of Linux
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Other weights that are read between two uses of a layer's, in sizes of the cache. Chosen above 1, since caches do not
# evict strictly in order.
TIMES_CACHE = 4
COVER_NS = 3_000_000  # longer than anything measured takes to launch
WARM_NS = 1_000_000_000  # of work, after which the clocks are high
AT_ONCE = 16  # pieces of that work in the queue, so that it is never empty for long
TRIED_CYCLES, TRIES = 1_000_000, 10  # as in get_cycles_per_ms


class GpuCover:
    """A sleep of ``COVER_NS`` on the GPU lane, at the clock rate after a second of ``load()``."""

    def __init__(self, machine: Machine, load: Callable[[], Work]) -> None:
        self._machine = machine
        until_ns = machine.now_ns() + WARM_NS
        while machine.now_ns() < until_ns:
            [*_, last] = [machine.gpu.submit(load()) for _ in range(AT_ONCE)]
            last.wait()
        tried_ns = median(took_ns(self._sleep(TRIED_CYCLES)) for _ in range(TRIES))
        self._cycles = round(TRIED_CYCLES * COVER_NS / tried_ns)

    def __call__(self) -> Completion:
        """Launch it, and return its completion."""
        return self._sleep(self._cycles)

    def _sleep(self, cycles: int) -> Completion:
        return self._machine.gpu.submit(lambda: torch.cuda._sleep(cycles))  # type: ignore[no-untyped-call]


def cache_bytes(device: torch.device) -> int:
    """The second-level cache of a GPU; for host lanes, the processor's largest cache. 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in CPU_CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)


def layers_beyond(cache: int, shape: ModelShape, dtype: torch.dtype) -> int:
    """The number of layers whose attention weights are ``TIMES_CACHE`` times a ``cache``, in bytes."""
    return -(-TIMES_CACHE * cache // (attention_params_of(shape) * dtype.itemsize))
