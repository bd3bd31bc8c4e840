"""``trilane sweep``, ``plot`` and ``whatif``: grids of scenarios of a file, their pictures, one or two axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trilane.common.quoting import quoted
from trilane.output.pages.output import JsonOption, check_folder, check_targets, note, reason_of, report, watching
from trilane.verbs import completion
from trilane.verbs.inputs import choices_in, inputs_of, names_in, note_kind, note_model, policies_in, scenario_for
from trilane.verbs.options import MOST_DRAWS, OWN_POLICY, JobsOption, OptionError, ScenarioOption, SetOption, processes

if TYPE_CHECKING:
    import pandas as pd

    from sim.runs.scenario import Scenario
    from trilane.study.player import Progress


DASK_HELP = (
    "Simulate on this Dask cluster, such as tcp://10.0.0.1:8786, instead. Its workers need the same Trilane, and the "
    "same files under the same names."
)
MOST_REASONS = 10  # printed, of why points failed


def sweep(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="What to sweep (YAML), such as [bold]examples/sweep.yaml[/].")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUTPUT", help="The table, one row per run: a .parquet file.")
    ],
    policies: Annotated[
        str | None,
        typer.Option(metavar="FILE.py", help="Policies of your own that FILE names: FILE.py or FILE.py:NAME, several "
                                             "with commas between them."),
    ] = None,
    jobs: JobsOption = None,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help=DASK_HELP)] = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Simulate points again that ended with an error before.")
    ] = False,
) -> None:
    """Simulate a grid of scenarios, and keep a row of every run.

    Each row is kept in OUTPUT.journal, next to the table, as soon as its run ends. After an interruption of any kind
    the same command continues where it stopped.

    A table that exists already is extended: its points are not simulated again as long as their scenario, its files
    and Trilane itself are the same. A table with results that are not in the grid is refused, never overwritten.

    A point that cannot be simulated is a row with its error. [bold]trilane plot[/] draws the table.
    """
    from trilane.output.figures.words import sampled_in
    from trilane.study.sweep.grid import Grid
    from trilane.study.sweep.sweep import sweep as play

    check_targets(output, inputs=[file])
    if policies is not None:
        _load(policies, file)
    grid = Grid.from_yaml(file)
    done: list[Progress] = []
    try:
        with watching("sweeping") as watch:

            def noted(now: Progress) -> None:
                done[:] = [now]
                watch(now)

            table = play(grid, output, jobs=processes(jobs), dask=dask, watch=noted, retry_errors=retry_errors)
    except KeyboardInterrupt:
        note(_interrupted(output, done))
        raise
    failed = [error for error in table["error"] if error]
    errors_told = f", {len(failed):,} of them with an error:" if failed else ""
    note(f"{len(table):,} point{'s' * (len(table) != 1)} in {output}{errors_told}")
    for line in (*_reasons(failed), sampled_in(table)):
        if line:
            note(line)
    if len(failed) == len(table):
        raise typer.Exit(1)


def _load(policies: str, file: str) -> None:
    """Load the files in ``--policies``. Raises OptionError for a name, since those of a sweep are in its file."""
    from policies.user_files import names_file

    if names := [name for name in names_in(policies) if not names_file(name)]:
        raise OptionError(
            f"--policies: expected FILE.py or FILE.py:NAME, got {quoted(names[0])}; the names of the policies are "
            f"in {file}"
        )
    policies_in(policies)


def _interrupted(output: str, done: Sequence[Progress]) -> str:
    """A note on the rows that are kept, and how to continue."""
    if not done:
        return "interrupted before the first point ended; the same command starts again"
    [now] = done
    return (
        f"interrupted: {now.done:,} of {now.total:,} points are kept in {output}.journal; "
        f"the same command continues from there"
    )


def _reasons(failed: Sequence[str]) -> Iterator[str]:
    """Why points failed, and how many, most frequent first; reasons that differ only in numbers count as one."""
    kinds = list(map(reason_of, failed))
    first, counts = dict(zip(reversed(kinds), reversed(failed), strict=True)), Counter(kinds)
    for kind, count in counts.most_common(MOST_REASONS):
        yield f"{count:>7,} x {first[kind]}"
    if len(counts) > MOST_REASONS:
        yield f"        and {len(counts) - MOST_REASONS:,} other reasons: column `error` of the table"


# --- plot -------------------------------------------------------------------------------------------------------------

_BASELINE = "Of speedup. Default: llama.cpp; else on-demand, layer-wise, or the first policy of the table."


def plot(
    results: Annotated[str, typer.Argument(metavar="RESULTS", help="The table of [bold]trilane sweep[/] (.parquet).")],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder to write to. Default: RESULTS without its suffix."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="tpot: TPOT along an axis; speedup: bars over a baseline; heat: the fastest policy over two axes; "
            "hits: hit rate against capacity. Default: all that the table has data for.",
        ),
    ] = None,
    x: Annotated[str | None, typer.Option("--x", metavar="AXIS", help="Horizontal axis of tpot and heat.")] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="AXIS", help="Vertical axis of heat.")] = None,
    baseline: Annotated[str | None, typer.Option(metavar="POLICY", help=_BASELINE)] = None,
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help="Draw these and the clairvoyant run. Default: all.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Draw only runs with this value, such as batch=4; repeatable: the same key again adds a value. "
            "null: runs without a value.",
        ),
    ] = None,
    file_format: Annotated[
        Literal["png", "svg", "pdf"], typer.Option("--format", help="Of the pictures.")
    ] = "png",
    no_title: Annotated[
        bool, typer.Option("--no-title", help="Leave out the headline and what was run, for a paper's own caption.")
    ] = False,
) -> None:
    """Draw the results of a sweep.

    Each picture comes with a CSV of its data. Every picture of times shows the lower bound and the clairvoyant run, and
    with them how much could still be gained.
    """
    from trilane.output.figures.figure_files import save_picture, without_title
    from trilane.output.figures.sweep_means import means_of
    from trilane.output.figures.sweep_pictures import KINDS, FigureOptions, pictures_of
    from trilane.study.sweep.table import read_results

    kinds = KINDS if kind is None else names_in(kind, "--kind")
    folder = Path(out) if out else Path(results).with_suffix("")
    check_folder(str(folder))
    named = None if policies is None else names_in(policies)
    if named and baseline and baseline not in named:
        named.append(baseline)
    axes = [name for name in (x, y) if name and name != "policy"]
    means = means_of(read_results(results), _pairs(where or ()), named, axes)
    pictures, reasons = pictures_of(means, kinds, FigureOptions(x, y, baseline))
    if not pictures or (kind and reasons):
        raise OptionError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        headline = picture.figure.get_suptitle()
        if no_title:
            without_title(picture.figure)
        save_picture(picture, folder / f"{name}.{file_format}")
        note(f"{folder / name}.{file_format} and .csv: {headline}")
    for name, reason in reasons.items():
        note(f"no picture {name}: {reason}")


def _pairs(where: Sequence[str]) -> dict[str, list[str]]:
    """Every key of ``--where KEY=VALUE`` with all its values. Raises OptionError."""
    pairs: dict[str, list[str]] = {}
    for text in where:
        key, _, value = text.partition("=")
        if not key or not value:
            raise OptionError(f"--where: expected KEY=VALUE, got {quoted(text)}")
        pairs.setdefault(key, []).append(value)
    return pairs


# --- whatif -----------------------------------------------------------------------------------------------------------

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
        typer.Option(metavar="A,B", autocompletion=completion.policies,
                     help=f"Policies. {OWN_POLICY}. Parameters may follow: 'dali{{window: 8}},dali'. Default: one of "
                          f"each kind: {', '.join(POLICIES)}."),
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
    """Show what changes if the link is faster, the cache larger, the batch bigger, or the machine another.

    Simulates every value of one or two axes under policies of each kind. What cannot run is left out, with the reason.

    Values are a list (8,16,null) or a range. 8..64 is eight points at even ratios, 8..64/5 is five.
    Ranges of counts double (batch=1..16 is 1,2,4,8,16); ranges of shares have even steps.

    Dials scale numbers that belong together, in GB/s (10^9 bytes per second) or as named: pcie_gbps (large pinned
    copies), pcie (such as 3x16, 5x8), dram_gbps (what CPU experts read), gpu_gbps, gpu_tflops, cpu_gflops.
    """
    from policies.user_files import loaded_policies
    from trilane.output.figures.sweep_means import means_of
    from trilane.output.figures.words import sampled_in
    from trilane.output.pages.whatif import failures, findings, page

    policy_names = list(POLICIES) if policies is None else choices_in(policies)
    chosen = scenario_for(scenario, changes, policy_names)
    check_targets(json, picture=png, data=True, inputs=inputs_of(scenario, chosen))
    axes = axes_in(vary)
    _check_parameters(axes, policy_names)
    results = _simulated(chosen, axes, policy_names, draws, processes(jobs))
    own = [name for name in results["policy"].unique() if name.partition("{")[0] in loaded_policies()]
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
    report(json, record, *page(means, names, own), *remarks, "", *says)
    note_kind(chosen)
    note_model(chosen)
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


def _check_parameters(axes: Iterable[str], names: Sequence[str]) -> None:
    """Raises OptionError for parameters both on an axis and in braces, of which one would have no effect."""
    both = [axis for axis in axes if axis.partition(".")[0] == "parameters"]
    if both and (braced := [name for name in names if "{" in name]):
        raise OptionError(
            f"--vary {both[0]}: expected --policies without parameters, got {quoted(braced[0])}; put all values into "
            f"--vary, or several policies with parameters into --policies"
        )


def _simulated(
    scenario: Scenario, axes: Mapping[str, tuple[Any, ...]], names: Sequence[str], draws: int, jobs: int
) -> pd.DataFrame:
    """The table of the sweep, in which each policy is named as it was written, with its parameters."""
    from math import prod

    from trilane.study.policy_choice import policy_in, policy_label
    from trilane.study.sweep.grid import Grid, points
    from trilane.study.sweep.sweep import sweep

    asked = prod(map(len, axes.values())) * len(names) * draws
    if asked > MOST:
        raise OptionError(
            f"--vary: expected {MOST:,} simulations at most, got {asked:,}; give fewer values (LOW..HIGH/5 is five of "
            f"them), or use trilane sweep, which keeps each as it finishes"
        )
    grid = Grid(scenario, ({**axes, "policy": tuple(names)},), draws=draws)
    if (count := len(played := points(grid))) > MANY:
        note(f"{count:,} simulations")
    with watching("simulating") as watch:
        table = sweep(grid, jobs=jobs, watch=watch)
    return table.assign(policy=[policy_label(*policy_in(point.axes["policy"])) for point in played])
