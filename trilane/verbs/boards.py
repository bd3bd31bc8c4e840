"""``trilane accuracy``, ``papers`` and ``leaderboard``: measured speeds, published figures, policies on one scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilane.output.pages.output import JsonOption, check_targets, named_as, note, progress, report, watching
from trilane.verbs.inputs import policies_in, policy_files
from trilane.verbs.options import OWN_POLICY, JobsOption, OptionError, processes

if TYPE_CHECKING:
    from trilane.study.leaderboard.standings import Entry


def accuracy(
    row: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Explain one row: its setting, where the predicted time goes, with which "
                                        "rate the measured speed would be right, and what makes a machine slower than "
                                        "its parts."),
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="FILE.csv", help="Score rows of your own, instead of the bundled ones.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv", callback=named_as(".csv"),
                     help="Write a file for rows of your own, with all columns and an example."),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Score the log of a program with a cache of experts, as its columns or lines "
                                          "tell: requests of Strata (CSV, or .log of its engine; [bold]bundled[/]: "
                                          "those that come with the program), caches of others (CSV, .jsonl, .txt; "
                                          "[bold]caches[/]: bundled), timed copies and kernels ([bold]kernels[/]). "
                                          "With --template, write it as a CSV file to fill in."),
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
    if requests is not None:
        if row is not None or check is not None:
            raise OptionError("expected --requests without --row and --check")
        _requests(requests, template, plot, json)
        return
    from trilane.engines.accuracy.measured_rows import write_template
    from trilane.engines.accuracy.scores import bundled_scores, explain, row_of, scores_of
    from trilane.engines.accuracy.slow_machines import slow_causes_of_row
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
        causes = slow_causes_of_row(explained)
        facts = scores.facts(explained) | {"slow_causes": [cause._asdict() for cause in causes]}
        report(json, facts, *row_page(explained, scores, explain(explained), causes))
        return
    report(json, scores.to_dict(), *accuracy_page(scores, check))
    if plot is not None:
        from trilane.output.figures import plot_accuracy, save_figure

        save_figure(plot_accuracy(scores), plot)


def _requests(path: str, rows: str | None, plot: str | None, json: str | None) -> None:
    from trilane.study.cache_logs.importers import is_cache_log
    from trilane.study.cache_logs.kernel_rows import KERNELS
    from trilane.study.cache_logs.rows import BUNDLED

    named = {"caches": BUNDLED, "kernels": KERNELS}
    own = path not in ("bundled", *named)
    check_targets(json, rows, picture=plot, inputs=(path,) if own else ())
    if path in named or (own and is_cache_log(path)):
        if plot is not None:
            raise OptionError("expected --plot with requests of Strata, got another log, which has no picture")
        _cache_log(path, named.get(path, Path(path)), rows, json)
    else:
        _strata_requests(path, rows, plot, json)


def _cache_log(name: str, path: Path, rows: str | None, json: str | None) -> None:
    from trilane.output.pages.cache_logs import cache_logs_page, record_of
    from trilane.output.pages.kernel_rows import kernels_page, kernels_record
    from trilane.study.cache_logs.comparison import compared
    from trilane.study.cache_logs.importers import are_kernels, read_cache_log
    from trilane.study.cache_logs.kernel_rows import read_kernels
    from trilane.study.cache_logs.rows import LogError, write_rows

    if are_kernels(path):
        if rows is not None:
            raise OptionError("expected --template with requests or caches, got a table of timed kernels")
        kernels = read_kernels(path)
        report(json, kernels_record(kernels), *kernels_page(kernels, name))
        return
    settings = read_cache_log(path)
    if rows is not None:
        write_rows(settings, rows)
        note(f"{rows}: {len(settings)} rows; fill in machine and engine, then: trilane accuracy --requests {rows}")
        return
    found = compared(progress(settings, "playing"))
    if not found.asked:
        raise LogError(f"{path}: no row can be asked: {'; '.join(sorted({*found.left_out.values()})) or 'it has none'}")
    report(json, record_of(found), *cache_logs_page(found, name))


def _strata_requests(path: str, rows: str | None, plot: str | None, json: str | None) -> None:
    from trilane.engines.strata.engine_log import is_log, read_log, write_requests
    from trilane.engines.strata.predictions import predictions
    from trilane.engines.strata.requests import BUNDLED, read_requests
    from trilane.engines.strata.sweeps import sweeps
    from trilane.output.pages.strata import record_of, strata_page, sweeps_part

    own = path != "bundled"
    requests = read_log(path) if is_log(path) else read_requests(path if own else BUNDLED)
    if rows is not None:
        write_requests(requests, rows)
        note(f"{rows}: {len(requests)} requests; fill in gpu, cpu and ram, then: trilane accuracy --requests {rows}")
        return
    found = predictions(requests)
    settings = [] if own else sweeps()
    record = {**record_of(found), "settings": [vars(each) | {"cost": each.cost} for each in settings]}
    report(json, record, *strata_page(found, path), *(sweeps_part(settings) if settings else ()))
    if plot is not None:
        from trilane.output.figures import plot_requests, save_figure

        save_figure(plot_requests(found), plot)


# --- papers -----------------------------------------------------------------------------------------------------------

def papers(
    row: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Explain one figure: its setting, what was played, and why it misses."),
    ] = None,
    paper: Annotated[str | None, typer.Option(metavar="NAME", help="The figures of one paper, a line each.")] = None,
    headlines: Annotated[bool, typer.Option("--headlines", help="The claims that the papers begin with.")] = False,
    play: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv", callback=named_as(".csv"),
                     help="Play what this file does not hold, and add it there; without it, the plays that come with "
                          "the program are shown."),
    ] = None,
    jobs: JobsOption = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help="Draw simulated against published values (.png, .svg or .pdf)."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Compare simulated with published figures, of five papers on offloading and of further sources.

    Each figure is asked in its source's own setting: machine, model, weights, batch, lengths and cache. It is asked in
    three ways, by what is known of the program: with the engines that were set for it, with one number of it, and with
    nothing but its kind. Figures that set a number, or follow from one that did, are shown apart. A play is shared by
    all figures that need it.
    """
    from trilane.output.pages.paper_figure import figure_page
    from trilane.output.pages.papers import board_page, figures_page
    from trilane.study.papers.blind import read_record
    from trilane.study.papers.board import scoreboard
    from trilane.study.papers.plays import PLAYED, add_plays, needed, read_plays
    from trilane.study.papers.sources import chosen_figures, sources

    if row is not None and plot is not None:
        raise OptionError("expected --row or --plot, got both; --plot draws all figures")
    check_targets(json, play, picture=plot)
    figures, record = chosen_figures(paper, row, headlines, None if headlines else sources()), read_record()
    if play is not None:
        waiting = [figure for figure in figures if figure in record.waiting()]
        with watching("playing") as watch:
            wanted = needed(figure for figure in figures if figure not in waiting)
            count = add_plays(Path(play), wanted, processes(jobs), watch)
        left = f"; {len(waiting)} figures wait for their first blind run (docs/papers.md)" if waiting else ""
        note(f"{play}: {count} plays were added{left}")
    plays = read_plays(PLAYED if play is None else Path(play))
    board = scoreboard(figures, plays)
    if row is not None:
        report(json, board.to_dict()["figures"][0], *figure_page(board, plays, record))
        return
    lines = figures_page(board, record) if paper is not None or headlines else []
    report(json, board.to_dict(), *lines, *board_page(board, record))
    if plot is not None:
        from trilane.output.figures import plot_papers, save_figure

        save_figure(plot_papers(board, record), plot)


# --- leaderboard ------------------------------------------------------------------------------------------------------

def leaderboard(
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Simulate these where they have no entry yet. {OWN_POLICY}. Default: with "
                                         "--play all, else none."),
    ] = None,
    play: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv", help="Simulate what this file lacks, and add it there; without it, the "
                                              "entries that come with the program are shown. Not needed for a "
                                              "policy of your own, whose result --policies does not keep."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Show the speeds on each machine, too.")] = False,
    jobs: JobsOption = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the standings (.png, .svg or .pdf); a CSV with the same data goes next "
                                          "to it."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Rank policies over machines of four classes, two families of routing, and batches of 1 and 8.

    In each setting all policies are simulated with the same texts, on the engine [bold]graphs[/].
    """
    from trilane.common.schema import to_dict
    from trilane.output.pages.leaderboard import leaderboard_page, machine_pages
    from trilane.study.leaderboard.standings import standings

    names = [] if policies is None else policies_in(policies)
    check_targets(json, play, picture=plot, data=True, inputs=policy_files())
    found = standings(_entries(names, play, processes(jobs)))
    record = [
        {"policy": one.policy, "kind": one.kind, "score": one.score, "lowest": one.lowest, "best_in": one.best_in,
         "entries": [to_dict(entry) for entry in one.entries.values()]}
        for one in found
    ]
    report(json, record, *leaderboard_page(found, names), *(machine_pages(found) if details else ()))
    if plot is not None:
        from trilane.output.figures import plot_leaderboard, save_picture

        note(f"picture: {plot}, and what it draws: {save_picture(plot_leaderboard(found, names), plot)}")


def _entries(names: list[str], play: str | None, jobs: int) -> list[Entry]:
    from policies.registry import policy_names
    from trilane.study.leaderboard.standings import add_entries, read_entries, with_played

    with watching("simulating") as watch:
        if play is not None:
            return add_entries(Path(play), names or policy_names(), jobs, watch)
        return with_played(read_entries(), names, jobs, watch)
