"""Colours and words of spans, of lanes, and of what a step's time is made of: the same in pictures and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.runs.vocabulary import MOST_GPUS
from trilane.output.figures.marks import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION


class Family(NamedTuple):
    """Kinds of spans that share a colour."""

    label: str
    colour: str
    kinds: tuple[str, ...]


FAMILIES = (
    Family("expert on GPU or CPU", BLUE, ("expert", "deferred", "gate_up")),
    Family(
        "attention, gate, shared experts, combine", "#9A9A9A", ("attention", "gate", "shared", "combine", "partial_sum")
    ),
    Family("load that the layer waits for", VERMILLION, ("demand", "read", "fetch")),
    Family("prefetch", GREEN, ("prefetch", "read_ahead")),
    Family("cache swap, write-back", PURPLE, ("swap", "writeback")),
    Family("routing, activations, results", SKY, ("routing", "activations", "result", "hand_over")),
    Family("planning", ORANGE, ("plan", "foresee", "observe")),
    Family("speculation", "#F0E442", ("speculate", "precompute", "draft")),
    Family("launch", "#C8C8C8", ("launch", "program")),
    Family("host waits for the routing", "#EDEDED", ("wait",)),
)
COLOURS = {kind: family.colour for family in FAMILIES for kind in family.kinds}
IDLE = "#FBE3D6"  # the GPU does nothing, which is what offloading policies try to avoid
LANE_NAMES = {
    "host": "host thread",
    "gpu": "GPU",
    "cpu": "CPU experts",
    "h2d": "copies to GPU",
    "d2h": "copies to host",
    "disk": "reads from disk",
    **{f"gpu{number}": f"GPU {number}" for number in range(1, MOST_GPUS)},
    **{f"h2d{number}": f"copies to GPU {number}" for number in range(1, MOST_GPUS)},
    **{f"d2h{number}": f"copies from GPU {number}" for number in range(1, MOST_GPUS)},
    **{f"peer{number}": f"GPU {number - 1} to GPU {number}" for number in range(1, MOST_GPUS)},
}


class StepPart(NamedTuple):
    """A part of a token's time: what the GPU does, or the lane that it waits for."""

    label: str
    lane: str
    colour: str


STEP_PARTS = (
    StepPart("GPU works", "gpu", BLUE),
    StepPart("GPU waits for copies", "h2d", VERMILLION),
    StepPart("GPU waits for the CPU", "cpu", ORANGE),
    StepPart("GPU waits for the host", "host", GREY),
)
# of an answer of an engine, by the names of ``Tuned.decode_ms`` and of ``SplitMemory``
TIME_COLOURS = {
    "attention": SKY, "others": GREY, "gpu_experts": BLUE, "cpu_experts": ORANGE, "handing_over": PURPLE,
    "copies": VERMILLION, "disk": INK, "sums": PURPLE, "others_and_sums": GREY,
}
MEMORY_COLOURS = {
    "experts": BLUE, "KV cache": SKY, "weights that every token needs": GREEN, "compute buffers": PURPLE,
    "reserve": GREY, "embeddings and inputs": ORANGE, "the system and the program": GREY,
    "rows in memory": ORANGE, "rows in the file": GREY,
}
LIMIT_COLOURS = {  # of the part that limits an answer, by its name in ``trilane.engines.gains``
    "GPU memory": BLUE, "GPU bandwidth": SKY, "GPU compute": SKY, "DRAM": ORANGE, "CPU reads": ORANGE,
    "CPU cores": ORANGE, "PCIe": VERMILLION, "host memory": PURPLE, "disk": INK,
}


def step_parts_ms(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Parts of a run's time per token, in ms: the GPU's work is what no wait takes."""
    waits = [row[f"stall_{part.lane}_ms"] or 0.0 for part in STEP_PARTS[1:]]
    return row["tpot_ms"] - sum(waits), *waits
