"""``trilane validate``: runs measured on this machine and predicted from microbenchmarks alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilane.output.pages.output import (
    JsonOption,
    check_folder,
    check_targets,
    heading,
    legend,
    note,
    report,
    table,
    working,
)
from trilane.verbs.inputs import changes_of, command_line, policies_in, policy_files
from trilane.verbs.llama_cpp import EngineOption, LlamaValidation, refuse_without_engine, validate_llama
from trilane.verbs.options import OWN_POLICY, HostMemoryOption, OptionError, SetOption, grouped

if TYPE_CHECKING:
    from sim.runs.scenario import Scenario
    from trilane.study.validation.validate import Stop, Validated, ValidationPlan


FILES = ("report.md", "scatter.png", "timeline.png", "repeated-profile.yaml")
JOURNAL = "journal"  # the file next to them
STOPPED = 3  # exit status: the time limit came before the last run
_OF_THE_PROFILE = {"date": "profile made", "load_average": "load average then"}


def _no_nan(seconds: float | None) -> float | None:
    """No range excludes nan, since it compares as false with everything."""
    if seconds is not None and isnan(seconds):
        raise typer.BadParameter("nan is not a number of seconds")
    return seconds


@grouped
def validate(
    plan: Annotated[
        str,
        typer.Argument(metavar="PLAN.yaml", help="What to run, such as examples/validation.yaml: [bold]scenario[/], "
                                                 "keys that all have in common; [bold]vary[/], lists of values by key, "
                                                 "of which every combination is run; [bold]policies[/], names, or "
                                                 "`name: {parameter: value}`; [bold]repeats[/], 5 if left out."),
    ],
    profile: Annotated[
        str,
        typer.Option(metavar="F.yaml", help="Profile of this machine, by [bold]trilane profile[/]: runs use its lanes, "
                                            "and policies plan with its numbers."),
    ],
    changes: SetOption = None,
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help=f"Policies. {OWN_POLICY}. Default: the plan's.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Measured runs of each scenario. Default: the plan's."),
    ] = None,
    host_memory_gb: HostMemoryOption = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write report.md, its pictures, and repeated-profile.yaml, from which the "
                                         "predictions were made; and keep a journal there of what was measured, so "
                                         "that the same command continues where it stopped."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, metavar="SECONDS", callback=_no_nan,
                     help="Start no new run after this many seconds, then report on the completed ones. Default: no "
                          "limit."),
    ] = None,
    json: JsonOption = None,
    *,
    engine: EngineOption = None,
    llama: LlamaValidation,
) -> None:
    """Measure scenarios on this machine, predict them from microbenchmarks alone, and report the errors.

    The profile's microbenchmarks are repeated, at the scenarios' sizes, before every round of measured runs and after
    the last, since a machine may be slower for minutes.
    Predictions are made from these repeats; no measured run goes into them.
    Policies plan with the profile's own numbers, in measured and predicted runs alike.
    The cost of a decision is the profile's too.

    Every run is kept in the journal, DIR/journal, as soon as it ends. With the same plan, profile and code no run is
    measured twice, however the command ended; after a change of any of them a new journal is started, and the previous
    one is kept as DIR/journal.before.
    After SIGINT or SIGTERM the current run ends, and the completed runs are reported; a second signal kills the
    process.

    Exit status: 0 when done, whether or not the aims were met; 2 when nothing could be run, or a run failed; 3 when the
    time limit, 130 or 143 when a signal came before the last run.

    With --engine llama.cpp the plan is like examples/validation-llama.yaml, and the profile an engine file of
    [bold]trilane profile --engine llama.cpp[/]; models are written to DIR one after the other, and removed. A plan with
    [bold]cpu_parts[/], such as examples/gpu-llama.yaml, measures models on the GPU with the experts of these parts of
    their layers on the CPU. --set changes the plan; [bold]--set hardware=here[/] takes the parts that are found here.
    """
    if engine is not None:
        validate_llama(llama, plan, profile, out, json, changes_of(changes))
        return
    refuse_without_engine(llama)
    from datetime import UTC, datetime

    from realrun.machine.host_memory import host_memory_given
    from trilane.study.validation.validate import stopping

    check_folder(out)
    files = [Path(out) / name for name in FILES] if out and Path(out).is_dir() else []
    names = None if policies is None else policies_in(policies)
    check_targets(json, *files, inputs=(plan, profile, *policy_files()))
    chosen = _read_plan(plan, profile, changes, names, repeats)
    begin = datetime.now(UTC)
    with host_memory_given(host_memory_gb), stopping(time_limit) as stop:
        found = _run(chosen, profile, Path(out) / JOURNAL if out else None, stop)
    _print(found, chosen, json)
    if out:
        when = f"{begin:%Y-%m-%d %H:%M} to {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        _report(found, Path(out), when)
    if found.ended.error is not None:
        raise found.ended.error
    if found.ended.why is not None:  # it was stopped early
        raise typer.Exit(STOPPED if stop.signal is None else 128 + stop.signal)


def _read_plan(
    plan: str, profile: str, changes: Sequence[str] | None, names: Sequence[str] | None, repeats: int | None
) -> ValidationPlan:
    """The plan, on the profile's machine, with the changes of the command line."""
    from dataclasses import replace

    from trilane.study.validation.validate import ValidationPlan

    chosen = ValidationPlan.from_yaml(plan, {**changes_of(changes), "hardware": profile})
    if names is not None:
        settings: list[Scenario] = []
        for setting in (scenario.with_(policy=names[0], parameters={}) for scenario in chosen.scenarios):
            settings += [setting] * (setting not in settings)
        chosen = replace(chosen, scenarios=tuple(each.with_(policy=name) for each in settings for name in names))
    return chosen if repeats is None else replace(chosen, repeats=repeats)


def _run(chosen: ValidationPlan, profile: str, journal: Path | None, stop: Stop) -> Validated:
    """The validation, on the lanes of the profile. Raises OptionError for a machine without a profile."""
    from realrun.replay.replay import machine_on
    from sim.machine.hardware import load_hardware
    from trilane.study.validation.validate import validate as run_all

    hardware = load_hardware(profile)
    if not hardware.measured:
        raise OptionError(f"{profile}: expected a profile, measured on this machine; make one: trilane profile")
    machine = machine_on(hardware)
    try:
        with working("validating") as say:
            return run_all(chosen, machine, say, folder=journal, stop=stop)
    finally:
        machine.close()


def _print(found: Validated, chosen: ValidationPlan, json: str | None) -> None:
    from trilane.output.pages.validation import MEANINGS, failure_lines, notes_of, record_of, summary_lines, table_of

    agreement, ended = found.agreement, found.ended
    runs = {"measured": ended.runs, "asked": ended.planned, "stopped": ended.why}
    title = heading(f"{len(chosen.scenarios)} scenarios, {chosen.repeats} runs each, on {found.hardware.name}")
    report(json, {**record_of(agreement), "runs": runs}, title, table(*table_of(agreement)), legend(MEANINGS), "",
           *summary_lines(agreement), *notes_of(found), "", *failure_lines(agreement))


def _report(found: Validated, folder: Path, when: str) -> None:
    """The page with its pictures, and the profile from which the predictions were made."""
    from sim.machine.hardware import write_hardware
    from trilane.output.figures import plot_agreement, plot_measured_timeline, save_figure
    from trilane.output.pages.validation import notes_of, title_of, write_report

    agreement, hardware = found.agreement, found.hardware
    report, dots, timeline, repeated = FILES
    folder.mkdir(parents=True, exist_ok=True)
    write_hardware(hardware, folder / repeated)
    errors = [abs(comparison.tpot_ms.error or 0.0) for comparison in agreement.comparisons]
    worst = errors.index(max(errors))
    title, error = title_of(agreement, worst), agreement.comparisons[worst].tpot_ms.error
    facts = hardware.measured_profile().machine.items()
    save_figure(plot_agreement(agreement, hardware.name), folder / dots)
    save_figure(plot_measured_timeline(agreement.comparisons[worst], about=title), folder / timeline)
    write_report(
        agreement, folder / report, when=when, command=command_line(),
        machine={_OF_THE_PROFILE.get(name, name): str(fact) for name, fact in facts if fact not in found.remarks},
        pictures={
            dots: "Time per output token, predicted against measured; the band is 10 % wide on either side.",
            timeline: f"A decode step of the scenario with the largest error of time per output token, {error:+.1%}: "
                      f"{title}. Measured above, predicted below, lane by lane.",
        },
        notes=notes_of(found),
    )
    note(f"report, pictures and the profile of the predictions are in {folder}/")
