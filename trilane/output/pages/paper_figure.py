"""One published figure explained: its place and question, what comes out in each way, and what was played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from trilane.output.pages.output import Part, heading, legend, number, pairs, table
from trilane.output.pages.papers import off_text, published_text, value_text
from trilane.study.papers.blind import BlindRecord
from trilane.study.papers.board import Scoreboard
from trilane.study.papers.calibrations import shipped_calibrations
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.paper import AskingWay, PaperQuestion, reasons
from trilane.study.papers.plays import Plays
from trilane.study.papers.quantities import QUANTITIES
from trilane.study.papers.scores import FigureScore, case_values, mean_facts
from trilane.study.papers.ways import Asked, cases, programs_of

_TIMES = {
    "TPOT, ms": ("tpot_ms", 1.0), "TTFT, ms": ("ttft_ms", 1.0), "hits, %": ("decode_resident_hit_rate", 100.0),
    "copies, %": ("h2d_busy_share", 100.0), "CPU, %": ("cpu_busy_share", 100.0), "GPU, %": ("gpu_busy_share", 100.0),
}


def figure_page(board: Scoreboard, plays: Plays, record: BlindRecord) -> list[Part]:
    """The one figure of a board."""
    scores = {way: own[0] for way, own in board.scores.items() if own}
    score = next(iter(scores.values()))
    figure, question, paper = score.figure, score.question, score.paper
    over = f" over {' or '.join(question.baselines)}" if question.baselines else ""
    facts = {
        "paper": f"{paper.title} ({paper.source})", "place": figure.where,
        "question": f"{QUANTITIES[question.ask].meaning}: {question.method}{over}",
        "published": f"{published_text(score)} ({figure.kind.replace('_', ' ')})",
        **{way.value: _result(one) for way, one in scores.items()}, "first run": _first_run(score, record),
        "contradiction": reasons(paper.contradictions, figure.id), "why it misses": score.miss,
    }
    readings: list[Part] = [f"- {' '.join(reading.split())}" for reading in paper.readings]
    return [
        heading(f"figure {figure.id}"), pairs((name, text) for name, text in facts.items() if text), "",
        *([heading("How the source is read"), *readings, ""] if readings else []), *_asked(score, plays),
    ]


def _result(score: FigureScore) -> str:
    parts = [value_text(score, score.simulated), off_text(score)] if score.played else ["not played"]
    if score.low is not None and score.high is not None:
        parts.append(f"between {value_text(score, score.low)} and {value_text(score, score.high)}")
    if score.way is AskingWay.ONE_NUMBER:
        parts += _numbers(score)
    parts += [f"put in: {score.put_in}"] * bool(score.put_in) + [f"follows from {score.follows}"] * bool(score.follows)
    return ", ".join(parts) + f" ({score.refused})" * bool(score.refused)


def _numbers(score: FigureScore) -> Iterator[str]:
    """The numbers of its programs."""
    if isinstance(score.question, EngineQuestion):
        return
    for program in programs_of(score.paper, score.question):
        found = shipped_calibrations().get((score.paper.name, program))
        if found is not None and found.value is not None:
            missed = "" if found.met else ", which it misses"
            yield f"{found.key} {found.value:g} of {program} by {found.figure}{missed}"


def _first_run(score: FigureScore, record: BlindRecord) -> str:
    line = record.runs.get(score.figure.id)
    if line is None:
        written = record.written.get(score.figure.id)
        return f"none; written on {written.date}" if written else ""
    changed = ", changed since" if record.changed([score.figure.id]) else ""
    values = line.message or (f"{value_text(score, line.one_number)} with one number, {value_text(score, line.value)} "
                              f"with nothing put in")
    return f"{values}; written on {record.written[score.figure.id].date}, run on {line.date} at {line.commit}{changed}"


# --- what was played --------------------------------------------------------------------------------------------------


def _asked(score: FigureScore, plays: Plays) -> list[Part]:
    """Methods that were played, or the options of ``trilane fit`` that ask the same."""
    question = score.question
    if isinstance(question, EngineQuestion):
        return [heading("What was asked"), question.command]
    title = f"What was played, {score.way.value}"
    return [heading(title), _played(score, question, plays), "", *_setting(score, question)]


def _played(score: FigureScore, question: PaperQuestion, plays: Plays) -> Table:
    """A line for each method and case: means over the draws, and the quantity of the case."""
    paper, asked = score.paper, Asked(score.way)
    values = case_values(paper, question, plays, asked)
    lines = []
    for method in (question.method, *question.baselines):
        for case, value in zip(cases(paper, question, method, asked), values, strict=True):
            facts = mean_facts(case, plays)
            cells = [number(facts[fact] * by) if fact in facts else "-" for fact, by in _TIMES.values()]
            about = ", ".join(f"{name} {of}" for name, of in case.about.items())
            own = "-" if value is None or method != question.method else f"{value:.3g}"
            lines.append([method, about, *cells, own])
    return table(["method", "case", *_TIMES, "quantity"], lines, text_columns=2)


def _setting(score: FigureScore, question: PaperQuestion) -> list[Part]:
    """Fields of the scenarios, by method, that the cases share."""
    shown: dict[str, str] = {}
    for method in (question.method, *question.baselines):
        drawn = cases(score.paper, question, method, Asked(score.way))[0].draws
        shown[method] = _fields(drawn[0].to_dict())
    draws = len(drawn)
    return [heading(f"The first case of each method; {draws} draw{'s' * (draws > 1)}"), legend(shown).lstrip("\n")]


def _fields(scenario: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {scenario[name]}" for name in _FIELDS if scenario[name] not in (None, {}))


_FIELDS = ("policy", "parameters", "model", "hardware", "hardware_overrides", "engine", "engine_overrides", "trace",
           "batch", "cached_share", "prompt_tokens", "generated_tokens", "sampled_steps")
