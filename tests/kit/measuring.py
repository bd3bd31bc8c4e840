"""Parts of tests of the verbs for real machines: a tiny question, and how to ask it."""

from __future__ import annotations

from sim.machine.hardware import Hardware

LOCKED = "page-locked 28.80 GB of host memory in 4.1 s, 7.02 GB/s"  # as a GPU's machine says
TINY = ("trace=mini-moe:2", "model=null", "prompt_tokens=4", "generated_tokens=2", "cached_share=0.3")
SETS = tuple(word for change in TINY for word in ("--set", change))
PROFILE = (
    "--lanes", "host-lanes", "--quick", "--model", "mini-moe:2", "--batch", "1", "--context", "4", "--prompt", "2",
    "--policies", "fiddler",
)


def as_if_quiet(hardware: Hardware) -> Hardware:
    """A machine measured in no time, whose threads may have taken long to wake up because others were at work."""
    return hardware.with_numbers({"cpu.first_expert_ns": 10_000})
