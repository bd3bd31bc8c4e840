"""``trilane measure``: one scenario run on real lanes, as ``trilane simulate`` simulates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from realrun.machine import LaneKind
from trilane.pages.output import JsonOption, check_picture, check_targets, heading, show, working, write_json
from trilane.pages.run import keep_run, record_of, run_page
from trilane.verbs.lane_options import (
    Chosen,
    ChunkOption,
    CpuThreadsOption,
    DeviceOption,
    HostMemoryOption,
    ResultPathOption,
    tell,
)
from trilane.verbs.scenario_options import PolicyOption, ScenarioOption, SetOption, describe, inputs_of, scenario_of
from trilane.verbs.simulate import GanttOption, PerfettoOption, SpansOption

if TYPE_CHECKING:
    from sim.runs.run import Run
    from sim.runs.scenario import Scenario


class MeasureError(ValueError):
    """Options that do not go together."""


LanesOption = Annotated[
    LaneKind,
    typer.Option(help="cuda: a GPU. host-lanes: threads and memory copies. auto: those of the scenario's profile; "
                      "beside a preset, a GPU if there is one."),
]  # fmt: skip


def measure(
    scenario: ScenarioOption = None,
    policy: PolicyOption = None,
    changes: SetOption = None,
    mode: Annotated[
        Literal["replay", "generate"],
        typer.Option(help="replay: the trace's routing on kernels of the model's shape, weights random. generate: a "
                          "Hugging Face model, end to end: trace and model of the scenario do not count, and its "
                          "sequences, prefill_chunk_tokens and noisy_forecast_recall are refused."),
    ] = "replay",
    lanes: LanesOption = "auto",
    cpu_threads: CpuThreadsOption = None,
    device: DeviceOption = None,
    result_path: ResultPathOption = None,
    chunk_mb: ChunkOption = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="generate: a folder, or the id of a Hugging Face model.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="F", help="generate: a prompt a line, or JSON Lines, as for [bold]trace capture[/]; the "
                                       "first so many as the scenario's batch. All must have as many tokens as each "
                                       "other: --set prompt_tokens=N cuts them to N."),
    ] = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="F", help="generate: vectors of a calibration, for forecasts that need them.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="F", help="generate: write the trace of what was routed, to be simulated.")
    ] = None,
    host_memory_gb: HostMemoryOption = None,
    spans: SpansOption = None,
    perfetto: PerfettoOption = None,
    gantt: GanttOption = None,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Run one policy on this machine and say where the time went.

    A replay has a trace's routing and random weights: it gives times and no text.
    It runs once to warm up, then is measured.

    A generation gives text: prompts, then generated_tokens (32 if the scenario does not say); it is not run twice.

    Policies decide by what the scenario's hardware says, as in a simulation.
    Name a profile of this machine (--set hardware=F.yaml), or they believe in the numbers of a preset.
    A profile has its own lanes: what else is asked for must be as it was measured.
    """
    from realrun.machine.memory_check import host_memory_given

    check_picture(gantt)
    chosen = Chosen(cpu_threads, device, result_path, chunk_mb)
    asked = scenario_of(scenario, changes, policy)
    check_targets(spans, perfetto, gantt, json, trace, inputs=(*inputs_of(scenario, asked), model, prompts, vectors))
    with host_memory_given(host_memory_gb):
        if mode == "generate":
            found = _generated(asked, lanes, chosen, model, prompts, vectors, trace)
        else:
            _refuse_model(model, prompts, vectors, trace)
            found = _replayed(asked, lanes, chosen)
    show(json, *_texts(found.texts), *run_page(found.about, found.run.to_dict()))
    record = record_of(found.run)
    write_json({**record, "texts": found.texts} if found.texts else record, json)
    with working("writing"):
        keep_run(found.run, found.about, spans, perfetto, gantt)


class _Found(NamedTuple):
    """A run, what it is of, and the texts that it gave."""

    run: Run
    about: str
    texts: list[str]


def _replayed(asked: Scenario, lanes: LaneKind, chosen: Chosen) -> _Found:
    from realrun.replay.measure import measure as run_scenario

    with working(f"measuring {asked.policy}"):
        return _Found(run_scenario(asked, lanes, chosen.options(), tell).run, describe(asked), [])


def _generated(
    asked: Scenario, lanes: LaneKind, chosen: Chosen, model: str | None, prompts: str | None, vectors: str | None,
    trace: str | None,
) -> _Found:  # fmt: skip
    from realrun.generation.generate import generate
    from realrun.generation.preparation import GenerateRequest
    from realrun.replay.measure import generating_machine
    from sim.machine.hardware import load_hardware

    if model is None or prompts is None:
        raise MeasureError("--mode generate: expected a model and prompts; give --model MODEL and --prompts F")
    texts = _prompts(prompts, asked.batch)
    request = GenerateRequest(
        model, texts, asked, prompt_tokens=asked.prompt_tokens, generated_tokens=asked.generated_tokens or 32,
        vectors=vectors, trace=trace,
    )  # fmt: skip
    request.check()
    machine = generating_machine(load_hardware(asked.hardware), lanes, chosen.options())
    try:
        with working(f"generating under {asked.policy}"):
            found = generate(request, machine)
        tell(machine)
    finally:
        machine.close()
    return _Found(found.run, f"{model}, {len(found.texts)} sequences", found.texts)


def _prompts(path: str, batch: int) -> list[str]:
    """The first ``batch`` prompts of a file. Raises MeasureError where there are fewer."""
    from traces.capture.prompts import read_prompts

    texts = [prompt.text for prompt in read_prompts(path).prompts]
    if len(texts) < batch:
        raise MeasureError(f"{path}: expected {batch} prompts, one for each sequence of the batch, got {len(texts)}; "
                           f"add some, or choose --set batch={len(texts)}")  # fmt: skip
    return texts[:batch]


def _refuse_model(*given: str | None) -> None:
    if any(given):
        raise MeasureError(
            "--mode replay: expected no --model, --prompts, --vectors or --trace: they are for --mode generate; the "
            "replayed model is the scenario's (--set model=NAME)"
        )


def _texts(texts: list[str]) -> list[Any]:
    """What was generated, above the numbers."""
    return [part for n, text in enumerate(texts) for part in (heading(f"sequence {n}"), text, "")]
