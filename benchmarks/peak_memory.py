"""Simulate once and print the peak resident memory in bytes: ``python -m benchmarks.peak_memory TRACE BATCH``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sim.runs.scenario import Scenario
from sim.simulate import simulate


def main(trace: str, batch: str) -> None:
    """One run of the default policy, metrics included."""
    simulate(Scenario(trace=trace, hardware="rtx3090-ddr4", cached_share=0.3, batch=int(batch))).to_dict()
    if "torch" in sys.modules:
        raise SystemExit("torch was imported: this is not the simulator alone")
    print(status_bytes("VmHWM"))  # ``ru_maxrss`` would start from the peak of the process that started this one


def status_bytes(name: str, process: int | str = "self") -> int:
    """A size in bytes that the system states of a process, such as its peak ``VmHWM``. Raises OSError without it."""
    size = re.search(rf"{name}:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text())
    if size is None:
        raise OSError(f"/proc/{process}/status: expected a line {name}")
    return int(size[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:3])
