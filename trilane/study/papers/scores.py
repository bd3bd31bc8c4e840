"""The scores of figures: the plays that answer their questions, what comes out, and the scoreboard by paper."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

from sim.runs.scenario import Scenario
from traces.models.catalogue import load_model
from trilane.common.csv_files import write_csv
from trilane.common.names import unknown
from trilane.common.schema import from_dict
from trilane.common.units import GIB
from trilane.study.journal import Journal, Study, journal_next_to, journal_of
from trilane.study.papers.paper import (
    Case,
    Paper,
    PaperQuestion,
    PapersError,
    PublishedFigure,
    read_figures,
    read_papers,
    reasons,
)
from trilane.study.papers.quantities import FACTS, QUANTITIES, Facts, observed
from trilane.study.player import LastPrepared, Watch, play

NEAR, FAR = 0.15, 0.30  # bands
_TAKE: Mapping[str, Callable[[Iterable[float]], float]] = {"mean": fmean, "min": min, "max": max}


@dataclass(frozen=True)
class FigureScore:
    """A published figure, and what comes out; ``simulated`` is None where it has not been played."""

    figure: PublishedFigure
    paper: Paper
    simulated: float | None

    @property
    def question(self) -> PaperQuestion:
        """The question that the figure answers."""
        return self.paper.questions[self.figure.id]

    @property
    def put_in(self) -> str:
        """The number of the simulator that the figure set, or nothing."""
        return self.paper.put_in_by(self.figure.id)

    @property
    def miss(self) -> str:
        """Why it does not come out, as far as that is known; nothing where it comes out."""
        comes_out = self.simulated is not None and self.within(NEAR) and not self.wrong_way
        return "" if comes_out else reasons(self.paper.misses, self.figure.id)

    @property
    def counts(self) -> bool:
        """True if it is part of the score."""
        return not self.put_in and self.simulated is not None

    @property
    def log_ratio(self) -> float:
        """ln(simulated / published)."""
        assert self.simulated is not None
        return self.figure.log_ratio(self.simulated)

    def within(self, band: float) -> bool:
        """True if it differs from the published value by ``band`` of that at most."""
        return 1 - band <= math.exp(self.log_ratio) <= 1 + band

    @property
    def same_direction(self) -> bool | None:
        """True if the same side is better as in print; None where nothing is compared, or neither is better."""
        even, value = QUANTITIES[self.question.ask].even, self.figure.value
        if even is None or value is None or value == even or self.simulated is None:
            return None
        return (self.simulated > even) == (value > even)

    @property
    def wrong_way(self) -> bool:
        """True if another side is better than in print."""
        return self.same_direction is False


def facts_of(score: FigureScore) -> dict[str, Any]:
    """A figure's place, question, values and reasons."""
    figure, question = score.figure, score.question
    off = score.simulated is not None and math.isfinite(score.log_ratio)
    return {
        "id": figure.id, "paper": figure.paper, "where": figure.where, "ask": question.ask, "method": question.method,
        "over": list(question.baselines), "unit": figure.unit, "published": figure.value, "kind": figure.kind,
        "simulated": score.simulated, "log_ratio": score.log_ratio if off else None, "put_in": score.put_in,
        "miss": score.miss, "contradiction": reasons(score.paper.contradictions, figure.id),
    }


# --- which figures ----------------------------------------------------------------------------------------------------


def chosen_figures(paper: str | None = None, figure_id: str | None = None, headlines: bool = False) -> list[str]:
    """Ids of the figures that are asked: of one paper, the headlines alone, or one. Raises PapersError."""
    papers = read_papers()
    if paper is not None:
        papers = {name: papers[name] for name in [_one(paper, papers, "paper")]}
    ids = [each for one in papers.values() for each in (one.headlines if headlines else one.questions)]
    return ids if figure_id is None else [_one(figure_id, ids, "figure")]


def _one(name: str, names: Iterable[str], what: str) -> str:
    known = {each.lower(): each for each in names}
    if name.lower() in known:
        return known[name.lower()]
    reason = read_figures()[name].left_out if name in read_figures() else ""
    if reason:
        raise PapersError(f"{name}: this figure is not asked: {reason}")
    if what == "paper":
        raise PapersError(unknown(what, name, known.values()))
    listed = unknown(what, name, known.values(), "trilane papers --paper NAME")
    raise PapersError(f"{listed}; NAME is one of {', '.join(read_papers())}")


def needed(figure_ids: Iterable[str]) -> list[Scenario]:
    """The scenarios that figures need, with repetitions. Raises ScenarioError."""
    return [
        draw
        for figure_id in figure_ids
        for paper, question in [asked(figure_id)]
        for method in (question.method, *question.baselines)
        for case in paper.cases(question, method)
        for draw in case.draws
    ]


def asked(figure_id: str) -> tuple[Paper, PaperQuestion]:
    """A figure's paper and question."""
    paper = read_papers()[read_figures()[figure_id].paper]
    return paper, paper.questions[figure_id]


# --- scores -----------------------------------------------------------------------------------------------------------


def score_of(figure_id: str, plays: Plays) -> FigureScore:
    """Score one figure."""
    paper, question = asked(figure_id)
    cases = case_values(paper, question, plays)
    value = None if None in cases else _TAKE[question.take](case for case in cases if case is not None)
    return FigureScore(read_figures()[figure_id], paper, value)


def case_values(paper: Paper, question: PaperQuestion, plays: Plays) -> list[float | None]:
    """The quantity in each case, against the best of the baselines; None where a play or a fact is missing."""
    mine = [mean_facts(case, plays) for case in paper.cases(question, question.method)]
    bases = [[mean_facts(case, plays) for case in paper.cases(question, name)] for name in question.baselines]
    of = QUANTITIES[question.ask].of
    try:
        return [
            min(of(one, base) for base in those) if those else of(one, {})
            for one, *those in zip(mine, *bases, strict=True)
        ]
    except KeyError:
        return [None] * len(mine)


def mean_facts(case: Case, plays: Plays) -> Facts:
    """Means over the draws of the facts that all of them have, and the model's sizes; none where a draw has not been
    played."""
    draws = [plays.get(key(draw), {}) for draw in case.draws]
    means = {name: fmean(draw[name] for draw in draws) for name in draws[0] if all(name in draw for draw in draws)}
    return {**means, **_sizes(case.draws[0])} if means else {}


def _sizes(scenario: Scenario) -> Facts:
    """Weights in GiB, which follow from the model alone."""
    if scenario.model is None:
        return {}
    shape = load_model(scenario.model)
    shared = round(shape.moe_layers * shape.shared_params * shape.bits.shared / 8)
    sizes = {"routed": shape.routed_bytes, "shared": shared, "other": shape.non_expert_bytes - shared}
    return {f"{name}_gib": size / GIB for name, size in sizes.items()}


DEAD_BAND = 0.03  # published values that differ by less are no pair, of any paper


@dataclass(frozen=True)
class PaperSummary:
    """Scores of the figures of one paper, or of all. Pairs: see ``pairs_of``."""

    name: str
    figures: int
    put_in: int
    near: float
    far: float
    median_log_ratio: float
    same_direction: tuple[int, int]  # of
    in_order: tuple[int, int]


@dataclass(frozen=True)
class Scoreboard:
    """All scores that were asked for, in the order of the figures."""

    scores: Sequence[FigureScore]

    def summaries(self) -> list[PaperSummary]:
        """One a paper, and one for all of several."""
        names = list(dict.fromkeys(score.paper.name for score in self.scores))
        groups = {name: [score for score in self.scores if score.paper.name == name] for name in names}
        if len(names) > 1:
            groups["all"] = list(self.scores)
        found = (_summary(name, scores) for name, scores in groups.items())
        return [summary for summary in found if summary.figures]

    def furthest(self, beyond: float = FAR) -> list[FigureScore]:
        """Scores that go the wrong way, and those outside a band; each the worst first."""
        far = [score for score in self.scores if score.counts and (score.wrong_way or not score.within(beyond))]
        return sorted(far, key=lambda score: (not score.wrong_way, -abs(score.log_ratio)))

    @property
    def not_played(self) -> list[FigureScore]:
        """Figures whose plays are missing."""
        return [score for score in self.scores if score.simulated is None]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"papers": [vars(each) for each in self.summaries()], "figures": [facts_of(s) for s in self.scores],
                "left_out": left_out(self.scores)}


def left_out(scores: Sequence[FigureScore]) -> dict[str, int]:
    """How many figures of these papers are not asked, by reason, the most frequent first."""
    papers = {score.paper.name for score in scores}
    reasons = [figure.left_out for figure in read_figures().values() if figure.paper in papers and figure.left_out]
    return dict(Counter(reasons).most_common())


def scoreboard(figure_ids: Sequence[str], plays: Plays) -> Scoreboard:
    """Score figures by plays that are there."""
    return Scoreboard([score_of(figure_id, plays) for figure_id in figure_ids])


# --- summaries --------------------------------------------------------------------------------------------------------


def _summary(name: str, scores: Sequence[FigureScore]) -> PaperSummary:
    counted = [score for score in scores if score.counts]
    directions = [same for score in counted if (same := score.same_direction) is not None]
    pairs = pairs_of(counted)
    near, far = (fmean([score.within(limit) for score in counted] or [math.nan]) for limit in (NEAR, FAR))
    return PaperSummary(
        name, len(counted), sum(bool(score.put_in) for score in scores), near, far,
        median_log_ratio=median([abs(score.log_ratio) for score in counted] or [math.nan]),
        same_direction=(sum(directions), len(directions)),
        in_order=(sum(in_order(*pair) for pair in pairs), len(pairs)),
    )


def pairs_of(scores: Iterable[FigureScore]) -> list[tuple[FigureScore, FigureScore]]:
    """Figures of one paper that ask the same but for one thing, with published values that differ by more than 3 %, and
    by more than figures do that the paper calls the same.

    The two ends of one range are no pair: the greater end is greater whatever is played.
    """
    return [
        pair
        for pair in combinations(scores, 2)
        if pair[0].paper.name == pair[1].paper.name and _one_differs(*(score.question.facts for score in pair))
        and _apart(pair[0].figure.value, pair[1].figure.value, max(DEAD_BAND, pair[0].paper.scatter))
    ]


def _one_differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    different = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return len(different) == 1 and different[0] not in ("ask", "take")


def _apart(one: float | None, other: float | None, band: float) -> bool:
    return one is not None and other is not None and abs(one - other) > band * min(abs(one), abs(other))


def in_order(one: FigureScore, other: FigureScore) -> bool:
    """True if the simulated values are in the order of the published ones."""
    assert None not in (one.simulated, other.simulated, one.figure.value, other.figure.value)
    return (one.simulated > other.simulated) == (one.figure.value > other.figure.value)  # type: ignore[operator]


# --- plays: each once, whatever many figures need it, and the file of their facts -------------------------------------


PLAYED = Path(__file__).with_name("plays.csv")
_DIGITS = 6
_PLAYS = Study("scoreboard", PapersError)
_DEFAULTS = Scenario().to_dict()

Plays: TypeAlias = Mapping[str, Facts]  # by ``key``


def key(scenario: Scenario) -> str:
    """A scenario as text: what differs from the defaults, as JSON."""
    return json.dumps({name: value for name, value in scenario.to_dict().items() if value != _DEFAULTS[name]})


def played(scenarios: Iterable[Scenario], jobs: int = 1, watch: Watch | None = None) -> Iterator[tuple[str, Facts]]:
    """Play each different scenario once, and give its key and facts as soon as they are there.

    Scenarios of one trace are played one after the other. Raises what ``observed`` raises.
    """
    tasks = sorted({key(scenario): scenario for scenario in scenarios}.items(), key=lambda task: _setting(task[1]))
    for place, facts in play(_observed, [scenario for _, scenario in tasks], _setting, jobs, watch):
        yield tasks[place][0], facts


def _setting(scenario: Scenario) -> tuple[str, str]:
    """Scenarios that share a trace, and all but policy and parameters."""
    return scenario.trace, key(scenario.with_(policy="", parameters={}, engine=""))


def _observed(prepared: LastPrepared, scenario: Scenario) -> Facts:
    return observed(prepared.of(scenario))


# --- the file ---------------------------------------------------------------------------------------------------------


def read_plays(path: Path = PLAYED) -> dict[str, Facts]:
    """The plays of a file; none, if there is no file. Raises PapersError."""
    if not path.exists():
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file, strict=True)
            return {line["scenario"]: {name: float(line[name]) for name in FACTS if line[name]} for line in lines}
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError) as error:
        raise PapersError(f"{path}: expected a file of plays, as `trilane papers --play` writes it: {error}") from None


def add_plays(path: Path, scenarios: Iterable[Scenario], jobs: int = 1, watch: Watch | None = None) -> int:
    """Play the scenarios that a file lacks and add them. Each is kept in FILE.journal as soon as it is there, so that
    an interrupted run can go on.

    Returns how many were added. Raises what ``played`` raises, PapersError and OSError.
    """
    plays = read_plays(path)
    count = len(plays)
    with journal_of(journal_next_to(path), _PLAYS) as journal:
        plays |= _kept(journal)
        missing = [scenario for scenario in scenarios if key(scenario) not in plays]
        for name, facts in played(missing, jobs, watch):
            journal.add(name, facts)
            plays[name] = facts
        if len(plays) > count:
            write_csv(_lines(plays), path)
            journal.discard()
    return len(plays) - count


def _kept(journal: Journal) -> dict[str, Facts]:
    """The plays of an earlier, interrupted run. Raises PapersError."""
    try:
        return dict(from_dict(Mapping[str, Mapping[str, float]], journal.entries, "plays", PapersError))
    except PapersError as error:
        raise journal.damaged(str(error)) from None


def _lines(plays: Plays) -> Iterator[tuple[str, ...]]:
    yield "scenario", *FACTS
    for name, facts in plays.items():
        yield name, *(f"{facts[fact]:.{_DIGITS}g}" if fact in facts else "" for fact in FACTS)
