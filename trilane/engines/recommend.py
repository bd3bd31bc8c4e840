"""All models on one machine: the format in which each runs best there, what that gives, and what others lack.

Every speed is that of ``trilane tune`` for the same question: the plain settings of the engine, without a cache of
experts. Memory decides the format before any speed is worked out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from sim.machine.parts import part
from traces.models.catalogue import aliases, load_model, model_names, original
from traces.models.names import parted
from traces.models.quantisation import quantisations_of
from traces.models.shape import ModelShape
from trilane.common.quoting import quoted
from trilane.common.schema import check, to_dict
from trilane.common.units import GIB
from trilane.engines.accuracy.errors import ErrorToExpect, Regime, error_to_expect, regime_of
from trilane.engines.gains import limiting_part, ranked
from trilane.engines.memory import host_memory_of
from trilane.engines.question import FitError, Question, check_engine, engine_of
from trilane.engines.refusals import FULL, RAM_SIZES_GIB
from trilane.engines.shortage import NoRoomError, Shortage
from trilane.engines.speed import EngineSpeed
from trilane.engines.tune.search import SettingSearch, searched
from trilane.engines.tune.settings import Setting, SettingSpace, TuneQuestion, choices
from trilane.engines.tune.tuned import Tuned, Workbench

Use = Literal["chat", "code", "documents"]
Sort = Literal["size", "speed", "first"]
SORTS: tuple[Sort, ...] = get_args(Sort)
FORMATS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k")  # most bits first
USUAL = "q4_k_m"
FEWEST_BITS_ON_GPU = 4.0  # of an expert's weight: fewer are taken only where nothing else runs
_MINI = "mini-"


class Lengths(NamedTuple):
    """Tokens of a prompt, of an answer, and of the window."""

    prompt_tokens: int
    generated: int
    window: int


USES: Mapping[Use, Lengths] = {
    "chat": Lengths(1024, 256, 16384), "code": Lengths(8192, 1024, 32768), "documents": Lengths(16384, 512, 32768),
}


@dataclass(frozen=True)
class RecommendQuestion:
    """Models on a machine. ``machine``: its parts, by the names of ``Question``; ``use`` sets the lengths.

    ``models``: None is all of the catalogue. Raises FitError.
    """

    machine: Mapping[str, Any]
    use: Use = "chat"
    models: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.use not in USES:
            raise FitError(f"recommend: use: expected {', '.join(USES)}, got {quoted(str(self.use))}")
        check(self, FitError)

    def of(self, model: str, weights: str | None = None) -> TuneQuestion:
        """The question of ``trilane tune`` for one model; ``weights``: None is as published."""
        return TuneQuestion(Question(model, weights=weights, **self.machine, **USES[self.use]._asdict()))

    def benches(self, model: str) -> list[Bench]:
        """The questions of all formats of a model to choose from, most bits first."""
        return [Bench(self.of(model, name)) for name in formats_of(model)]


@dataclass(frozen=True)
class Bench:
    """One question of ``trilane tune``, and the search that answers it."""

    question: TuneQuestion

    @cached_property
    def hardware(self) -> Hardware:
        return self.question.hardware

    @cached_property
    def shape(self) -> ModelShape:
        return self.question.shape_with(self.question.kv[-1])

    @cached_property
    def engine(self) -> FittedEngine:
        return engine_of(self.question.fit, self.hardware)

    @cached_property
    def space(self) -> SettingSpace:
        return choices(self.question, self.shape, self.hardware, self.engine)

    @property
    def runs(self) -> bool:
        """True if there is room for a setting that takes the least memory, with the GPU or without."""
        return any(speed.has_room for speed in self.least)

    @property
    def least(self) -> Iterator[EngineSpeed]:
        """Yield the speeds of the settings that take the least memory, which raise FitError without room."""
        space = self.space
        for gpu in space.gpu:
            yield self._work.speed(Setting(space.kv[-1], min(space.piece_tokens), space.threads[0], gpu=gpu))

    @property
    def all_on_gpu(self) -> bool:
        """True if a GPU has room for all experts with the engine's own setting."""
        own = self._work.speed(self.space.usual)
        return not self.hardware.cpu_only and own.has_room and own.split.cpu_layers == 0

    @cached_property
    def search(self) -> SettingSearch:
        """Every plain setting, tried. Raises FitError for weights or a card that the engine does not take."""
        check_engine(self.engine, self.shape, self.hardware)
        return searched(self.question, self.hardware, self.shape, self.engine)

    @property
    def best(self) -> Tuned:
        """Raises FitError where nothing runs."""
        return self.search.bench.tuned(self.search.best)

    def with_parts(self, **parts: Any) -> Bench:
        """Ask the same question of a machine with other parts."""
        return Bench(replace(self.question, fit=replace(self.question.fit, **parts)))

    @cached_property
    def _work(self) -> Workbench:
        return Workbench(self.question, self.hardware, self.engine)


# --- the format -------------------------------------------------------------------------------------------------------


def formats_of(model: str) -> Sequence[str | None]:
    """Formats to choose from, most bits first; None is as published, for models in fewer than 16 bits, and files."""
    own = load_model(model)
    there = quantisations_of(own) if own.weight_bits >= 16 else []
    return [name for name in FORMATS if name in there] or [None]


def best_format(benches: Sequence[Bench]) -> Bench | None:
    """The format as published, where that has fewer than 16 bits. Otherwise the one with the most bits, of at least
    four, with which all experts are on the GPU; else q4_k_m, else the most bits below it. None where none runs.

    ``benches``: of ``formats_of``.
    """
    large = (bench for bench in benches if bench.shape.weight_bits >= FEWEST_BITS_ON_GPU)
    on_gpu = next((bench for bench in large if bench.all_on_gpu), None)
    return on_gpu or next((bench for bench in from_usual(benches) if bench.runs), None)


def from_usual(benches: Sequence[Bench]) -> Sequence[Bench]:
    """Formats from q4_k_m on, by falling bits; all where there is no q4_k_m."""
    names = [bench.question.fit.weights for bench in benches]
    return benches[names.index(USUAL):] if USUAL in names else benches


# --- what runs --------------------------------------------------------------------------------------------------------


class FormatSpeed(NamedTuple):
    """A format of a model, bits of a weight of its experts, and what it gives; None where it does not run."""

    weights: str
    bits: float
    tuned: Tuned | None


@dataclass(frozen=True)
class ModelFacts:
    """A model of the catalogue. ``also``: others of its shape, whose times and sizes are the same."""

    model: str
    also: tuple[str, ...]
    params: int
    weights: str
    bits: float  # of a weight of its experts


@dataclass(frozen=True)
class Recommended(ModelFacts):
    """A model that runs, in the format of ``best_format``. ``limit``: the part that limits decoding, if one does."""

    tuned: Tuned
    limit: str | None
    regime: Regime
    error: ErrorToExpect | None  # None: times are those of kernels that were measured here


@dataclass(frozen=True)
class Unable(ModelFacts):
    """A model that does not run in any format; ``weights``: the usual one, of which the other numbers speak.

    ``ram_gib``: host memory with which it would, and ``then``, what it gives; None where no size that the board takes
    is enough. ``short``: the first memory that is short, where that is so.
    """

    ram_gib: int | None
    then: Tuned | None
    short: Shortage | None


@dataclass(frozen=True)
class Recommendation:
    """Everything on the page of ``trilane recommend``, largest models first."""

    question: RecommendQuestion
    machine: str
    about: str
    runs: tuple[Recommended, ...]
    unable: tuple[Unable, ...]
    formats: tuple[FormatSpeed, ...] = ()  # of the model that was asked for
    machine_notes: tuple[str, ...] = ()  # on the machine's parts

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return to_dict(self)

    @property
    def asked(self) -> TuneQuestion:
        """The question of the first model, in the format that is told."""
        first = [*self.runs, *self.unable][0]
        return self.question.of(first.model, first.weights if first.weights in FORMATS else None)

    @property
    def ram_known(self) -> bool:
        """False if the size of the host's memory was not named: it is taken as enough."""
        fit = self.asked.fit
        hardware = fit.load_machine()
        return hardware.gpu.kind == "unified" or host_memory_of(fit, hardware) is not None

    def sorted_by(self, sort: Sort) -> list[Recommended]:
        """Models that run: the largest, the fastest, or the soonest first; those that nearly fill a memory last."""
        keys: Mapping[Sort, Callable[[Recommended], float]] = {
            "size": lambda one: -one.params, "speed": lambda one: one.tuned.tpot_ms,
            "first": lambda one: one.tuned.ttft_ms,
        }
        return sorted(self.runs, key=lambda one: (one.tuned.memory.fullest > FULL, keys[sort](one)))


def recommend(
    use: Use = "chat", models: Sequence[str] | None = None, watch: Callable[[int, int], None] | None = None,
    **machine: Any,
) -> Recommendation:
    """Work out for each model in which format it runs on a machine, how fast, or what it lacks.

    ``machine``: its parts, by the names of ``Question``: gpu, ram, cpu, cores, channels, pcie, ram_gb, or machine.
    ``models``: None is all of the catalogue; of a single one all formats are told. ``watch`` is called with the number
    of models that are done, and of all. Raises HardwareError, ShapeError, FitError.
    """
    question = RecommendQuestion(machine, use, None if models is None else tuple(models))
    shapes = shapes_of(question.models)
    runs: list[Recommended] = []
    unable: list[Unable] = []
    for done, (model, also) in enumerate(shapes.items()):
        if watch is not None:
            watch(done, len(shapes))
        benches = question.benches(model)
        best = best_format(benches)
        if best is None:
            unable.append(_unable(from_usual(benches), model, also))
        else:
            runs.append(recommended(best, model, also))
    hardware = question.of(next(iter(shapes))).hardware
    single = question.models is not None and len(question.models) == 1
    return Recommendation(
        question, hardware.name, hardware.about, tuple(sorted(runs, key=_largest_first)),
        tuple(sorted(unable, key=_largest_first)), _formats(question, next(iter(shapes))) if single else (),
        hardware.notes,
    )


def shapes_of(models: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Models, each with the others that have its shape; a model that was named stands for itself."""
    if models is not None:
        return {model: _alike(model) for model in models}
    return {model: _alike(model) for model in model_names() if model not in aliases() and not model.startswith(_MINI)}


def _alike(model: str) -> tuple[str, ...]:
    known = model_names()
    if model.lower() not in known:
        return ()
    return tuple(name for name in known if name != model.lower() and original(name) == original(model.lower()))


def _largest_first(one: ModelFacts) -> tuple[int, str]:
    return -one.params, one.model


def recommended(bench: Bench, model: str, also: tuple[str, ...]) -> Recommended:
    """The row of a model that runs. Raises FitError where it does not."""
    best = bench.best
    speed = bench.search.bench.speed(bench.search.best)
    regime = regime_of(speed.shape, speed.hardware, bench.engine, speed.split)
    return Recommended(
        **_facts(bench, model, also), tuned=best, limit=limiting_part(ranked(speed.gains())), regime=regime,
        error=None if speed.measured else error_to_expect(speed.shape, speed.hardware, regime, bench.engine),
    )


def _facts(bench: Bench, model: str, also: tuple[str, ...]) -> dict[str, Any]:
    shape = bench.shape
    return {
        "model": model, "also": also, "params": shape.params, "weights": _weights(shape), "bits": shape.weight_bits
    }


def _formats(question: RecommendQuestion, model: str) -> tuple[FormatSpeed, ...]:
    return tuple(
        FormatSpeed(_weights(bench.shape), bench.shape.weight_bits, bench.best if bench.runs else None)
        for bench in question.benches(model)
    )


def _weights(shape: ModelShape) -> str:
    return parted(shape.name).weights or "its own"


# --- what does not run ------------------------------------------------------------------------------------------------


def _unable(benches: Sequence[Bench], model: str, also: tuple[str, ...]) -> Unable:
    """Memory that is missing in the first format with which more host memory is enough."""
    found = next(((bench, larger) for bench in benches if (larger := least_ram(bench))), None)
    if found is None:
        facts = _facts(benches[-1], model, also)
        return Unable(**facts, ram_gib=None, then=None, short=_shortage(next(benches[-1].least)))
    bench, larger = found
    gib = larger.question.fit.ram_gb
    return Unable(**_facts(bench, model, also), ram_gib=gib, then=larger.best, short=None)


def least_ram(bench: Bench) -> Bench | None:
    """The question with the least host memory, of the sizes that there are, with which it runs; None where no size that
    the board takes is enough."""
    there = host_memory_of(bench.question.fit, bench.hardware)
    if there is None or bench.hardware.gpu.kind == "unified":
        return None
    most = most_ram_gib(bench.question.fit)
    sizes = (size for size in RAM_SIZES_GIB if size * GIB > there and (most is None or size <= most))
    benches = (bench.with_parts(ram_gb=size) for size in sizes)
    return next((larger for larger in benches if larger.runs), None)


def most_ram_gib(question: Question) -> int | None:
    """Host memory that the largest modules of all channels have together; None where it has no modules, or a machine is
    named as a whole."""
    if question.ram is None or (modules := part("memory", question.ram).modules) is None:
        return None
    return channels_of(question) * modules.slots.value * modules.gib.value[-1] * (question.sockets or 1)


def channels_of(question: Question) -> int:
    """Memory channels of the CPU, or those that such modules usually have."""
    cpu = None if question.cpu is None else part("cpu", question.cpu)
    own = part("memory", question.ram or "").channels
    return (own if cpu is None or cpu.channels is None else cpu.channels).value


def _shortage(speed: EngineSpeed) -> Shortage | None:
    """The first memory that is short."""
    try:
        speed.splitter.best()
    except NoRoomError as error:
        return error.missing.short[0]
    return None
