"""All models on one machine: the format in which each runs best there, what that gives, and what others lack.

Every speed is that of ``trilane tune`` for the same question: the plain settings of the engine, without a cache of
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from traces.models.catalogue import aliases, model_names, original
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.common.quoting import quoted
from trilane.common.schema import check, to_dict
from trilane.engines.accuracy.errors import ErrorToExpect, Regime, regime_of
from trilane.engines.gains import limiting_part, ranked
from trilane.engines.host_memory import larger_ram_gib
from trilane.engines.memory import host_memory_of
from trilane.engines.model_formats import FORMATS, Bench, best_format, formats_of, from_usual
from trilane.engines.question import FitError, Question
from trilane.engines.refusals import FULL
from trilane.engines.shortage import NoRoomError, Shortage
from trilane.engines.speed import EngineSpeed
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tuned import Tuned

Use = Literal["chat", "code", "documents"]
Sort = Literal["size", "speed", "first"]
SORTS: tuple[Sort, ...] = get_args(Sort)
_MINI = "mini-"


class Lengths(NamedTuple):
    """Tokens of a prompt, of an answer, and of the window."""

    prompt_tokens: int
    generated: int
    window: int


USES: Mapping[Use, Lengths] = {
    "chat": Lengths(1024, 256, 16384), "code": Lengths(8192, 1024, 32768), "documents": Lengths(16384, 512, 32768),
}
PATIENCE_S: Mapping[Use, int] = {  # until the first token
    "chat": 10,  # the limit of a user's attention (nngroup.com, response time limits)
    "code": 60, "documents": 120,  # choices: some 137 prompt tokens/s
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

    @property
    def patience_ms(self) -> float:
        """Time until the first token that its use has patience for."""
        return 1e3 * PATIENCE_S[self.use]

    def has_drawback(self, tuned: Tuned) -> bool:
        """True for what nearly fills a memory, reads a disk, or takes longer to its first token than there is patience
        for."""
        memory = tuned.memory
        return memory.fullest > FULL or memory.disk_bytes > 0 or tuned.ttft_ms > self.patience_ms

    def best_format(self, model: str) -> Bench | None:
        """The format of ``best_format``; with experts on a disk only where a model does not run without. None where it
        does not run."""
        disks = dict.fromkeys((None, self.machine.get("disk")))
        benches = ([bench.with_parts(disk=disk) for bench in self.benches(model)] for disk in disks)
        return next(filter(None, (best_format(each, self.patience_ms) for each in benches)), None)

    def benches(self, model: str) -> list[Bench]:
        """The questions of all formats of a model to choose from, most bits first."""
        return [Bench(self.of(model, name)) for name in formats_of(model)]


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
    error: ErrorToExpect | None  # None: times are those of kernels that were measured here, or experts are on a disk


@dataclass(frozen=True)
class Unable(ModelFacts):
    """A model that does not run in any format; ``weights``: the usual one, of which the other numbers speak.

    ``ram_gib``: host memory with which it would, and ``then``, what it gives; None where no size that the board takes
    is enough. ``short``: the memory that is short of most, where no RAM is enough.
    """

    ram_gib: int | None
    then: Tuned | None
    short: Shortage | None


@dataclass(frozen=True)
class Recommendation:
    """Everything on the page of ``trilane recommend``: the largest models that run first, of others the one that lacks
    least."""

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
        """Models that run: the largest, the fastest, or the soonest first; last those that nearly fill a memory or try
        the patience."""
        keys: Mapping[Sort, Callable[[Recommended], float]] = {
            "size": lambda one: -one.params, "speed": lambda one: one.tuned.tpot_ms,
            "first": lambda one: one.tuned.ttft_ms,
        }
        return sorted(self.runs, key=lambda one: (self.has_drawback(one), keys[sort](one)))

    def has_drawback(self, one: Recommended) -> bool:
        """``RecommendQuestion.has_drawback`` of a model that runs."""
        return self.question.has_drawback(one.tuned)

    @property
    def reads_disk(self) -> bool:
        """True if some model's experts come from a disk."""
        return any(one.tuned.memory.disk_bytes for one in self.runs)


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
        best = question.best_format(model)
        if best is None:
            unable.append(lacking(from_usual(question.benches(model)), model, also))
        else:
            runs.append(recommended(best, model, also))
    hardware = question.of(next(iter(shapes))).hardware
    single = question.models is not None and len(question.models) == 1
    return Recommendation(
        question, hardware.name, hardware.about, tuple(sorted(runs, key=_largest_first)),
        tuple(sorted(unable, key=_least_missing_first)), _formats(question, next(iter(shapes))) if single else (),
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


def _least_missing_first(one: Unable) -> tuple[bool, int, int, str]:
    """First by the size of RAM with which a model runs, then, where none is enough, by what its memory is short of."""
    missing = one.short.missing_bytes if one.short is not None else 0
    return one.ram_gib is None, one.ram_gib or missing, *_largest_first(one)


def recommended(bench: Bench, model: str, also: tuple[str, ...]) -> Recommended:
    """The row of a model that runs. Raises FitError where it does not."""
    best = bench.best
    speed = bench.search.bench.speed(bench.search.best)
    regime = regime_of(speed.shape, speed.hardware, bench.engine, speed.split)
    return Recommended(
        **_facts(bench, model, also), tuned=best, limit=limiting_part(ranked(speed.gains())), regime=regime,
        error=speed.error_to_expect(regime),
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


def lacking(benches: Sequence[Bench], model: str, also: tuple[str, ...]) -> Unable:
    """Return the memory that is missing in the first format with which more host memory is enough."""
    found = next(((bench, larger) for bench in benches if (larger := least_ram(bench))), None)
    if found is None:
        facts = _facts(benches[-1], model, also)
        return Unable(**facts, ram_gib=None, then=None, short=_shortage(next(benches[-1].least)))
    bench, larger = found
    gib = larger.question.fit.ram_gb
    return Unable(**_facts(bench, model, also), ram_gib=gib, then=larger.best, short=None)


def least_ram(bench: Bench) -> Bench | None:
    """The question with the least host memory, of the sizes that there are, with which it runs and nearly fills none;
    None where no size that the board takes is enough."""
    benches = (bench.with_parts(ram_gb=size, disk=None) for size in larger_ram_gib(bench.question.fit))
    return next((larger for larger in benches if larger.leaves_room(FULL)), None)


def _shortage(speed: EngineSpeed) -> Shortage | None:
    """The memory that is short of most."""
    try:
        speed.splitter.best()
    except NoRoomError as error:
        return max(error.missing.short, key=lambda one: one.missing_bytes)
    return None
