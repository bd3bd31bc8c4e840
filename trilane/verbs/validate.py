"""``trilane validate``: measured beside predicted from microbenchmarks alone, scenario by scenario."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilane.pages.output import (
    JsonOption,
    check_folder,
    check_targets,
    heading,
    legend,
    note,
    show,
    table,
    working,
    write_json,
)
from trilane.verbs.lane_options import HostMemoryOption
from trilane.verbs.scenario_options import SetOption, changes_of

if TYPE_CHECKING:
    from trilane.study.validation.agreement import Agreement
    from trilane.study.validation.plan import ValidationPlan
    from trilane.study.validation.stopping import Stop
    from trilane.study.validation.validate import Validated


FILES = ("report.md", "scatter.png", "timeline.png", "repeated-profile.yaml")
JOURNAL = "journal"  # the folder next to them
STOPPED = 3  # exit status: the time limit came before the last run
_OF_THE_PROFILE = {"date": "profile made", "load_average": "load average then"}


def validate(
    plan: Annotated[
        str,
        typer.Argument(metavar="PLAN.yaml", help="What to run, as examples/validation.yaml: [bold]scenario[/], keys "
                                                 "that all have in common; [bold]vary[/], lists of values by key, of "
                                                 "which every combination is run; [bold]policies[/], names, or `name: "
                                                 "{parameter: value}`; [bold]repeats[/], 5 if left out."),
    ],
    profile: Annotated[
        str,
        typer.Option(metavar="F.yaml", help="Profile of this machine, by [bold]trilane profile[/]: its lanes are "
                                            "used, and its numbers are what policies plan with."),
    ],
    changes: SetOption = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measured runs of each scenario. Default: the plan's.")
    ] = None,
    host_memory_gb: HostMemoryOption = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write report.md, its pictures, and repeated-profile.yaml, which the "
                                         "predictions were made from; and keep a journal there of what was "
                                         "measured: the same command resumes where it stopped."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Start no new run after this many seconds, then report on the "
                                                    "completed ones. Default: no limit."),
    ] = None,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Measure scenarios on this machine, predict them from microbenchmarks alone, and say how well that went.

    The profile's microbenchmarks are repeated, at the scenarios' sizes, before every round of measured runs and after
    the last, since a machine may be slower for minutes.
    Predictions are made from these repeats; no measured run goes into them.
    Policies plan with the profile's own numbers, in measured and predicted runs alike.
    What a decision costs is the profile's too.

    Every run is kept in the journal, DIR/journal, as soon as it ends. With the same plan, profile and code no run is
    measured twice, however the command ended; after a change of these the journal begins anew, and the one before is
    kept as DIR/journal.before.
    SIGINT and SIGTERM let the present run end, and are followed by a report on what there is; a second signal kills
    the process.

    Exit status: 0 when done, whether or not the aims were met; 2 when nothing could be run, or a run failed; 3 when the
    time limit, 130 or 143 when a signal came before the last run.
    """
    from datetime import UTC, datetime

    from realrun.machine.memory_check import host_memory_given
    from trilane.study.validation.stopping import stopping

    check_folder(out)
    files = [Path(out) / name for name in FILES] if out and Path(out).is_dir() else []
    check_targets(json, *files, inputs=(plan, profile))
    asked = _asked(plan, profile, changes, repeats)
    begin = datetime.now(UTC)
    with host_memory_given(host_memory_gb), stopping(time_limit) as stop:
        found = _run(asked, profile, Path(out) / JOURNAL if out else None, stop)
    _show(found, asked, json)
    write_json({**found.agreement.to_dict(), "runs": _runs(found)}, json)
    if out:
        when = f"{begin:%Y-%m-%d %H:%M} to {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        command = command_of(plan, profile, changes, repeats, out, json, host_memory_gb, time_limit)
        _report(found, Path(out), when, command)
    _end(found, stop)


def _asked(plan: str, profile: str, changes: Sequence[str] | None, repeats: int | None) -> ValidationPlan:
    """The plan, on the profile's machine, with what the command line changes."""
    from dataclasses import replace

    from trilane.study.validation.plan import ValidationPlan

    asked = ValidationPlan.from_yaml(plan, {**changes_of(changes), "hardware": profile})
    return asked if repeats is None else replace(asked, repeats=repeats)


def _runs(found: Validated) -> dict[str, object]:
    """How many were measured of how many, and why not all."""
    ended = found.ended
    return {"measured": ended.runs, "asked": ended.planned, "stopped": ended.why}


def _end(found: Validated, stop: Stop) -> None:
    """The exit status, or the error, of a validation that was stopped early."""
    if found.ended.error is not None:
        raise found.ended.error
    if found.ended.why is not None:
        raise typer.Exit(STOPPED if stop.signal is None else 128 + stop.signal)


def _run(asked: ValidationPlan, profile: str, journal: Path | None, stop: Stop) -> Validated:
    """Everything, on the lanes that the profile was measured on. Raises RefusedError for a machine without one."""
    from realrun.errors import RefusedError
    from realrun.replay.measure import machine_on
    from sim.machine.hardware import load_hardware
    from trilane.study.validation.validate import validate as run_all

    hardware = load_hardware(profile)
    if not hardware.measured:
        raise RefusedError(f"{profile}: expected a profile, measured on this machine; make one: trilane profile")
    machine = machine_on(hardware)
    try:
        with working("validating") as told:
            return run_all(asked, machine, told, folder=journal, stop=stop)
    finally:
        machine.close()


def _show(found: Validated, asked: ValidationPlan, json: str | None) -> None:
    from trilane.pages.validation import MEANINGS, failure_lines, summary_lines, table_of

    agreement = found.agreement
    headers, lines = table_of(agreement)
    show(json, heading(f"{len(asked.scenarios)} scenarios, {asked.repeats} runs each, on {found.hardware.name}"),
         table(headers, lines, text_columns=1), legend(MEANINGS), "", *summary_lines(agreement), *found.notes, "",
         *failure_lines(agreement))  # fmt: skip


def command_of(
    plan: str, profile: str, changes: Sequence[str] | None, repeats: int | None = None, out: str | None = None,
    json: str | None = None, host_memory_gb: float | None = None, time_limit: float | None = None,
) -> str:  # fmt: skip
    """The command line with every option that was given, for a shell."""
    words = ["trilane", "validate", plan, "--profile", profile]
    words += [word for change in changes or () for word in ("--set", change)]
    limit = None if time_limit is None else f"{time_limit:g}"
    given = {
        "--repeats": repeats, "--host-memory-gb": host_memory_gb, "--time-limit": limit, "--out": out, "--json": json,
    }  # fmt: skip
    return shlex.join([*words, *(str(word) for pair in given.items() if pair[1] is not None for word in pair)])


def _report(found: Validated, folder: Path, when: str, command: str) -> None:
    """The page with its pictures, and the profile that predictions were made from."""
    from sim.machine.profile_yaml import write_profile
    from trilane.figures import plot_agreement, plot_measured_timeline, save_figure
    from trilane.pages.validation import write_report

    agreement, hardware = found.agreement, found.hardware
    report, dots, timeline, repeated = FILES
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(hardware, folder / repeated)
    worst = furthest_off(agreement)
    title, error = agreement.title(worst), agreement.comparisons[worst].tpot_ms.error
    facts = hardware.measured_profile().machine.items()
    save_figure(plot_agreement(agreement, hardware.name), folder / dots)
    save_figure(plot_measured_timeline(agreement.comparisons[worst], about=title), folder / timeline)
    write_report(
        agreement, folder / report, when=when, command=command,
        machine={_OF_THE_PROFILE.get(name, name): str(fact) for name, fact in facts if fact not in found.remarks},
        pictures={
            dots: "Time per output token, predicted against measured; the band is 10 % wide to either side.",
            timeline: f"The scenario whose time per output token is predicted worst, {error:+.1%}: {title}. One decode "
                      "step of it, measured above and predicted below, lane by lane.",
        },
        notes=found.notes,
    )  # fmt: skip
    note(f"report, pictures and the profile that predictions were made from are in {folder}/")


def furthest_off(agreement: Agreement) -> int:
    """The place of the scenario with the largest error of TPOT."""
    errors = [abs(comparison.tpot_ms.error or 0.0) for comparison in agreement.comparisons]
    return errors.index(max(errors))
