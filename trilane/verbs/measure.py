"""``trilane measure``: one scenario run on real lanes, as ``trilane simulate`` simulates it."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from realrun.machine import LaneKind
from trilane.output.pages.output import JsonOption, check_targets, heading, report, working
from trilane.verbs.inputs import describe, inputs_of, scenario_of
from trilane.verbs.llama_cpp import EngineOption, LlamaRun, measure_llama, refuse_without_engine
from trilane.verbs.options import (
    HostMemoryOption,
    LaneChoice,
    OptionError,
    PolicyOption,
    RunFiles,
    ScenarioOption,
    SetOption,
    grouped,
    print_remarks,
)

if TYPE_CHECKING:
    from sim.runs.run import Run
    from sim.runs.scenario import Scenario


@dataclass(frozen=True)
class Generation:
    """Model, prompts and vectors of ``--mode generate``, and the trace that it writes."""

    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="generate: a folder, or the id of a Hugging Face model.")
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(metavar="F", help="generate: one prompt per line, or JSON Lines, as for [bold]trace capture[/]; "
                                       "the scenario's batch says how many are used. All must have the same number of "
                                       "tokens: --set prompt_tokens=N cuts them to N."),
    ] = None
    vectors: Annotated[
        str | None, typer.Option(metavar="F", help="generate: vectors of a calibration, for forecasts that need them.")
    ] = None
    trace: Annotated[
        str | None, typer.Option(metavar="F", help="generate: write the trace of the routing, for simulations.")
    ] = None


@grouped
def measure(
    scenario: ScenarioOption = None,
    policy: PolicyOption = None,
    changes: SetOption = None,
    mode: Annotated[
        Literal["replay", "generate"],
        typer.Option(help="replay: the trace's routing on kernels of the model's shape, with random weights. generate: "
                          "a Hugging Face model, end to end: trace and model of the scenario are ignored, and its "
                          "sequences, prefill_chunk_tokens, noisy_forecast_recall, sampled_steps, "
                          "sampled_prompt_tokens and draft_tokens are refused."),
    ] = "replay",
    lanes: Annotated[
        LaneKind,
        typer.Option(help="cuda: a GPU. host-lanes: threads and memory copies. auto: those of the scenario's profile; "
                          "with a preset, a GPU if there is one."),
    ] = "auto",
    *,
    lane_choice: LaneChoice,
    generation: Generation,
    host_memory_gb: HostMemoryOption = None,
    experts_in: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder on the disk, for a file of the experts, where the scenario's "
                                         "host_expert_gb has no room for all of them. The file is deleted."),
    ] = None,
    files: RunFiles,
    engine: EngineOption = None,
    llama: LlamaRun,
    json: JsonOption = None,
) -> None:
    """Run one policy on this machine and report where the time went.

    A replay has a trace's routing and random weights: it gives times and no text.
    It runs once to warm up, then is measured.

    A generation gives text: prompts, then generated_tokens (32 if the scenario has none); it is not run twice.

    Several GPUs (--set gpus=2) divide the layers: on host lanes, or CUDA devices, of which two have never been tried.

    Policies plan with the numbers of the scenario's hardware, as in a simulation.
    Name a profile of this machine (--set hardware=F.yaml), or they plan with the numbers of a preset.
    A profile has its own lanes: other options of lanes must be as they were when it was measured.

    With --engine llama.cpp a GGUF file is run by that engine, and all options of scenarios and lanes are ignored.
    """
    if engine is not None:
        measure_llama(llama, json)
        return
    refuse_without_engine(llama)
    from realrun.machine.host_memory import host_memory_given
    from trilane.output.pages.run import record_of, run_page

    chosen = scenario_of(scenario, changes, policy)
    inputs = (*inputs_of(scenario, chosen), generation.model, generation.prompts, generation.vectors)
    check_targets(files.spans, files.perfetto, json, generation.trace, picture=files.gantt, inputs=inputs)
    with host_memory_given(host_memory_gb):
        execute = _replayed if mode == "replay" else _generated
        run, about, texts = execute(chosen, lanes, lane_choice, generation, experts_in)
    shown = [part for n, text in enumerate(texts) for part in (heading(f"sequence {n}"), text, "")]
    record = {**record_of(run), **({"texts": texts} if texts else {})}
    report(json, record, *shown, *run_page(about, run.to_dict()))
    files.write(run, about)


_Ran: TypeAlias = "tuple[Run, str, list[str]]"  # with its description, and the texts that it generated


def _replayed(
    chosen: Scenario, lanes: LaneKind, lane_choice: LaneChoice, generation: Generation, experts_folder: Path | None
) -> _Ran:
    from realrun.replay.replay import measure as run_scenario

    if any(astuple(generation)):
        raise OptionError(
            "--mode replay: expected no --model, --prompts, --vectors or --trace: they are for --mode generate; the "
            "replayed model is the scenario's (--set model=NAME)"
        )
    with working(f"measuring {chosen.policy}"):
        measured = run_scenario(chosen, lanes, lane_choice.options(), print_remarks, experts_folder)
        return measured.run, describe(chosen), []


def _generated(
    chosen: Scenario, lanes: LaneKind, lane_choice: LaneChoice, generation: Generation, experts_folder: Path | None
) -> _Ran:
    from realrun.generation.generate import GenerateRequest, generate
    from realrun.replay.replay import machine_on
    from sim.machine.hardware import load_hardware

    model, prompts = generation.model, generation.prompts
    if model is None or prompts is None:
        raise OptionError("--mode generate: expected a model and prompts; give --model MODEL and --prompts F")
    request = GenerateRequest(
        model, _prompts(prompts, chosen.batch), chosen, prompt_tokens=chosen.prompt_tokens,
        generated_tokens=chosen.generated_tokens or 32, vectors=generation.vectors, trace=generation.trace,
        experts_folder=experts_folder,
    )
    request.check()
    machine = machine_on(load_hardware(chosen.hardware), lanes, lane_choice.options(), inline=True)
    try:
        with working(f"generating under {chosen.policy}"):
            generated = generate(request, machine)
        print_remarks(machine)
    finally:
        machine.close()
    return generated.run, f"{model}, {len(generated.texts)} sequences", generated.texts


def _prompts(path: str, batch: int) -> list[str]:
    """The first ``batch`` prompts of a file. Raises OptionError if there are fewer."""
    from traces.capture.prompts import read_prompts

    texts = [prompt.text for prompt in read_prompts(path).prompts]
    if len(texts) < batch:
        raise OptionError(f"{path}: expected {batch} prompts, one for each sequence of the batch, got {len(texts)}; "
                          f"add some, or choose --set batch={len(texts)}")
    return texts[:batch]
