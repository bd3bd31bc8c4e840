"""``trilane trace stats``: statistics of one trace, or of several side by side, with published figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from trilane.output.pages.output import JsonOption, check_targets, progress, report, working
from trilane.verbs.inputs import read_any, trace_in_words


def stats(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Trace files, bundled names, or logs to import.")
    ],
    published: Annotated[
        bool, typer.Option("--published", help="Add the figures that papers and other projects publish.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the comparison as Markdown.")] = False,
    json: JsonOption = None,
) -> None:
    """How skewed, how repetitive and how predictable the routing is.

    Several traces are shown side by side, in one table.
    """
    check_targets(json, inputs=traces)
    if len(traces) > 1 or published or markdown:
        _compare(traces, published, markdown, json)
        return
    with working("counting"):
        from traces.statistics import trace_statistics
        from trilane.output.pages.trace_stats import description

        trace = read_any(traces[0])
        values = trace_statistics(trace)
    report(json, values, *description(trace_in_words(traces[0], trace), values))


def _compare(names: Sequence[str], published: bool, markdown: bool, json: str | None) -> None:
    from traces.models.catalogue import published_figures
    from trilane.common.schema import to_dict
    from trilane.output.pages.trace_stats import comparable_statistics, comparison

    found = {name: comparable_statistics(read_any(name)) for name in progress(names, "counting")}
    figures = published_figures() if published else ()
    record = {"traces": found, **({"published": [to_dict(figure) for figure in figures]} if published else {})}
    report(json, record, *comparison(found, figures, markdown=markdown))
