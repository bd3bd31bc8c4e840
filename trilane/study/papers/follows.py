"""Figures that follow from one that was put in: the same ratio, or the same table, of the same engine and model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.figures import PublishedFigure, published
from trilane.study.papers.paper import AskingWay, Paper, PutIn
from trilane.study.papers.quantities import TIMED, subject_of
from trilane.study.papers.ways import Asked, programs_of, scenarios

_STEPS = ("step_s", "steps_per_s")
_TIMES_OF: Mapping[str, tuple[str, ...]] = {  # of ratios
    "speedup": _STEPS, "gain": _STEPS, "reduction": _STEPS, "prefill_speedup": ("prefill_s",),
    "answer_speedup": ("answer_tokens_per_s",),
}
_PICTURED = re.compile(r"\b(table|tab|fig|figure)\b", re.IGNORECASE)


class FigureTraits(NamedTuple):
    """The engines, models and machines of a question."""

    engines: frozenset[str]
    models: frozenset[str]
    machines: frozenset[str]


@cache
def follows(paper: Paper, figure_id: str, way: AskingWay) -> str:
    """The figure that was put in and from which this one follows, or nothing.

    A ratio follows if the times of all its methods, in its setting, were put in: nothing is left of it. Any other
    follows if the number that was put in is of an engine or program of its own, and either

    - both are the same ratio, of the same methods, and have a model and a machine in common; or
    - both are in one table or picture, are times or ratios (or both hits, ...), and it has no engine, model or machine
      that the other one lacks.
    """
    if (time := _ratio_of_given(paper, figure_id, way)):
        return time
    for number in paper.numbers[way]:
        if _has(paper, figure_id, way, number):
            for given in number.figures:
                if given in paper.asked and (_same_ratio(paper, figure_id, given, way)
                                             or _same_table(paper, figure_id, given, way)):
                    return given
    return ""


def _ratio_of_given(paper: Paper, figure_id: str, way: AskingWay) -> str:
    """The put-in time of a ratio's own method, if those of its baselines were put in, too; else nothing."""
    mine = paper.asked[figure_id]
    if isinstance(mine, EngineQuestion) or not mine.baselines:
        return ""
    given = {
        other.method: name for name, other in paper.questions.items()
        if other.ask in _TIMES_OF.get(mine.ask, ()) and (other.at, other.set) == (mine.at, mine.set)
        and paper.put_in_by(name, way)
    }
    return given[mine.method] if {mine.method, *mine.baselines} <= {*given} else ""


def _has(paper: Paper, figure_id: str, way: AskingWay, number: PutIn) -> bool:
    """True if a figure depends on the number."""
    if number.program is not None:
        return number.program in programs_of(paper, paper.asked[figure_id])
    return number.engine is None or number.engine in traits_of(paper, figure_id, way).engines


def _same_ratio(paper: Paper, figure_id: str, given: str, way: AskingWay) -> bool:
    mine, other = paper.asked[figure_id], paper.asked[given]
    if not mine.baselines or (mine.method, mine.baselines) != (other.method, other.baselines):
        return False
    own, others = (traits_of(paper, each, way) for each in (figure_id, given))
    return _subject(mine.ask) == _subject(other.ask) and bool(
        own.models & others.models and own.machines & others.machines
    )


def _same_table(paper: Paper, figure_id: str, given: str, way: AskingWay) -> bool:
    if _subject(paper.asked[figure_id].ask) != _subject(paper.asked[given].ask):
        return False
    if not places(published()[figure_id]) & places(published()[given]):
        return False
    traits = zip(traits_of(paper, figure_id, way), traits_of(paper, given, way), strict=True)
    return all(own <= others for own, others in traits)


def _subject(ask: str) -> str:
    subject = subject_of(ask)
    return "timed" if subject in TIMED else subject


def places(figure: PublishedFigure) -> set[str]:
    """The tables and pictures that print a figure; the whole place where none is named."""
    parts = {part.strip() for part in figure.where.split(";")}
    return {part for part in parts if _PICTURED.search(part)} or parts


@cache
def traits_of(paper: Paper, figure_id: str, way: AskingWay) -> FigureTraits:
    """Engines by the names that they have in this way."""
    question = paper.asked[figure_id]
    if isinstance(question, EngineQuestion):
        asked = question.question
        return FigureTraits(*(frozenset({name}) for name in (question.engine, asked.shape, asked.hardware)))
    drawn = scenarios(paper, question, Asked(way))
    names = ("engine", "model", "hardware")
    return FigureTraits(*(frozenset(str(getattr(one, name)) for one in drawn) for name in names))
