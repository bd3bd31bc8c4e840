"""``trilane accuracy``: predicted speeds against those that people measured."""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.output.pages.output import JsonOption, check_targets, note, report
from trilane.verbs.options import OptionError


def accuracy(
    row: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Explain one row: its setting, where the predicted time goes, and with which "
                                        "rate the measured speed would be right."),
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="FILE.csv", help="Score rows of your own, instead of the bundled ones.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv", help="Write a file for rows of your own, with all columns and an example."),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help="Draw predicted against measured speeds (.png, .svg or .pdf)."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Report how accurate predicted speeds are, on speeds that other people measured.

    The bundled rows are speeds of llama.cpp, ik_llama.cpp and KTransformers from public sources. Each is
    predicted from the machine, split, threads and lengths that its source states.
    """
    from trilane.engines.accuracy.measured_rows import write_template
    from trilane.engines.accuracy.scores import bundled_scores, explain, row_of, scores_of
    from trilane.output.pages.accuracy import accuracy_page, row_page

    if row is not None and plot is not None:
        raise OptionError("expected --row or --plot, got both; --plot draws all rows")
    check_targets(json, template, picture=plot, inputs=(check,))
    if template is not None:
        write_template(template)
        note(f"{template}: fill in a line for each measurement, then: trilane accuracy --check {template}")
        return
    scores = scores_of(check) if check else bundled_scores()
    if row is not None:
        explained = row_of(scores.rows, row)
        report(json, scores.facts(explained), *row_page(explained, scores, explain(explained)))
        return
    report(json, scores.to_dict(), *accuracy_page(scores, check))
    if plot is not None:
        from trilane.output.figures import plot_accuracy, save_figure

        save_figure(plot_accuracy(scores), plot)
