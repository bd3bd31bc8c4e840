"""Papers and other sources as ``trilane papers`` asks them: settings, methods, programs and questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import nan
from typing import Any, Literal, NamedTuple

from sim.costs.engine import load_engine
from sim.runs.scenario import Scenario
from traces.models.names import parted
from trilane.common.hints import Count, Name
from trilane.common.names import unknown
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.figures import PapersError, published
from trilane.study.papers.quantities import QUANTITIES

Values = Mapping[str, Any]  # fields of a scenario


@dataclass(frozen=True, kw_only=True)
class PaperQuestion:
    """The question of a figure: a quantity of ``method``, compared with the best of the methods ``over``, in the
    setting ``at``, a name, with the changes ``set``. Of fields with a list of values all are played, and ``take`` says
    whether the mean of the quantity or an end is meant.
    """

    ask: Name
    method: Name
    over: Name | tuple[Name, ...] = ()
    at: Name | None = None
    set: Values = field(default_factory=dict)
    take: Literal["mean", "min", "max"] = "mean"

    @property
    def baselines(self) -> tuple[str, ...]:
        """The methods that it is compared with."""
        return (self.over,) if isinstance(self.over, str) else self.over

    @property
    def facts(self) -> dict[str, Any]:
        """The fields in which two questions may differ, by name."""
        return {"ask": self.ask, "method": self.method, "over": self.baselines, "at": self.at,
                "take": self.take, **self.set}


class FigureNote(NamedTuple):
    """A remark on some figures."""

    why: str
    figures: tuple[str, ...]


class Program(NamedTuple):
    """Methods that are one program. ``calibrated_by``: the figure that may set its one free number, chosen before
    anything is run."""

    methods: tuple[Name, ...]
    calibrated_by: Name | None = None


class Case(NamedTuple):
    """One combination of a question's values, with the scenarios of its draws."""

    about: Values
    draws: tuple[Scenario, ...]


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A file such as ``dali.yaml``. Settings, models and methods are fields of a scenario. Those of a question's
    setting have the last word; before them ``variants`` (of a method, by model), methods, models, and ``setting``.

    ``questions`` are simulated, ``engine_questions`` answered by the formulas of an engine that people run.

    ``draws`` of other sequences are played, or those that a setting has, as far as the ``texts`` of a trace suffice.
    ``put_in``, ``misses`` and ``contradictions`` name figures: those that set a number of the simulator, by that
    number; those that do not come out, by the reason; and those that exclude each other in print. ``alike`` names
    figures that the text itself calls the same, by its words.
    """

    name: Name
    title: str
    source: str
    readings: tuple[str, ...] = ()
    draws: Count = 1
    texts: Count = 1
    setting: Values = field(default_factory=dict)
    models: Mapping[str, Values] = field(default_factory=dict)
    methods: Mapping[str, Values] = field(default_factory=dict)
    settings: Mapping[str, Values] = field(default_factory=dict)
    questions: Mapping[str, PaperQuestion] = field(default_factory=dict)
    engine_questions: Mapping[str, EngineQuestion] = field(default_factory=dict)
    programs: Mapping[str, Program] = field(default_factory=dict)
    headlines: tuple[str, ...] = ()
    variants: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    put_in: tuple[FigureNote, ...] = ()
    misses: tuple[FigureNote, ...] = ()
    contradictions: tuple[FigureNote, ...] = ()
    alike: tuple[FigureNote, ...] = ()

    def __post_init__(self) -> None:
        for question_id, question in self.questions.items():
            _known("quantity", question.ask, QUANTITIES, question_id)
            for method in (question.method, *question.baselines):
                _known("method", method, self.methods, question_id)
            if question.at is not None:
                _known("setting", question.at, self.settings, question_id)
            if bool(question.over) != QUANTITIES[question.ask].compares:
                raise PapersError(f"{question_id}: expected `over` with quantities that compare, and only with them")
        if twice := {*self.questions} & {*self.engine_questions}:
            raise PapersError(f"{min(twice)}: expected it among questions or engine_questions, got both")
        self._check_programs()
        notes = (*self.put_in, *self.misses, *self.contradictions, *self.alike)
        for figure_id in (*self.headlines, *(each for note in notes for each in note.figures)):
            _known("figure", figure_id, self.asked, self.name)

    def _check_programs(self) -> None:
        found: dict[str, str] = {}
        for name, program in self.programs.items():
            for method in program.methods:
                _known("method", method, self.methods, name)
                if (other := found.setdefault(method, name)) != name:
                    raise PapersError(f"{self.name}: {method!r}: expected one program, got {other!r} and {name!r}")
            if program.calibrated_by is not None:
                _known("figure", program.calibrated_by, self.questions, name)

    @property
    def asked(self) -> Mapping[str, PaperQuestion | EngineQuestion]:
        """All questions, by figure."""
        return {**self.questions, **self.engine_questions}

    def put_in_by(self, figure_id: str) -> str:
        """The number that a figure set: one that is named here, or those of an engine that the paper's plays have."""
        named = {one["engine"] for one in (self.setting, *self.methods.values()) if "engine" in one}
        engines = [FigureNote(f"engine {name}", load_engine(name).set_by) for name in sorted(named)]
        return reasons((*self.put_in, *engines), figure_id)

    @property
    def scatter(self) -> float:
        """By how much, as a share, figures differ at most that the paper calls the same; 0 where it says so of none."""
        groups = [[published()[figure_id].value or nan for figure_id in note.figures] for note in self.alike]
        return max((max(values) / min(values) - 1 for values in groups), default=0.0)

    def cases(self, question: PaperQuestion, method: str) -> list[Case]:
        """The scenarios of one of a question's methods. Raises ScenarioError for values that a scenario cannot have."""
        asked = {**(self.settings[question.at] if question.at else {}), **question.set}
        names = [name for name, value in asked.items() if isinstance(value, list | tuple)]
        chosen = [dict(zip(names, each, strict=True)) for each in product(*(asked[name] for name in names))]
        return [Case(one, self._draws({**asked, **one}, method)) for one in chosen]

    def _draws(self, asked: Values, method: str) -> tuple[Scenario, ...]:
        model = asked.get("model", next(iter(self.models), ""))
        _known("model", model, self.models, self.name)
        variant = self.variants.get(method, {}).get(model, {})
        rest = {name: value for name, value in asked.items() if name not in ("model", "draws")}
        layers = (self.setting, self.models[model], self.methods[method], variant, rest)
        values: dict[str, Any] = {}
        for layer in layers:
            parameters = {**values.get("parameters", {}), **layer.get("parameters", {})}
            values = {**values, **layer, "parameters": parameters}
        scenario = Scenario.from_dict({"trace": "", **values}, self.name)
        if not scenario.trace:
            scenario = scenario.with_(trace=_trace(scenario, self.texts))
        batch = scenario.batch
        return tuple(
            scenario.with_(seed=draw, sequences=tuple(range(draw * batch, (draw + 1) * batch)))
            for draw in range(max(min(asked.get("draws", self.draws), self.texts // batch), 1))
        )


def reasons(notes: Iterable[FigureNote], figure_id: str) -> str:
    """The texts of the notes on a figure; empty without any."""
    return "; ".join(note.why for note in notes if figure_id in note.figures)


def _trace(scenario: Scenario, texts: int) -> str:
    """Synthetic routing of the model, as long as it is played."""
    prompt = scenario.sampled_prompt_tokens or scenario.prompt_tokens
    steps = scenario.sampled_steps or scenario.generated_tokens
    return f"synthetic:{parted(str(scenario.model)).model}/{texts}x{prompt}+{steps}"


def _known(what: str, name: str, names: Iterable[str], where: str) -> None:
    if name not in names:
        raise PapersError(f"{where}: {unknown(what, name, names)}")
