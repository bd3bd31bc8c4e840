"""``trilane measure``: one scenario run on real lanes, as ``trilane simulate`` simulates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trilane.output import JsonOption, check_picture, check_targets, heading, show, working, write_json
from trilane.question import ScenarioOption, SetOption, describe, inputs_of, scenario_of
from trilane.run_page import keep_run, run_page
from trilane.verbs.simulate import GanttOption, PerfettoOption, SpansOption

if TYPE_CHECKING:
    from realrun.machines import Lanes
    from sim.run import Run
    from sim.scenario import Scenario


class MeasureError(ValueError):
    """Options that do not go together."""


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
                          "Hugging Face model, end to end; trace, model and sequences of the scenario do not count."),
    ] = "replay",
    lanes: LanesOption = "auto",
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="generate: a folder, or the id of a Hugging Face model.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="F", help="generate: a prompt a line, or JSON Lines, as for [bold]trace capture[/]; the "
                                       "first so many as the scenario's batch, cut to prompt_tokens."),
    ] = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="F", help="generate: vectors of a calibration, for forecasts that need them.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="F", help="generate: write the trace of what was routed, to be simulated.")
    ] = None,
    spans: SpansOption = None,
    perfetto: PerfettoOption = None,
    gantt: GanttOption = None,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Run one policy on this machine and say where the time went."""
    check_picture(gantt)
    asked = scenario_of(scenario, changes)
    check_targets(spans, perfetto, gantt, json, trace, inputs=(*inputs_of(scenario, asked), model, prompts, vectors))
    if policy is not None and policy != asked.policy:
        asked = asked.with_(policy=policy, parameters={})
    texts: list[str] = []
    if mode == "generate":
        run, texts = _generated(asked, lanes, model, prompts, vectors, trace)
        about = f"{model}, {len(texts)} sequences"
    else:
        _refuse_model(model, prompts, vectors, trace)
        run, about = _replayed(asked, lanes), describe(asked)
    show(json, *_texts(texts), *run_page(about, run.to_dict()))
    layers = None if run.approximation is None else run.approximation.to_dict("records")
    found = {"scenario": dict(run.scenario), "run": run.to_dict(), "approximation": layers}
    write_json({**found, "texts": texts} if texts else found, json)
    with working("writing"):
        keep_run(run, about, spans, perfetto, gantt)


def _replayed(asked: Scenario, lanes: Lanes) -> Run:
    from realrun.measure import measure as run_scenario

    with working(f"measuring {asked.policy}"):
        return run_scenario(asked, lanes).run


def _generated(
    asked: Scenario, lanes: Lanes, model: str | None, prompts: str | None, vectors: str | None, trace: str | None
) -> tuple[Run, list[str]]:
    from realrun.generate import generate
    from realrun.generation import GenerateRequest
    from realrun.measure import generating_machine
    from traces.capture_prompts import read_prompts

    if model is None or prompts is None:
        raise MeasureError("--mode generate: expected a model and prompts; give --model MODEL and --prompts F")
    texts = [prompt.text for prompt in read_prompts(prompts).prompts[: asked.batch]]
    request = GenerateRequest(
        model, texts, asked, prompt_tokens=asked.prompt_tokens, generated_tokens=asked.generated_tokens or 32,
        vectors=vectors, trace=trace,
    )  # fmt: skip
    machine = generating_machine(lanes)
    try:
        with working(f"generating under {asked.policy}"):
            found = generate(request, machine)
    finally:
        machine.close()
    return found.run, found.texts


def _refuse_model(*given: str | None) -> None:
    if any(given):
        raise MeasureError(
            "--mode replay: expected no --model, --prompts, --vectors or --trace: they are for --mode generate; the "
            "replayed model is the scenario's (--set model=NAME)"
        )


def _texts(texts: list[str]) -> list[Any]:
    """What was generated, above the numbers."""
    return [part for n, text in enumerate(texts) for part in (heading(f"sequence {n}"), text, "")]
