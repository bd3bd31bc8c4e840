"""``trilane profile``: measure this computer, so that simulations of it need no data sheet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from realrun.machine import LaneKind
from trilane.output.pages.output import JsonOption, check_targets, heading, note, report, table, working
from trilane.verbs.inputs import policies_in, whole_numbers
from trilane.verbs.llama_cpp import EngineOption, LlamaProfile, profile_llama, refuse_without_engine
from trilane.verbs.options import (
    MOST_CORES,
    OWN_POLICY,
    HostMemoryOption,
    LaneChoice,
    OptionError,
    grouped,
    model_named,
    print_remarks,
)

if TYPE_CHECKING:
    from realrun.machine.machines import LaneOptions, RealMachine
    from realrun.profiling.lab import Points
    from realrun.profiling.profile import Findings
    from realrun.profiling.timing import Effort
    from sim.machine.hardware import Hardware
    from traces.models.shape import ModelShape

QUIET_LOAD = 1.0  # load average of a computer that runs nothing else, or has just been measured


@grouped
def profile(
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="F.yaml",
                     help="The profile. If it exists already, for this machine, models are added to it, on its lanes; "
                          "what is measured again replaces earlier numbers."),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model to measure; repeatable. Default: deepseek-v2-lite."),
    ] = None,
    lanes: Annotated[
        LaneKind,
        typer.Option(help="cuda: a GPU. host-lanes: threads and memory copies. auto: those of an existing profile, "
                          "else a GPU if there is one."),
    ] = "auto",
    batch: Annotated[str, typer.Option(metavar="N,M", help="Batches to measure.")] = "1,4",
    context: Annotated[str, typer.Option(metavar="N,M", help="KV-cache lengths to decode with.")] = "16,128,512",
    prompt: Annotated[str, typer.Option(metavar="N,M", help="Prompt lengths to prefill.")] = "8,32,128",
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Policies whose decisions are timed. {OWN_POLICY}. Default: all."),
    ] = None,
    gpu_core: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_CORES, metavar="N", help="Host lanes: the core that stands in for the GPU."),
    ] = None,
    cpu_cores: Annotated[
        str | None,
        typer.Option(metavar="N,M", help="Cores that compute experts. Default: the host thread, the copies and the GPU "
                                         "of host lanes get a physical core each where there are enough, and experts "
                                         "the rest."),
    ] = None,
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(metavar="X", help="Host lanes: speed of the link, in GB/s (10^9 bytes per second). Default: 4."),
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(metavar="X", help="GPU memory in GB (10^9 bytes). cuda: what may be allocated, now and in every "
                                       "run on the profile's lanes; default: all. Host lanes: what the GPU has in the "
                                       "view of policies; default: 40% of the computer's memory."),
    ] = None,
    *,
    host_memory_gb: HostMemoryOption = None,
    chosen: LaneChoice,
    runtime: Annotated[
        str | None,
        typer.Option(metavar="R", help="cuda: eager (kernel by kernel) or graphs (decode steps outside routed experts "
                                       "are recorded), now and in every run on the profile's lanes. Default: eager."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, in a third of the time.")] = False,
    engine: EngineOption = None,
    kernels: LlamaProfile,
    json: JsonOption = None,
) -> None:
    """Measure how long experts, copies, attention and decisions take on this computer, by microbenchmarks alone.

    It takes minutes per model; run nothing else meanwhile, since that would be measured too.
    Times are interpolated between the measured sizes, and extrapolated beyond the largest:
    choose batches, contexts and prompts that span those of your scenarios.

    Nothing is run end to end, so simulations with the resulting hardware file can be compared with real runs.

    With --engine llama.cpp the result is an engine file: the rates of llama.cpp's kernels on this machine's CPU, from
    small models of random weights that are written next to it and removed.
    """
    if engine is not None:
        profile_llama(kernels, out, json)
        return
    refuse_without_engine(kernels)
    from policies.registry import system
    from realrun.machine.host_memory import host_memory_given
    from realrun.profiling.lab import Points
    from realrun.profiling.timing import QUICK, Effort
    from traces.models.catalogue import load_model

    check_targets(out, json)
    shapes = [load_model(model_named(name)) for name in model or ["deepseek-v2-lite"]]
    lengths = whole_numbers(context, "--context"), whole_numbers(prompt, "--prompt")
    points = Points(whole_numbers(batch, "--batch"), *lengths)
    names = None if policies is None else policies_in(policies)
    for policy in names or ():
        system(policy)  # an unknown name is refused now, not after minutes of measuring
    cores = None if cpu_cores is None else whole_numbers(cpu_cores, "--cpu-cores", least=0)
    link_bytes_per_s, memory = _bytes("link-gb-per-s", link_gb_per_s), _bytes("memory-gb", memory_gb)
    options = chosen.options(
        gpu_core=gpu_core, cpu_cores=cores, link_bytes_per_s=link_bytes_per_s,
        memory_bytes=None if memory is None else round(memory), runtime=runtime,
    )
    into = _earlier(out)
    effort = QUICK if quick else Effort()
    with host_memory_given(host_memory_gb):
        machine = _machine(into, lanes, options)
        findings = _measured(machine, shapes, points, names, options, effort, Path(out).stem, into)
    _keep(findings.hardware, out)
    _report(findings, out, json)


def _measured(
    machine: RealMachine, shapes: Sequence[ModelShape], points: Points, policies: Sequence[str] | None,
    options: LaneOptions, effort: Effort, name: str, into: Hardware | None,
) -> Findings:
    """Measure, and close the machine. The memory of an earlier profile is kept unless another was chosen."""
    from realrun.profiling.cpu_threads import with_best_threads
    from realrun.profiling.profile import profile as measured

    counted, kept = into is not None or options.cpu_threads is not None, into if options.memory_bytes is None else None
    with working("measuring") as say:
        machine, rates = (machine, None) if counted else with_best_threads(machine, shapes[0])
        try:
            findings = measured(
                machine, shapes, points, policies, name=name, into=into,
                memory_bytes=kept.gpu.memory_bytes if kept else options.memory_bytes, known_rates=rates,
                effort=effort, progress=say,
            )
            print_remarks(machine)
        finally:
            machine.close()
    if kept is None:
        return findings
    key, hardware = "gpu.memory_bytes", findings.hardware  # a number that was kept keeps its source, too
    return replace(findings, hardware=replace(hardware, origins={**hardware.origins, key: kept.origins[key]}))


def _keep(hardware: Hardware, out: str) -> None:
    """Write the profile, unless it could not be read again: then an earlier file stays. Raises OptionError."""
    from sim.machine.hardware import load_hardware, write_hardware
    from sim.machine.plausibility import HardwareError
    from trilane.common.files import atomic_path

    with atomic_path(out) as aside:
        write_hardware(hardware, aside)
        try:
            load_hardware(aside)
        except HardwareError as error:
            raise OptionError(
                f"{error}: no machine has such numbers, so this one was busy; measure again without other programs. "
                f"{out} is unchanged"
            ) from None


def _report(findings: Findings, out: str, json: str | None) -> None:
    from trilane.output.pages.profile import profile_page

    profile = findings.hardware.measured_profile()
    load = float(profile.machine["load_average"])
    if load > QUIET_LOAD:
        note(f"the load average was {load:g} at the beginning: if other programs were running, measure again without")
    for policy, why in findings.skipped.items():
        note(f"decisions of {policy} were not timed: {why}")
    rows = [
        [aim.what, f"{aim.share:.0%}", f"{aim.wanted:.0%}", "met" if aim.met else "not met"] for aim in findings.aims
    ]
    aims = [{**aim._asdict(), "met": aim.met} for aim in findings.aims]
    record = {"hardware": findings.hardware.document(), "aims": aims, "skipped": dict(findings.skipped)}
    report(
        json, record, heading(f"{findings.hardware.name}: {findings.hardware.about}"), *profile_page(profile), "",
        heading("rates against aims"), table(("", "reached", "aim", ""), rows), f"\nwritten to {out}",
        f"use it: trilane compare --set {shlex.quote(f'hardware={out}')} ...; "
        f"check it: trilane validate examples/validation.yaml --profile {shlex.quote(out)}",
    )


def _earlier(out: str) -> Hardware | None:
    """The profile that the file holds already. Raises OptionError for a file of another kind."""
    from sim.machine.hardware import load_hardware

    if not Path(out).exists():
        return None
    earlier = load_hardware(out)
    if not earlier.measured:
        raise OptionError(f"{out}: expected a profile to add to, or no file; this machine was not measured")
    return earlier


def _machine(into: Hardware | None, lanes: LaneKind, options: LaneOptions) -> RealMachine:
    """The machine of the earlier profile, or a new one with these options."""
    from realrun.machine.machines import machine_for
    from realrun.replay.replay import machine_on

    return machine_for(lanes, options) if into is None else machine_on(into, lanes, options)


def _bytes(name: str, value: float | None) -> float | None:
    """Bytes of a number of GB. Raises OptionError unless it is above 0."""
    if value is not None and not 0 < value < 1e6:
        raise OptionError(f"--{name}: expected a number of GB (10^9 bytes) above 0, got {value:g}")
    return None if value is None else value * 1e9
