"""Keeping a GPU busy while the host launches what is measured: for so long, whatever its clocks.

``torch.cuda._sleep`` counts cycles of the GPU's processors: 6 million are 3 ms at 1.98 GHz, and 17 ms at the 345 MHz of
an idle GPU. So its clocks are raised first, and then a short sleep is measured (as torch's own tests do:
``get_cycles_per_ms`` in torch/testing/_internal/common_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from realrun.machine.lanes import Completion, Machine, Work

COVER_NS = 3_000_000  # longer than anything measured takes to launch
WARM_NS = 1_000_000_000  # of work, after which clocks have risen
AT_ONCE = 16  # pieces of that work in the queue, so that it is never empty for long
TRIED_CYCLES, TRIES = 1_000_000, 10  # of get_cycles_per_ms


class GpuCover:
    """A sleep of ``COVER_NS`` on the GPU lane, at the clocks that it has after a second of ``load()``."""

    def __init__(self, machine: Machine, load: Callable[[], Work]) -> None:
        self._machine = machine
        _warm_up(machine, load)
        tried_ns = median(took_ns(self._sleep(TRIED_CYCLES)) for _ in range(TRIES))
        self._cycles = round(TRIED_CYCLES * COVER_NS / tried_ns)

    def __call__(self) -> Completion:
        """Launch it; the completion of its end."""
        return self._sleep(self._cycles)

    def _sleep(self, cycles: int) -> Completion:
        return self._machine.gpu.submit(lambda: torch.cuda._sleep(cycles))  # type: ignore[no-untyped-call]


def _warm_up(machine: Machine, load: Callable[[], Work]) -> None:
    until_ns = machine.now_ns() + WARM_NS
    while machine.now_ns() < until_ns:
        [*_, last] = [machine.gpu.submit(load()) for _ in range(AT_ONCE)]
        last.wait()


def took_ns(completion: Completion) -> int:
    """How long it took; waits for its end."""
    completion.wait()
    return completion.end_ns - completion.start_ns
