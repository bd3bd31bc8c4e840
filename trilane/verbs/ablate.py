"""``trilane ablate``: what each part of a policy brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trilane.pages.columns import CHANGED, HITS, PCIE, SPREAD, TPOT, TTFT, Column, name_cell, tabulate
from trilane.pages.output import (
    JsonOption,
    check_picture,
    check_targets,
    heading,
    note,
    progress,
    show,
    write_json,
)
from trilane.study import DRAWS
from trilane.verbs.draw_options import DrawsOption, JobsOption, processes
from trilane.verbs.scenario_options import ScenarioOption, SetOption, describe, inputs_of, scenario_of

if TYPE_CHECKING:
    from trilane.study.ablate import Ablation

COLUMNS = (
    Column("", name_cell("label")),
    TTFT,
    TPOT,
    SPREAD,
    Column(
        "speed-\nup", lambda row: "" if row["speedup"] is None else f"{row['speedup']:.2f}x",
        "speed-up", "TPOT of the first row over this row's",
    ),
    Column(
        "against\nwhole", lambda row: f"{100 * row['over_whole']:+.1f}%" if row["over_whole"] else "",
        "against whole", "TPOT over that of the policy with all its parts, minus 1",
    ),
    HITS,
    PCIE,
    CHANGED,
)  # fmt: skip


def ablate(
    policy: Annotated[str, typer.Argument(metavar="NAME", help="Policy; see [bold]trilane policies[/].")],
    scenario: ScenarioOption = None,
    changes: SetOption = None,
    draws: DrawsOption = DRAWS,
    jobs: JobsOption = None,
    json: JsonOption = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the ladder.")] = None,
) -> None:
    """Switch a policy's parts on one after the other, and off one by one.

    Placement off: nobody is on the GPU at the start.

    Assigner off: every expert is computed where it lies (copied, if the policy runs on the GPU alone).

    Cache off: what is on the GPU at the start stays there, and nothing else is kept;
    prefetches that went there go to staging slots.

    Prefetcher and router off: no prefetches, and the experts that the model's own router chose.
    """
    from trilane.study.ablate import ablate as take_apart

    check_picture(png)
    asked = scenario_of(scenario, changes, policy)
    check_targets(json, png, inputs=inputs_of(scenario, asked))
    found = take_apart(asked, draws=draws, jobs=processes(jobs), watch=lambda mixes: progress(mixes, "simulating"))
    apart: list[dict[str, str]] = [{}] if found.all_but_one else []  # an empty line
    rows = [*found.ladder, *apart, *found.all_but_one]
    show(json, heading(f"{policy}: {describe(asked)}"), *tabulate(COLUMNS, rows))
    write_json(found._asdict(), json)
    for row in rows:
        if row.get("refused"):
            note(f"{row['label']}: {row['refused']}")
    if png:
        _draw(found, png, describe(asked))


def _draw(found: Ablation, target: str, about: str) -> None:
    from trilane.figures import plot_ladder, save_figure

    save_figure(plot_ladder(found, about), target)
    note(f"picture: {target}")
