"""``trilane whatif``: one or two things of a scenario varied on the command line; a table, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.pages.output import JsonOption, check_picture, check_targets, note, show, working, write_json
from trilane.verbs.draw_options import JobsOption, processes
from trilane.verbs.scenario_options import ScenarioOption, SetOption, inputs_of, names_in, scenario_of

if TYPE_CHECKING:
    import pandas as pd

    from sim.runs.scenario import Scenario

POLICIES = ("llama.cpp", "mixtral-offloading", "fiddler", "hybrimoe", "dali", "smoe", "daop", "best-exact")
MOST_AXES = 2
MANY = 200  # runs: from there on it is said how many there are to play


class WhatIfError(ValueError):
    """A question that cannot be read or answered; the message says why."""


def whatif(
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary", "-v",
            metavar="AXIS=VALUES",
            help="What is varied, once or twice: any key of a scenario, as [bold]batch=1..16[/], "
            "[bold]cached_share=0.1..0.7[/], [bold]gpu_memory_gb=8,12,null[/] or [bold]hardware=A,B[/]; a dial; "
            "a number of the machine by its dotted key (`trilane hardware NAME` lists all); parameters.NAME.",
        ),
    ],
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help=f"Policies. Default: one of each kind: {', '.join(POLICIES)}.")
    ] = None,
    changes: SetOption = None,
    scenario: ScenarioOption = None,
    draws: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="How often each policy plays, with other sequences of the trace; means."),
    ] = 1,
    jobs: JobsOption = None,
    png: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the answer; a CSV of what is drawn goes beside it.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """What if the link were faster, the cache larger, the batch bigger, the machine another?

    Plays every value of one or two axes under policies of each kind. What cannot run is left out, with the reason.

    Values are a list (8,16,null) or a range. 8..64 is eight points at even ratios, 8..64/5 is five.

    Ranges of what is counted double (batch=1..16 is 1,2,4,8,16), those of shares go in even steps.

    Dials scale what belongs together: pcie_gbps (GB/s of large pinned copies), pcie (as 3x16, 5x8),

    dram_gbps (what CPU experts read), gpu_gbps, gpu_tflops, cpu_gflops.
    """
    from trilane.figures.sweep_means import means_of
    from trilane.pages.whatif import failures, findings, page

    check_picture(png)
    asked = scenario_of(scenario, changes)
    check_targets(json, png, _beside(png), inputs=inputs_of(scenario, asked))
    axes = axes_in(vary)
    names = list(POLICIES) if policies is None else names_in(policies)
    results = _played(asked, axes, names, draws, processes(jobs))
    if (results["error"] != "").all():
        raise WhatIfError(f"no value can run: {results['error'].iloc[0].partition(': ')[2]}")
    means = means_of(results, asked=list(axes))
    says = findings(means, list(axes))
    for line in (reasons := failures(results, list(axes))):
        note(line)
    show(json, *page(means, list(axes)), "", *says)
    if draws == 1:
        note("one draw: a difference of a few percent may be chance, --draws 5 tells")
    rows = means.frame().astype(object)
    write_json({
        "scenario": asked.to_dict(), "axes": {name: list(values) for name, values in axes.items()},
        "rows": rows.where(rows.notna(), None).to_dict("records"), "left_out": reasons, "says": says,
    }, json)  # fmt: skip
    if png:
        _draw(means, list(axes), png)


def axes_in(vary: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Axes and values of ``--vary AXIS=VALUES``. Raises WhatIfError, and SweepError for an unknown axis or value."""
    from trilane.study.sweep.values import values_in

    axes: dict[str, tuple[Any, ...]] = {}
    for text in vary:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not equals or not name or not values.strip():
            raise WhatIfError(f"--vary: expected AXIS=VALUES such as batch=1,4,16 or pcie_gbps=8..64, got {text!r}")
        if name == "policy":
            raise WhatIfError("--vary policy: name policies with --policies A,B")
        if name in axes:
            raise WhatIfError(f"--vary {name}: expected every axis once, with all its values")
        axes[name] = values_in(name, values)
    if len(axes) > MOST_AXES:
        raise WhatIfError(f"--vary: expected one axis or two, got {', '.join(axes)}; trilane sweep takes any number")
    return axes


def _played(
    scenario: Scenario, axes: Mapping[str, tuple[Any, ...]], names: Sequence[str], draws: int, jobs: int
) -> pd.DataFrame:
    from trilane.study.sweep.grid import Grid, points
    from trilane.study.sweep.sweep import sweep

    grid = Grid(scenario, ({**axes, "policy": tuple(names)},), draws=draws)
    if (count := len(points(grid))) > MANY:
        note(f"{count:,} runs to play")
    with working("simulating") as say:
        return sweep(grid, jobs=jobs, watch=lambda now: say(f"simulating, {now.done} of {now.total}"))


def _beside(png: str | None) -> str | None:
    from pathlib import Path

    return None if png is None else str(Path(png).with_suffix(".csv"))


def _draw(means: Any, axes: Sequence[str], png: str) -> None:
    from trilane.figures import plot_heat_map, plot_tpot_lines, save_picture

    picture = plot_tpot_lines(means, axes[0]) if len(axes) == 1 else plot_heat_map(means, axes[0], axes[1])
    note(f"picture: {png}, and what it draws: {save_picture(picture, png)}")
