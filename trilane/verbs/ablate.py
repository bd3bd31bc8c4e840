"""``trilane ablate``: what each part of a policy contributes."""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.output.pages.output import JsonOption, check_targets, heading, note, report, watching
from trilane.study import DRAWS
from trilane.verbs.inputs import describe, inputs_of, scenario_of
from trilane.verbs.options import OWN_POLICY, DrawsOption, JobsOption, ScenarioOption, SetOption, processes


def ablate(
    policy: Annotated[
        str, typer.Argument(metavar="NAME", help=f"Policy; see [bold]trilane policies[/]. {OWN_POLICY}.")
    ],
    scenario: ScenarioOption = None,
    changes: SetOption = None,
    draws: DrawsOption = DRAWS,
    jobs: JobsOption = None,
    json: JsonOption = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the ladder.")] = None,
) -> None:
    """Switch a policy's parts on one after the other, and off one by one.

    Placement off: no expert is on the GPU at the start.

    Assigner off: every expert is computed where its weights are (copied, if the policy computes on the GPU alone).

    Cache off: the experts that are on the GPU at the start stay there, and no others are kept; prefetches into the
    cache go to staging slots.

    Prefetcher and router off: no prefetches, and the experts that the model's own router chose.
    """
    from trilane.output.pages.columns import ABLATED, tabulate
    from trilane.study.ablate import ablate as switch_parts

    chosen = scenario_of(scenario, changes, policy)
    check_targets(json, picture=png, inputs=inputs_of(scenario, chosen))
    with watching("simulating") as watch:
        found = switch_parts(chosen, draws=draws, jobs=processes(jobs), watch=watch)
    empty_line: list[dict[str, str]] = [{}] if found.all_but_one else []
    rows = [*found.ladder, *empty_line, *found.all_but_one]
    about = describe(chosen)
    report(json, found._asdict(), heading(f"{chosen.policy}: {about}"), *tabulate(ABLATED, rows))
    for row in rows:
        if row.get("refused"):
            note(f"{row['label']}: {row['refused']}")
    if png:
        from trilane.output.figures import plot_ladder, save_figure

        save_figure(plot_ladder(found, about), png)
        note(f"picture: {png}")
