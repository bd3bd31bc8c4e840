"""``trilane profile``: measure this computer, so that simulations of it need no data sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trilane.output import JsonOption, check_targets, heading, note, show, table, working, write_json
from trilane.profile_page import profile_page
from trilane.question import names_in

if TYPE_CHECKING:
    from realrun.machines import Lanes, RealMachine
    from realrun.profile_timing import Effort
    from realrun.profiling import Findings
    from sim.hardware import Hardware

QUIET_LOAD = 1.0  # of a computer that does nothing else, or has just been measured


class ProfileError(ValueError):
    """A profile that cannot be made as it was asked for."""


def profile(
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="F.yaml", help="The profile; models are added to one that is there.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model to measure; repeatable. Default: deepseek-v2-lite."),
    ] = None,
    lanes: Annotated[
        Literal["auto", "cuda", "host"],
        typer.Option(help="cuda: a GPU. host: threads and memory copies. auto: a GPU if there is one."),
    ] = "auto",
    batch: Annotated[str, typer.Option(metavar="N,M", help="Batches to measure.")] = "1,4",
    context: Annotated[str, typer.Option(metavar="N,M", help="KV-cache lengths to decode with.")] = "16,128,512",
    prompt: Annotated[str, typer.Option(metavar="N,M", help="Prompt lengths to prefill.")] = "8,32,128",
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help="Policies whose decisions are timed. Default: all.")
    ] = None,
    gpu_core: Annotated[int | None, typer.Option(metavar="N", help="Host lanes: the core that plays the GPU.")] = None,
    cpu_cores: Annotated[str | None, typer.Option(metavar="N,M", help="Cores that compute experts.")] = None,
    link_gbps: Annotated[
        float | None, typer.Option(metavar="X", help="Host lanes: GB/s that the link is paced to. Default: 4.")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(metavar="X", help="GPU memory. Default: all; on host lanes 40% of the computer's.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, in a third of the time.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure what experts, copies, attention and decisions take here: a hardware file made by microbenchmarks alone.

    Nothing is run end to end, so what is simulated with the file can be compared with real runs.
    """
    from realrun.profile_lab import Points
    from realrun.profile_threads import with_best_threads
    from realrun.profile_timing import QUICK, Effort
    from realrun.profiling import profile as measured
    from sim.profile_yaml import write_profile
    from traces.catalogue import load_model

    check_targets(out, json)
    shapes = [load_model(name) for name in model or ["deepseek-v2-lite"]]
    sizes = {"batch": batch, "context": context, "prompt": prompt}
    points = Points(*(_numbers(name, text) for name, text in sizes.items()))
    names = None if policies is None else names_in(policies)
    cores = () if cpu_cores is None else _numbers("cpu-cores", cpu_cores, least=0)
    effort: Effort = QUICK if quick else Effort()
    into = _earlier(out)
    machine = _machine(into, lanes, gpu_core, cores, link_gbps)
    memory_bytes = None if memory_gb is None else round(memory_gb * 1e9)
    with working("measuring") as say:
        machine, rates = (machine, None) if into else with_best_threads(machine, shapes[0])
        try:
            found = measured(
                machine, shapes, points, names, name=Path(out).stem, into=into, memory_bytes=memory_bytes,
                known_rates=rates, effort=effort, progress=say,
            )  # fmt: skip
        finally:
            machine.close()
    write_profile(found.hardware, out)
    _report(found, out, json)


def _report(found: Findings, out: str, json: str | None) -> None:
    assert found.hardware.profile is not None
    load = float(found.hardware.profile.machine["load_average"])
    if load > QUIET_LOAD:
        note(f"the load average was {load:g} at the beginning: were other programs at work? Then measure again without")
    for policy, why in found.skipped.items():
        note(f"decisions of {policy} not timed: {why}")
    rows = [[aim.what, f"{aim.share:.0%}", f"{aim.wanted:.0%}", "met" if aim.met else "not met"] for aim in found.aims]
    show(
        json, heading(f"{found.hardware.name}: {found.hardware.about}"), *profile_page(found.hardware.profile), "",
        heading("rates against aims"), table(("", "reached", "aim", ""), rows), f"\nwritten to {out}",
    )  # fmt: skip
    aims = [{**aim._asdict(), "met": aim.met} for aim in found.aims]
    write_json({"hardware": found.hardware.document(), "aims": aims, "skipped": dict(found.skipped)}, json)


def _earlier(out: str) -> Hardware | None:
    """The profile that is in the file already. Raises ProfileError for a file of another kind."""
    from sim.hardware import load_hardware

    if not Path(out).exists():
        return None
    there = load_hardware(out)
    if there.profile is None:
        raise ProfileError(f"{out}: expected a profile to add to, or no file; this machine was not measured")
    return there


def _machine(
    into: Hardware | None, lanes: Lanes, gpu_core: int | None, cpu_cores: tuple[int, ...], link_gbps: float | None
) -> RealMachine:
    """As asked for; where nothing is, that of the earlier profile."""
    from realrun.machines import machine_for, machine_of

    asked = lanes != "auto" or cpu_cores or (gpu_core, link_gbps) != (None, None)
    if into is not None and into.profile is not None and not asked:
        return machine_of(into.profile)
    return machine_for(lanes, gpu_core, cpu_cores, link_gbps)


def _numbers(name: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers with commas between them, ascending. Raises ProfileError."""
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < least:
        raise ProfileError(f"--{name}: expected whole numbers >= {least} with commas between them, got {text!r}")
    return numbers
