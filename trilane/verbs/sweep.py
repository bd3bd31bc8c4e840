"""``trilane sweep``: a grid of scenarios from one file, simulated into one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trilane.common.quoting import quoted
from trilane.output.pages.output import check_targets, note, reason_of, watching
from trilane.verbs.inputs import names_in, policies_in
from trilane.verbs.options import JobsOption, OptionError, processes

if TYPE_CHECKING:
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
