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
    table,
    write_json,
)
from trilane.question import ScenarioOption, SetOption, describe, inputs_of, names_in, scenario_of

if TYPE_CHECKING:
    from sim.run import Run

MIB = 2**20
TIMELINE_STEPS = 6  # of each policy, so that the combined timeline stays small
COLUMNS = (
    "\npolicy", "TTFT\nms", "TPOT\nms", "\ntok/s", "hit\nrate", "PCIe\nMiB/tok", "busy\ngpu", "\ncpu", "\nh2d",
    "wait\nh2d", "\ncpu", "\nhost",
)  # fmt: skip
LEGEND = """
hit rate  active experts that were on the GPU when their layer was routed (kind: resident), in decode steps
PCIe      expert weights copied to the GPU for each generated token
busy      share of the time in which the lane works: GPU, CPU experts, copies to the GPU (h2d)
wait      share of the time in which the GPU waits: for copies, for the CPU's experts, for the host"""
REGRET = """
regret    TPOT over that of the clairvoyant run (*), which knows the future, minus 1"""


def compare(
    scenario: ScenarioOption = None,
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help="Policies to compare. Default: all that the scenario can run.")
    ] = None,
    changes: SetOption = None,
    json: JsonOption = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Also draw: tpot.png, gantt-POLICY.png, and timeline.json.gz for Perfetto."),
    ] = None,
) -> None:
    """Rank offloading policies by time per token.

    Every policy gets the same routing, machine and memory. The fastest comes first.
    """
    from sim.comparison import compare as run_all

    check_folder(out)
    asked = scenario_of(scenario, changes)
    check_targets(json, inputs=inputs_of(scenario, asked))
    names = None if policies is None else names_in(policies)
    found = run_all(asked, names, watch=lambda chosen: progress(chosen, "simulating"))
    for name, reason in found.left_out.items():
        note(f"left out {name}: {reason}")
    rows = found.rows()
    show(json, heading(describe(asked)), *_ranking(rows))
    write_json({"scenario": found.scenario, "runs": rows}, json)
    if out:
        _draw(found.runs, rows, Path(out), describe(asked))


def _ranking(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, str]:
    """The table and what its columns mean; there is regret only beside a clairvoyant run."""
    cells = [_cells(row) for row in rows]
    if all(row["regret"] is None for row in rows):
        return table(COLUMNS, cells), LEGEND
    for line, row in zip(cells, rows, strict=True):
        line.append(percent(row["regret"]))
    return table((*COLUMNS, "\nregret"), cells), LEGEND + REGRET


def _cells(row: Mapping[str, Any]) -> list[str]:
    mark = " *" if "clairvoyant" in row["labels"] else " ~" if "changes routing" in row["labels"] else ""
    copied = row["pcie_bytes_per_token"]
    return [
        row["policy"] + mark,
        number(row["ttft_ms"]),
        number(row["tpot_ms"], 2),
        number(row["tokens_per_s"]),
        percent(row["decode_resident_hit_rate"]),
        number(None if copied is None else copied / MIB),
        *(percent(row[f"{lane}_busy_share"]) for lane in ("gpu", "cpu", "h2d")),
        *(percent(row[f"stall_{lane}_share"]) for lane in ("h2d", "cpu", "host")),
    ]


def _draw(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], folder: Path, about: str) -> None:
    """A bar chart, a Gantt picture of each run, and one timeline of all."""
    from sim.gantt import save_gantt
    from sim.perfetto import write_perfetto
    from sim.pictures import save_figure
    from sim.plots import tpot_bars

    folder.mkdir(parents=True, exist_ok=True)
    save_figure(tpot_bars(rows, about), folder / "tpot.png")
    for run in progress(runs, "drawing"):
        save_gantt(run, folder / f"gantt-{run.policy}.png", about=about)
    write_perfetto(runs, folder / "timeline.json.gz", TIMELINE_STEPS)
    note(f"pictures and a timeline for https://ui.perfetto.dev are in {folder}/")
