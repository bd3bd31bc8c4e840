"""``trilane whatif``: one or two quantities of a scenario varied on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.common.quoting import quoted
from trilane.output.pages.output import JsonOption, check_targets, note, report, watching
from trilane.verbs.inputs import inputs_of, policies_in, scenario_of
from trilane.verbs.options import MOST_DRAWS, OWN_POLICY, JobsOption, OptionError, ScenarioOption, SetOption, processes

if TYPE_CHECKING:
    import pandas as pd

    from sim.runs.scenario import Scenario

POLICIES = ("llama.cpp", "mixtral-offloading", "fiddler", "hybrimoe", "dali", "smoe", "daop", "best-exact")
MOST_AXES = 2
MANY = 200  # simulations, above which their number is printed before they start
MOST = 20_000  # simulations: hours of them, of which none are kept if the command is interrupted


def whatif(
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary", "-v",
            metavar="AXIS=VALUES",
            help="What to vary, once or twice: any key of a scenario, such as [bold]batch=1..16[/], "
            "[bold]cached_share=0.1..0.7[/], [bold]gpu_memory_gb=8,12,null[/] (10^9 bytes) or "
            "[bold]hardware=A,B[/]; a dial; a number of the machine by its dotted key (`trilane hardware NAME` lists "
            "all); parameters.NAME.",
        ),
    ],
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Policies. {OWN_POLICY}. Default: one of each kind: {', '.join(POLICIES)}."),
    ] = None,
    changes: SetOption = None,
    scenario: ScenarioOption = None,
    draws: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=MOST_DRAWS,
                     help="How often each point is simulated, with other sequences of the trace; means are shown."),
    ] = 1,
    jobs: JobsOption = None,
    png: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the result; a CSV with the same data goes next to it.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """What if the link were faster, the cache larger, the batch bigger, or the machine different?

    Simulates every value of one or two axes under policies of each kind. What cannot run is left out, with the reason.

    Values are a list (8,16,null) or a range. 8..64 is eight points at even ratios, 8..64/5 is five.
    Ranges of counts double (batch=1..16 is 1,2,4,8,16); ranges of shares have even steps.

    Dials scale numbers that belong together, in GB/s (10^9 bytes per second) or as named: pcie_gbps (large pinned
    copies), pcie (such as 3x16, 5x8), dram_gbps (what CPU experts read), gpu_gbps, gpu_tflops, cpu_gflops.
    """
    from trilane.output.figures.sweep_means import means_of
    from trilane.output.figures.words import sampled_in
    from trilane.output.pages.whatif import failures, findings, page

    chosen = scenario_of(scenario, changes)
    policy_names = list(POLICIES) if policies is None else policies_in(policies)
    check_targets(json, picture=png, data=True, inputs=inputs_of(scenario, chosen))
    axes = axes_in(vary)
    results = _simulated(chosen, axes, policy_names, draws, processes(jobs))
    if (results["error"] != "").all():
        raise OptionError(f"no value can run: {results['error'].iloc[0].partition(': ')[2]}")
    means = means_of(results, asked=list(axes))
    names, says, rows = list(axes), findings(means, list(axes)), means.frame().astype(object)
    for line in (reasons := failures(results, names)):
        note(line)
    remarks = [f"\n{remark}"] if (remark := sampled_in(results)) else []
    record = {
        "scenario": chosen.to_dict(), "axes": {name: list(values) for name, values in axes.items()},
        "rows": rows.where(rows.notna(), None).to_dict("records"), "left_out": reasons, "says": says,
    }
    report(json, record, *page(means, names), *remarks, "", *says)
    if draws == 1:
        note("one draw: a difference of a few percent may be chance; --draws 5 shows the spread")
    if png:
        from trilane.output.figures import plot_heat_map, plot_tpot_lines, save_picture

        picture = plot_tpot_lines(means, *names) if len(names) == 1 else plot_heat_map(means, *names)
        note(f"picture: {png}, and what it draws: {save_picture(picture, png)}")


def axes_in(vary: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Axes and values of ``--vary AXIS=VALUES``. Raises OptionError, and SweepError for an unknown axis or value."""
    from trilane.study.sweep.axes import values_in

    axes: dict[str, tuple[Any, ...]] = {}
    for text in vary:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not equals or not name or not values.strip():
            raise OptionError(
                f"--vary: expected AXIS=VALUES such as batch=1,4,16 or pcie_gbps=8..64, got {quoted(text)}"
            )
        if name == "policy":
            raise OptionError("--vary policy: use --policies A,B instead")
        if name in axes:
            raise OptionError(f"--vary {name}: expected every axis once, with all its values")
        axes[name] = values_in(name, values)
    if len(axes) > MOST_AXES:
        raise OptionError(f"--vary: expected one axis or two, got {', '.join(axes)}; trilane sweep takes any number")
    return axes


def _simulated(
    scenario: Scenario, axes: Mapping[str, tuple[Any, ...]], names: Sequence[str], draws: int, jobs: int
) -> pd.DataFrame:
    from math import prod

    from trilane.study.sweep.grid import Grid, points
    from trilane.study.sweep.sweep import sweep

    asked = prod(map(len, axes.values())) * len(names) * draws
    if asked > MOST:
        raise OptionError(
            f"--vary: expected {MOST:,} simulations at most, got {asked:,}; give fewer values (LOW..HIGH/5 is five of "
            f"them), or use trilane sweep, which keeps each as it finishes"
        )
    grid = Grid(scenario, ({**axes, "policy": tuple(names)},), draws=draws)
    if (count := len(points(grid))) > MANY:
        note(f"{count:,} simulations")
    with watching("simulating") as watch:
        return sweep(grid, jobs=jobs, watch=watch)
