"""``trilane papers``: figures that papers print, next to what is simulated in their own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilane.output.pages.output import JsonOption, check_targets, note, report, watching
from trilane.verbs.options import JobsOption, OptionError, processes


def papers(
    row: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Explain one figure: its setting, what was played, and why it misses."),
    ] = None,
    paper: Annotated[str | None, typer.Option(metavar="NAME", help="The figures of one paper, a line each.")] = None,
    headlines: Annotated[bool, typer.Option("--headlines", help="The claims that the papers begin with.")] = False,
    play: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv", help="Play what this file does not hold, and add it there; without it, the "
                                              "plays that come with the program are shown."),
    ] = None,
    jobs: JobsOption = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help="Draw simulated against published values (.png, .svg or .pdf)."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Compare simulated with published figures of five papers on offloading.

    Each figure is asked in its paper's own setting: machine, program, model, weights, batch, lengths and cache. A play
    is shared by all figures that need it. Figures that set a number of the simulator are shown, and not counted.
    """
    from trilane.output.pages.papers import board_page, figure_page, figures_page
    from trilane.study.papers.scores import PLAYED, add_plays, chosen_figures, facts_of, needed, read_plays, scoreboard

    if row is not None and plot is not None:
        raise OptionError("expected --row or --plot, got both; --plot draws all figures")
    check_targets(json, play, picture=plot)
    figures = chosen_figures(paper, row, headlines)
    file = PLAYED if play is None else Path(play)
    if play is not None:
        with watching("playing") as watch:
            count = add_plays(file, needed(figures), processes(jobs), watch)
        note(f"{file}: {count} plays were added")
    plays = read_plays(file)
    board = scoreboard(figures, plays)
    if row is not None:
        report(json, facts_of(board.scores[0]), *figure_page(board.scores[0], plays))
        return
    lines = figures_page(board) if paper is not None or headlines else []
    report(json, board.to_dict(), *lines, *board_page(board))
    if plot is not None:
        from trilane.output.figures import plot_papers, save_figure

        save_figure(plot_papers(board), plot)
