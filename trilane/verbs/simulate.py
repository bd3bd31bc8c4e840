"""``trilane simulate``: one scenario, one policy, everything about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.pages.output import JsonOption, check_picture, check_targets, show, working, write_json
from trilane.pages.run import keep_run, record_of, run_page
from trilane.verbs.scenario_options import PolicyOption, ScenarioOption, SetOption, describe, inputs_of, scenario_of

if TYPE_CHECKING:
    from sim.runs.run import Run

SpansOption = Annotated[
    str | None, typer.Option("--spans", metavar="F.parquet", help="Write what every lane did, a row a span.")
]
PerfettoOption = Annotated[
    str | None,
    typer.Option("--perfetto", metavar="F.json", help="Write a timeline for ui.perfetto.dev (.json or .json.gz)."),
]
GanttOption = Annotated[
    str | None, typer.Option("--gantt", metavar="F.png", help="Draw the decode step of median duration.")
]


def simulate(
    scenario: ScenarioOption = None,
    policy: PolicyOption = None,
    changes: SetOption = None,
    spans: SpansOption = None,
    perfetto: PerfettoOption = None,
    gantt: GanttOption = None,
    json: JsonOption = None,
) -> None:
    """Simulate one policy and say where the time goes."""
    check_picture(gantt)
    asked = scenario_of(scenario, changes, policy)
    check_targets(spans, perfetto, gantt, json, inputs=inputs_of(scenario, asked))
    with working(f"simulating {asked.policy}"):
        run = _simulated(asked)
    show(json, *run_page(describe(asked), run.to_dict()))
    write_json(record_of(run), json)
    with working("writing"):
        keep_run(run, describe(asked), spans, perfetto, gantt)


def _simulated(scenario: Any) -> Run:
    from sim.simulate import simulate as run_scenario

    return run_scenario(scenario)
