"""``trilane measure``: one scenario run on real lanes, as ``trilane simulate`` simulates it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trilane.output import JsonOption, check_picture, check_targets, show, working, write_json
from trilane.question import ScenarioOption, SetOption, describe, inputs_of, scenario_of
from trilane.run_page import keep_run, run_page
from trilane.verbs.simulate import GanttOption, PerfettoOption, SpansOption

LanesOption = Annotated[
    Literal["auto", "cuda", "host"],
    typer.Option(help="cuda: a GPU. host: threads and memory copies. auto: what the scenario's profile is of, or a GPU "
                      "if there is one."),
]  # fmt: skip


def measure(
    scenario: ScenarioOption = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Policy; see [bold]trilane policies[/]. Default: the scenario's.")
    ] = None,
    changes: SetOption = None,
    mode: Annotated[
        Literal["replay", "generate"],
        typer.Option(help="replay: the trace's routing on kernels of the model's shape, weights random. generate: a "
                          "Hugging Face model, end to end (needs --model and --prompts)."),
    ] = "replay",
    lanes: LanesOption = "auto",
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="generate: a folder, or the id of a Hugging Face model.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="F", help="generate: prompts, as for [bold]trilane trace capture[/].")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="F", help="generate: write the trace of what was routed.")
    ] = None,
    spans: SpansOption = None,
    perfetto: PerfettoOption = None,
    gantt: GanttOption = None,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Run one policy on this machine and say where the time went."""
    check_picture(gantt)
    asked = scenario_of(scenario, changes)
    check_targets(spans, perfetto, gantt, json, trace, inputs=(*inputs_of(scenario, asked), model, prompts))
    if policy is not None and policy != asked.policy:
        asked = asked.with_(policy=policy, parameters={})
    if mode == "generate":
        raise NotImplementedError
    from realrun.measure import measure as run_scenario

    with working(f"measuring {asked.policy}"):
        run = run_scenario(asked, lanes).run
    show(json, *run_page(describe(asked), run.to_dict()))
    layers = None if run.approximation is None else run.approximation.to_dict("records")
    write_json({"scenario": dict(run.scenario), "run": run.to_dict(), "approximation": layers}, json)
    with working("writing"):
        keep_run(run, describe(asked), spans, perfetto, gantt)
