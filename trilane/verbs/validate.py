"""``trilane validate``: measured beside predicted, scenario by scenario."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilane.output import (
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
from trilane.question import SetOption, changes_of

if TYPE_CHECKING:
    from sim.agreement import Agreement
    from sim.hardware import Hardware


def validate(
    plan: Annotated[str, typer.Argument(metavar="PLAN.yaml", help="What to run; see examples/validation.yaml.")],
    profile: Annotated[
        str,
        typer.Option(
            metavar="F.yaml", help="Profile of this machine, by [bold]trilane profile[/]; it names the lanes too."
        ),
    ],
    changes: SetOption = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measured runs of each scenario. Default: the plan's.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write report.md, scatter.png and timeline.png there.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure scenarios on this machine, predict them from its profile alone, and say how well that went."""
    from dataclasses import replace

    from realrun.errors import RefusedError
    from realrun.measure import machine_on
    from realrun.validation import validate as run_all
    from realrun.validation_plan import ValidationPlan
    from sim.agreement_report import MEANINGS, failure_lines, summary_lines, table_of
    from sim.hardware import load_hardware

    check_folder(out)
    check_targets(json, inputs=(plan, profile))
    asked = ValidationPlan.from_yaml(plan, {**changes_of(changes), "hardware": profile})
    hardware = load_hardware(profile)
    if hardware.profile is None:
        raise RefusedError(f"{profile}: expected a profile, measured on this machine; make one: trilane profile")
    asked = asked if repeats is None else replace(asked, repeats=repeats)
    machine = machine_on(hardware, "auto")
    try:
        with working("validating") as told:
            agreement = run_all(asked, machine, told)
    finally:
        machine.close()
    headers, lines = table_of(agreement)
    show(json, heading(f"{len(asked.scenarios)} scenarios, {asked.repeats} runs each, on {hardware.name}"),
         table(headers, lines, text_columns=1), legend(MEANINGS), "", *summary_lines(agreement), "",
         *failure_lines(agreement))  # fmt: skip
    write_json(agreement.to_dict(), json)
    if out:
        _report(agreement, hardware, Path(out), f"trilane validate {plan} --profile {profile} --out {out}")


def _report(agreement: Agreement, hardware: Hardware, folder: Path, command: str) -> None:
    """The page with its pictures."""
    from datetime import date

    from sim.agreement_pictures import scatter
    from sim.agreement_report import write_report
    from sim.agreement_timeline import overlay
    from sim.pictures import save_figure

    assert hardware.profile is not None
    folder.mkdir(parents=True, exist_ok=True)
    shown = agreement.pairings[len(agreement.pairings) // 2]
    save_figure(scatter(agreement, hardware.name), folder / "scatter.png")
    save_figure(overlay(shown, about=agreement.title(len(agreement.pairings) // 2)), folder / "timeline.png")
    write_report(
        agreement, folder / "report.md", machine={k: str(v) for k, v in hardware.profile.machine.items()},
        when=date.today().isoformat(), command=command,
        pictures={
            "scatter.png": "Time per output token, predicted against measured; the band is 10 % wide to either side.",
            "timeline.png": "One decode step, measured above and predicted below, lane by lane.",
        },
    )  # fmt: skip
    note(f"report and pictures are in {folder}/")
