"""Papers and other sources as ``trilane papers`` asks them: settings, methods, programs and questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
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
_MAPPINGS = ("parameters", "hardware_overrides", "engine_overrides")  # of which a later layer replaces single entries


class AskingWay(Enum):
    """A way in which a figure is asked, by what is known of the program."""

    STUDIED = "as studied"  # the engines that were set for it
    ONE_NUMBER = "one number"  # the kind of its engine, and one number that one figure of the source sets
    NOTHING = "nothing put in"  # the kind of its engine, and the range of such programs


@dataclass(frozen=True, kw_only=True, eq=False)  # so that it can be a key
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
    """A remark on some figures. ``engine``: it concerns a number of that engine alone."""

    why: str
    figures: tuple[str, ...]
    engine: Name | None = None


class PutIn(NamedTuple):
    """A number of the simulator that figures set: one of an ``engine`` or of a ``program``, or any other."""

    why: str
    figures: tuple[str, ...]
    engine: str | None = None
    program: str | None = None


class Program(NamedTuple):
    """Methods that are one program. ``calibrated_by``: the figure that may set its one free number, chosen before
    anything is run."""

    methods: tuple[Name, ...]
    calibrated_by: Name | None = None


class Case(NamedTuple):
    """One combination of a question's values, with the scenarios of its draws."""

    about: Values
    draws: tuple[Scenario, ...]


@dataclass(frozen=True, kw_only=True, eq=False)  # so that it can be a key
class Paper:
    """A file such as ``dali.yaml``. Settings, models and methods are fields of a scenario. Those of a question's
    setting have the last word; before them ``variants`` (of a method, by model), methods, models, and ``setting``.

    ``questions`` are simulated, ``engine_questions`` answered by the formulas of an engine that people run. ``kinds``:
    by the name of an engine that was set for a program, the engine of programs of its kind, which stands for it where
    less is known (``AskingWay``).

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
    kinds: Mapping[str, str] = field(default_factory=dict)
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

    def program_of(self, method: str) -> str:
        """The name of the program that a method is; the method's own where none is stated."""
        return next((name for name, program in self.programs.items() if method in program.methods), method)

    def engine_in(self, way: AskingWay, name: str) -> str:
        """The engine that stands for the one of this name. One number is that of a released program's own engine, where
        there is one that a single time sets; else that of its kind."""
        if way is AskingWay.STUDIED or (way is AskingWay.ONE_NUMBER and _is_released(name)):
            return name
        return self.kinds.get(name, name)

    @property
    def _stated_engines(self) -> set[str]:
        """The engines that the file names, in whichever of its parts."""
        variants = [values for of_method in self.variants.values() for values in of_method.values()]
        parts = (self.setting, *self.models.values(), *self.methods.values(), *self.settings.values(), *variants)
        return {values["engine"] for values in parts if "engine" in values}

    def engines(self, way: AskingWay) -> set[str]:
        """The engines that it is asked with."""
        return {self.engine_in(way, name) for name in self._stated_engines}

    def put_in_by(self, figure_id: str, way: AskingWay = AskingWay.STUDIED) -> str:
        """The number that a figure set, or nothing."""
        return "; ".join(number.why for number in self.numbers[way] if figure_id in number.figures)

    @cached_property
    def numbers(self) -> Mapping[AskingWay, tuple[PutIn, ...]]:
        """The numbers that figures set, in each way: those that are named here, those of the engines that the paper's
        plays have, and the one number of each program."""
        return {way: tuple(self._numbers(way)) for way in AskingWay}

    def _numbers(self, way: AskingWay) -> Iterator[PutIn]:
        engines = self.engines(way)
        yield from (PutIn(*note) for note in self.put_in if note.engine is None or note.engine in engines)
        yield from (PutIn(f"engine {name}", load_engine(name).set_by, name) for name in sorted(engines))
        if way is AskingWay.ONE_NUMBER:
            yield from (PutIn(f"the one number of {name}", (program.calibrated_by,), program=name)
                        for name, program in self.programs.items() if program.calibrated_by)

    @property
    def scatter(self) -> float:
        """By how much, as a share, figures differ at most that the paper calls the same; 0 where it says so of none."""
        groups = [[published()[figure_id].value or nan for figure_id in note.figures] for note in self.alike]
        return max((max(values) / min(values) - 1 for values in groups), default=0.0)

    @cache  # noqa: B019 (papers live as long as the program)
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
            merged = {name: {**values.get(name, {}), **layer[name]} for name in _MAPPINGS if name in layer}
            values = {**values, **layer, **merged}
        scenario = Scenario.from_dict({"trace": "", **values}, self.name)
        if not scenario.trace:
            scenario = scenario.with_(trace=_trace(scenario, self.texts))
        batch = scenario.batch
        return tuple(
            scenario.with_(seed=draw, sequences=tuple(range(draw * batch, (draw + 1) * batch)))
            for draw in range(max(min(asked.get("draws", self.draws), self.texts // batch), 1))
        )


def _is_released(engine: str) -> bool:
    """True if its numbers were read from a program's code, but for those that a time of its own sets."""
    loaded = load_engine(engine)
    return bool(loaded.calibrated) and not loaded.spread


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
