"""The scoreboard of published figures, and one of them explained, as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table

from trilane.output.pages.output import (
    Part,
    heading,
    legend,
    number,
    pairs,
    percent,
    reasons_table,
    signed_percent,
    table,
)
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.paper import PaperQuestion, reasons
from trilane.study.papers.plays import Plays
from trilane.study.papers.quantities import QUANTITIES
from trilane.study.papers.scores import (
    DEAD_BAND,
    FAR,
    NEAR,
    FigureScore,
    PaperSummary,
    Scoreboard,
    case_values,
    left_out,
    mean_facts,
)

_MOST_FAR = 12
_MEANINGS = {
    "figures": "published figures that were asked in their paper's own setting, without those that were put in",
    "put in": "figures that set a number of the simulator, or an engine's: not counted",
    "within": "simulated differs from published by at most this share of the published value",
    "|ln|": "median of |ln(simulated / published)|; 0.14 is 15 %, 0.26 is 30 %",
    "direction": "of speed-ups and differences, those that go the same way",
    "in order": f"of figures that ask the same but for one thing, and differ by more than {DEAD_BAND:.0%} and than "
                "those that the paper calls the same, pairs in the printed order",
}
_TIMES = {
    "TPOT, ms": ("tpot_ms", 1.0), "TTFT, ms": ("ttft_ms", 1.0), "hits, %": ("decode_resident_hit_rate", 100.0),
    "copies, %": ("h2d_busy_share", 100.0), "CPU, %": ("cpu_busy_share", 100.0), "GPU, %": ("gpu_busy_share", 100.0),
}


def board_page(board: Scoreboard) -> list[Part]:
    """Scores by paper, the figures that are furthest off, and how many were not asked."""
    parts: list[Part] = [
        heading("Published figures, each asked of the simulator in its paper's own setting"),
        table(_COLUMNS, map(_line, board.summaries())), "",
    ]
    reasons = left_out(board.scores) if len(board.scores) > 1 else {}
    title = f"{sum(reasons.values())} figures were not asked"
    parts += [*_far(board.furthest()), *reasons_table(title, "figures", reasons)]
    if missing := len(board.not_played):
        parts += [f"{missing} figures have no plays: `trilane papers --play FILE.csv` plays them.", ""]
    return [*parts, legend(_MEANINGS).lstrip("\n")]


_COLUMNS = ("paper", "figures", "put in", f"within\n{NEAR:.0%}", f"within\n{FAR:.0%}", "median\n|ln|", "direction",
            "pairs\nin order")


def _line(summary: PaperSummary) -> list[str]:
    return [
        summary.name, str(summary.figures), str(summary.put_in), percent(summary.near), percent(summary.far),
        number(summary.median_log_ratio, 2), _of(summary.same_direction), _of(summary.in_order),
    ]


def _of(counts: tuple[int, int]) -> str:
    return f"{counts[0]} of {counts[1]}" if counts[1] else "-"


def _far(scores: Sequence[FigureScore]) -> Iterable[Part]:
    if not scores:
        return
    yield heading(f"{len(scores)} go the wrong way or are off by more than {FAR:.0%}; the furthest are "
                  "(`trilane papers --row ID` explains one)")
    lines = [[*_cells(score), score.miss] for score in scores[:_MOST_FAR]]
    yield table(["figure", "published", "simulated", "off", "", "why"], lines, widest={"why": 90})
    yield ""


def _cells(score: FigureScore) -> list[str]:
    marks = ", ".join(["put in"] * bool(score.put_in) + ["wrong way"] * score.wrong_way)
    return [score.figure.id, _published(score), _value(score, score.simulated), _off(score), marks]


def _published(score: FigureScore) -> str:
    return f"{score.figure.bound} {_value(score, score.figure.value)}".lstrip()


def _value(score: FigureScore, value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} {QUANTITIES[score.question.ask].unit}"


def _off(score: FigureScore) -> str:
    if score.simulated is not None and score.figure.meets_bound(score.simulated):
        return "met"
    if score.refused:
        return "refused"
    if score.simulated is None or not math.isfinite(score.log_ratio):
        return "sign" if score.simulated is not None else "-"
    return signed_percent(math.exp(score.log_ratio) - 1)


def figures_page(board: Scoreboard) -> list[Part]:
    """Every figure of a board, a line each."""
    return [table(["figure", "published", "simulated", "off", ""], map(_cells, board.scores)), ""]


# --- one figure -------------------------------------------------------------------------------------------------------


def figure_page(score: FigureScore, plays: Plays) -> list[Part]:
    """One figure: its place and question, what was played, and why it does not come out."""
    figure, question, paper = score.figure, score.question, score.paper
    over = f" over {' or '.join(question.baselines)}" if question.baselines else ""
    quantity = QUANTITIES[question.ask]
    facts = {
        "paper": f"{paper.title} ({paper.source})", "place": figure.where,
        "question": f"{quantity.meaning}: {question.method}{over}",
        "published": f"{_published(score)} ({figure.kind.replace('_', ' ')})",
        "simulated": f"{_value(score, score.simulated)}, {_off(score)}", "refused": score.refused,
        "put in": score.put_in,
        "contradiction": reasons(paper.contradictions, figure.id), "why it misses": score.miss,
    }
    return [
        heading(f"figure {figure.id}"), pairs((name, text) for name, text in facts.items() if text), "",
        heading("How the paper is read"), *(f"- {' '.join(reading.split())}" for reading in paper.readings), "",
        *_asked(score, plays),
    ]


def _asked(score: FigureScore, plays: Plays) -> list[Part]:
    """Methods that were played, or the options of ``trilane fit`` that ask the same."""
    question = score.question
    if isinstance(question, EngineQuestion):
        return [heading("What was asked"), question.command]
    return [heading("What was played"), _played(score, question, plays), "", *_setting(score, question)]


def _played(score: FigureScore, question: PaperQuestion, plays: Plays) -> Table:
    """A line for each method and case: means over the draws, and the quantity of the case."""
    paper = score.paper
    values = case_values(paper, question, plays)
    lines = []
    for method in (question.method, *question.baselines):
        for case, value in zip(paper.cases(question, method), values, strict=True):
            facts = mean_facts(case, plays)
            cells = [number(facts[fact] * by) if fact in facts else "-" for fact, by in _TIMES.values()]
            about = ", ".join(f"{name} {of}" for name, of in case.about.items())
            own = "-" if value is None or method != question.method else f"{value:.3g}"
            lines.append([method, about, *cells, own])
    return table(["method", "case", *_TIMES, "quantity"], lines, text_columns=2)


def _setting(score: FigureScore, question: PaperQuestion) -> list[Part]:
    """Fields of the scenarios, by method, that the cases share."""
    paper = score.paper
    shown = {}
    for method in (question.method, *question.baselines):
        scenario = paper.cases(question, method)[0].draws[0].to_dict()
        shown[method] = ", ".join(f"{name} {scenario[name]}" for name in _FIELDS if scenario[name] not in (None, {}))
    draws = len(paper.cases(question, question.method)[0].draws)
    return [heading(f"The first case of each method; {draws} draw{'s' * (draws > 1)}"), legend(shown).lstrip("\n")]


_FIELDS = ("policy", "parameters", "model", "hardware", "engine", "trace", "batch", "cached_share", "prompt_tokens",
           "generated_tokens", "sampled_steps")
