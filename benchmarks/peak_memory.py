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
    print(peak_bytes())


def peak_bytes() -> int:
    """This program's own peak. (``ru_maxrss`` would do, but it starts from the peak of whoever started the program.)"""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise SystemExit("the peak is read from /proc/self/status, which this system does not have")
    return int(found[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:3])
