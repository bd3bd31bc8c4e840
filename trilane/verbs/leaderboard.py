"""``trilane leaderboard``: every policy on four machines, and where one's own would stand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilane.output.pages.output import JsonOption, check_targets, note, report, watching
from trilane.verbs.inputs import policies_in, policy_files
from trilane.verbs.options import OWN_POLICY, JobsOption, processes

if TYPE_CHECKING:
    from trilane.study.leaderboard.standings import Entry


def leaderboard(
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Simulate these where they have no entry yet. {OWN_POLICY}. Default: with "
                                         "--play all, else none."),
    ] = None,
    play: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv", help="Simulate what this file lacks, and add it there; without it, the "
                                              "entries that come with the program are shown. Not needed for a "
                                              "policy of your own, whose result --policies does not keep."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Show the speeds on each machine, too.")] = False,
    jobs: JobsOption = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the standings (.png, .svg or .pdf); a CSV with the same data goes next "
                                          "to it."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Rank policies over machines of four classes, two families of routing, and batches of 1 and 8.

    In each setting all policies are simulated with the same texts, on the engine [bold]ideal[/].
    """
    from trilane.common.schema import to_dict
    from trilane.output.pages.leaderboard import leaderboard_page, machine_pages
    from trilane.study.leaderboard.standings import standings

    names = [] if policies is None else policies_in(policies)
    check_targets(json, play, picture=plot, data=True, inputs=policy_files())
    found = standings(_entries(names, play, processes(jobs)))
    record = [
        {"policy": one.policy, "kind": one.kind, "score": one.score, "lowest": one.lowest, "best_in": one.best_in,
         "entries": [to_dict(entry) for entry in one.entries.values()]}
        for one in found
    ]
    report(json, record, *leaderboard_page(found, names), *(machine_pages(found) if details else ()))
    if plot is not None:
        from trilane.output.figures import plot_leaderboard, save_picture

        note(f"picture: {plot}, and what it draws: {save_picture(plot_leaderboard(found, names), plot)}")


def _entries(names: list[str], play: str | None, jobs: int) -> list[Entry]:
    from policies.registry import policy_names
    from trilane.study.leaderboard.standings import add_entries, read_entries, with_played

    with watching("simulating") as watch:
        if play is not None:
            return add_entries(Path(play), names or policy_names(), jobs, watch)
        return with_played(read_entries(), names, jobs, watch)
