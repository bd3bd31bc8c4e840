"""``trilane compare``: one scenario under several policies, ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from trilane.output import (
    JsonOption,
    check_folder,
    check_targets,
    heading,
    note,
    number,
    percent,
    progress,
    show,
    spread,
    table,
    write_json,
)
from trilane.question import ScenarioOption, SetOption, describe, inputs_of, names_in, scenario_of
from trilane.spread import DrawsOption, JobsOption, draws_in_words, processes

if TYPE_CHECKING:
    from sim.run import Run

MIB = 2**20
TIMELINE_STEPS = 6  # of each policy, so that the combined timeline stays small
COLUMNS = (
    "\npolicy", "TTFT\nms", "TPOT\nms", "\nrange", "hit\nrate", "PCIe\nMiB/tok", "busy\ngpu", "\ncpu", "\nh2d",
    "wait\nh2d", "\ncpu", "\nhost", "\nregret",
)  # fmt: skip
LEGEND = {
    "range": "lowest and highest TPOT; - where it is the same in all draws",
    "hit rate": "active experts that were on the GPU when their layer was routed (kind: resident), in decode steps",
    "PCIe": "expert weights copied to the GPU for each generated token",
    "busy": "share of the time in which the lane works: GPU, CPU experts, copies to the GPU (h2d)",
    "wait": "share of the time in which the GPU waits: for copies, for the CPU's experts, for the host",
    "regret": "TPOT over that of the clairvoyant run (*), which knows the future, minus 1",
    "~": "changes the routing: the model would say something else, and later routing would have differed",
}
