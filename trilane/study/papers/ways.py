"""The ways in which a figure is asked, and its scenarios in each: those of its file, or with the kind of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

from sim.runs.scenario import Scenario
from trilane.study.kinds import ends_of
from trilane.study.papers.calibrations import Calibrations, shipped_calibrations
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.paper import AskingWay, Case, Paper, PaperQuestion
from trilane.study.papers.quantities import TIMED, subject_of

End: TypeAlias = Literal["quick", "slow", "quick cpu", "slow cpu", "quick copies", "slow copies"]  # of a kind: all
# numbers, or those of one part while the others are at the other end
_ENDS: tuple[End, ...] = ("quick", "slow")
_ENDS_OF_RATIOS: tuple[End, ...] = (*_ENDS, "quick cpu", "slow cpu", "quick copies", "slow copies")
_PARTS = {"cpu": ("cpu",), "copies": ("link", "copy")}  # by what their numbers' names contain


class Asked(NamedTuple):
    """A way of asking. ``ends``: by program, the end of its kind; None: the numbers between them. ``calibrations``:
    None: those that come with the program."""

    way: AskingWay = AskingWay.STUDIED
    ends: Mapping[str, End] | None = None
    calibrations: Calibrations | None = None


STUDIED = Asked()


def cases(paper: Paper, question: PaperQuestion, method: str, asked: Asked = STUDIED) -> list[Case]:
    """The scenarios of one of a question's methods. Raises what ``Paper.cases`` raises."""
    stated = paper.cases(question, method)
    if asked.way is AskingWay.STUDIED:
        return stated
    program, draws = paper.program_of(method), None if asked.ends is None else 1  # an end does not need the mean
    return [
        case._replace(draws=tuple(_asked(draw, paper, program, asked) for draw in case.draws[:draws]))
        for case in stated
    ]


def _asked(scenario: Scenario, paper: Paper, program: str, asked: Asked) -> Scenario:
    """A scenario with the engine of this way, of which the one number goes before what the file states."""
    engine = paper.engine_in(asked.way, scenario.engine)
    of_kind = scenario.with_(engine=engine)
    if asked.ends is not None:
        return _at(of_kind, asked.ends[program])
    if asked.way is not AskingWay.ONE_NUMBER:
        return of_kind
    return of_kind.with_(engine_overrides={**scenario.engine_overrides, **_one_number(paper, program, engine, asked)})


def _at(scenario: Scenario, end: End) -> Scenario:
    """A scenario with the numbers of its kind at an end; as it is, if its engine is no kind."""
    ends = ends_of(scenario)
    if ends is None:
        return scenario
    side, _, part = end.partition(" ")
    near, far = (ends.quick, ends.slow) if side == "quick" else (ends.slow, ends.quick)
    names = _PARTS.get(part, ("",))
    others = {key: value for key, value in far.engine_overrides.items() if not any(name in key for name in names)}
    return near.with_(engine_overrides={**near.engine_overrides, **others})


def _one_number(paper: Paper, program: str, engine: str, asked: Asked) -> dict[str, float]:
    known = shipped_calibrations() if asked.calibrations is None else asked.calibrations
    found = known.get((paper.name, program))
    if found is None or found.value is None or found.engine != engine:
        return {}
    return {found.key: found.value}


def programs_of(paper: Paper, question: PaperQuestion | EngineQuestion) -> list[str]:
    """The programs that a question compares, its own first."""
    return list(dict.fromkeys(paper.program_of(method) for method in (question.method, *question.baselines)))


def all_asked(paper: Paper, question: PaperQuestion | EngineQuestion) -> list[Asked]:
    """All ways of asking a question, with the ends of its kinds."""
    return [*map(Asked, ways_of(paper, question)), *range_of_kinds(paper, question)]


def ways_of(paper: Paper, question: PaperQuestion | EngineQuestion) -> list[AskingWay]:
    """The ways in which a question is asked: as studied, only if its engines were set for its programs."""
    return [way for way in AskingWay if way is not AskingWay.STUDIED or is_studied(paper, question)]


def is_studied(paper: Paper, question: PaperQuestion | EngineQuestion) -> bool:
    """True if its engines were set for its programs: none of them is a kind."""
    return isinstance(question, EngineQuestion) or not any(map(ends_of, scenarios(paper, question)))


def range_of_kinds(paper: Paper, question: PaperQuestion | EngineQuestion) -> list[Asked]:
    """All ends of the kinds of a question's programs, which are independent of each other; none where no engine is a
    kind, or neither times nor ratios of times are asked. Of a ratio, parts of a program are at ends of their own, too:
    it depends on how they compare."""
    if isinstance(question, EngineQuestion) or subject_of(question.ask) not in TIMED:
        return []
    if not any(map(ends_of, scenarios(paper, question, Asked(AskingWay.NOTHING)))):
        return []
    programs = programs_of(paper, question)
    ends_of_each = _ENDS_OF_RATIOS if question.over else _ENDS
    chosen = (dict(zip(programs, ends, strict=True)) for ends in product(ends_of_each, repeat=len(programs)))
    return [Asked(AskingWay.NOTHING, ends) for ends in chosen]


def scenarios(paper: Paper, question: PaperQuestion, asked: Asked = STUDIED) -> list[Scenario]:
    """The first draw of every case."""
    methods = (question.method, *question.baselines)
    return [case.draws[0] for method in methods for case in cases(paper, question, method, asked)]
