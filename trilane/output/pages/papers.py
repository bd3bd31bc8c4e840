"""The scoreboard of published figures as text: shares by source and way, and what is furthest off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from trilane.output.pages.output import Part, heading, legend, number, percent, reasons_table, signed_percent, table
from trilane.study.papers.blind import BlindRecord
from trilane.study.papers.board import DEAD_BAND, Count, Scoreboard, ScoreSummary, summary
from trilane.study.papers.paper import AskingWay
from trilane.study.papers.quantities import QUANTITIES
from trilane.study.papers.scores import FAR, NEAR, FigureScore

_MOST_FAR = 12
_WAYS = {AskingWay.STUDIED: "as studied", AskingWay.ONE_NUMBER: "one number", AskingWay.NOTHING: "nothing put in"}
_MEANINGS = {
    "as studied": "asked with the engines that were set for the program, the scores known",
    "one number": "asked with the kind of the program's engine, and one number that one figure of the source set",
    "nothing": "asked with the kind of the program's engine alone; engines that people run are their own",
    "in range": "published values between what the quickest and the slowest programs of the kind take, of times and "
                "ratios, or, for engines that people run, within the error to expect",
    "blind": "with one number, as it came out when the figure was first asked, after its question was written down",
    "put in": "figures that set a number: not counted",
    "follow": "figures that follow from one that was put in, and those of them within 30%: not counted with the others",
    "|ln|": "median of |ln(simulated / published)|; 0.14 is 15 %, 0.26 is 30 %",
    "direction": "of speed-ups and differences that were not put in, those that go the same way",
    "in order": f"of figures that were not put in, ask the same but for one thing, and differ by more than "
                f"{DEAD_BAND:.0%} and than those that the source calls the same, pairs in the printed order",
}


def board_page(board: Scoreboard, record: BlindRecord) -> list[Part]:
    """Shares by source, scores over several, the figures that are furthest off, and how many were not asked."""
    parts: list[Part] = [
        heading(f"Published figures within {NEAR:.0%} / {FAR:.0%}, of how many, by what is known of the program"),
        table(["", "as studied", "one number", "nothing", "in range", "blind"], _by_source(board, record)), "",
        heading("Over several sources"), table(_COLUMNS, _by_way(board, record)), "",
    ]
    left_out = board.left_out if len(board.names) > 1 else {}
    parts += [*_far(board), *reasons_table(f"{sum(left_out.values())} figures were not asked", "figures", left_out)]
    if missing := len(board.not_played):
        parts += [f"{missing} figures have no plays: `trilane papers --play FILE.csv` plays them.", ""]
    if changed := record.changed():
        parts += [f"{len(changed)} blind questions were changed after they were written: {', '.join(changed)}", ""]
    return [*parts, legend(_MEANINGS).lstrip("\n")]


# --- by source --------------------------------------------------------------------------------------------------------


def _by_source(board: Scoreboard, record: BlindRecord) -> Iterable[list[str]]:
    blind = record.scores(AskingWay.ONE_NUMBER)
    for title, names in board.groups.items():
        for name in names:
            yield [name, *_shares(board, [name], blind)]
        if len(names) > 1:
            yield [title, *_shares(board, names, blind)]
            yield ["  times and ratios", *_shares(board, names, blind, timed=True)]


def _shares(
    board: Scoreboard, names: Sequence[str], blind: Sequence[FigureScore], timed: bool = False
) -> Iterable[str]:
    found = board.summaries(names, timed)
    yield from (_share(found.get(way)) for way in AskingWay)
    ranges = found[AskingWay.NOTHING].in_range if AskingWay.NOTHING in found else Count(0, 0)
    yield percent(ranges.those / ranges.of) if ranges.of else "-"
    yield _share(summary([one for one in blind if one.paper.name in names and (one.timed or not timed)]))


def _share(found: ScoreSummary | None) -> str:
    if found is None or not found.figures:
        return "-"
    return f"{100 * found.near:.0f}/{100 * found.far:.0f} of {found.figures}"


# --- over several -----------------------------------------------------------------------------------------------------

_COLUMNS = ("", "figures", "put\nin", "follow", f"within\n{NEAR:.0%}", f"within\n{FAR:.0%}", "|ln|", "in\nrange",
            "direction", "pairs\nin order")


def _by_way(board: Scoreboard, record: BlindRecord) -> Iterable[list[str]]:
    for title, names in board.groups.items():
        yield [title, *[""] * (len(_COLUMNS) - 1)]
        for timed in (False, True):
            of_those = ", times and ratios" if timed else ""
            for way, found in board.summaries(names, timed).items():
                yield [f"  {_WAYS[way]}{of_those}", *_cells_of(found)]
    for batch in dict.fromkeys(line.batch for line in record.runs.values()):
        yield [f"blind, batch {batch}", *[""] * (len(_COLUMNS) - 1)]
        for way in (AskingWay.ONE_NUMBER, AskingWay.NOTHING):
            scores = [one for one in record.scores(way) if record.runs[one.figure.id].batch == batch]
            yield [f"  {_WAYS[way]}", *_cells_of(summary(scores))]


def _cells_of(found: ScoreSummary) -> list[str]:
    follow = f"{found.follow} ({found.follow_far})" if found.follow else "-"
    return [str(found.figures), str(found.put_in), follow, percent(found.near), percent(found.far),
            number(found.median_log_ratio, 2), _of(found.in_range), _of(found.same_direction), _of(found.in_order)]


def _of(count: Count) -> str:
    return f"{count.those} of {count.of}" if count.of else "-"


# --- what is furthest off ---------------------------------------------------------------------------------------------


def _far(board: Scoreboard) -> Iterable[Part]:
    studied = board.furthest()
    if studied:
        yield heading(f"{len(studied)} as studied go the wrong way or are off by more than {FAR:.0%}; the furthest are "
                      "(`trilane papers --row ID` explains one)")
        lines = [[*_far_cells(score), score.miss] for score in studied[:_MOST_FAR]]
        yield table(["figure", "published", "simulated", "off", "", "why"], lines, widest={"why": 90})
        yield ""
    known = {one.figure.id for one in board.scores[AskingWay.STUDIED]}
    others = [one for one in board.furthest(AskingWay.ONE_NUMBER) if one.figure.id not in known]
    if others:
        yield heading(f"{len(others)} of other sources with one number; the furthest are")
        yield table(["figure", "published", "simulated", "off", ""], map(_far_cells, others[:_MOST_FAR]))
        yield ""


def _far_cells(score: FigureScore) -> list[str]:
    mark = "wrong way" * score.wrong_way
    return [score.figure.id, published_text(score), value_text(score, score.simulated), off_text(score), mark]


def published_text(score: FigureScore) -> str:
    """The published value, with its sign where it is a bound."""
    return f"{score.figure.bound} {value_text(score, score.figure.value)}".lstrip()


def value_text(score: FigureScore, value: float | None) -> str:
    """A value in the figure's unit."""
    return "-" if value is None else f"{value:.3g} {QUANTITIES[score.question.ask].unit}"


def off_text(score: FigureScore) -> str:
    """By how much what came out differs."""
    if score.refused:
        return "refused"
    if score.simulated is not None and score.figure.meets_bound(score.simulated):
        return "met"
    if score.simulated is None or not math.isfinite(score.log_ratio):
        return "sign" if score.simulated is not None else "-"
    return signed_percent(math.exp(score.log_ratio) - 1)


# --- a figure a line --------------------------------------------------------------------------------------------------


def figures_page(board: Scoreboard, record: BlindRecord) -> list[Part]:
    """Every figure of a board, a line each: by how much it is off in each way."""
    scores = {way: {one.figure.id: one for one in own} for way, own in board.scores.items()}
    blind = {one.figure.id: one for one in record.scores(AskingWay.ONE_NUMBER)}
    columns = ["figure", "published", *_WAYS.values(), "in range", "blind"]
    lines = [_figure(one, {way: own.get(one.figure.id) for way, own in scores.items()}, blind.get(one.figure.id))
             for one in board.scores[AskingWay.NOTHING]]
    return [table(columns, lines), ""]


def _figure(one: FigureScore, by_way: Mapping[AskingWay, FigureScore | None], blind: FigureScore | None) -> list[str]:
    inside = {True: "yes", False: "no", None: "-"}[one.in_range]
    return [one.figure.id, published_text(one), *(_marked(by_way[way]) for way in _WAYS), inside, _marked(blind)]


def _marked(score: FigureScore | None) -> str:
    """How far off, and why it is not counted."""
    if score is None:
        return "-"
    why = "put in" if score.put_in else "follows" if score.follows else ""
    return f"{why} {off_text(score)}".strip()
