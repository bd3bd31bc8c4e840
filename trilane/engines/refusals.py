"""Changes of a question with which a model runs that has no room: other weights, shorter lengths, more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sim.machine.assembly import NO_GPU
from sim.machine.hardware import Hardware
from traces.models.catalogue import load_model
from traces.models.names import parted
from traces.models.quantisation import quantisations_of
from traces.models.shape import ModelShape, ShapeError
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.host_memory import larger_ram_gib
from trilane.engines.memory import host_memory_of, least_need, longest_prompt, surely_runs
from trilane.engines.question import Question, engine_of, reads, with_weights
from trilane.engines.row_table import USUAL_DISK
from trilane.engines.shortage import Missing, NoRoomError, Way
from trilane.engines.speed import EngineSpeed, where_it_fits

MOST_WAYS = 3
FULL = 0.95  # of a memory: beyond, other programs and the next version may leave no room

Changes = Mapping[str, Any]  # fields of a question
Rate = Callable[[Question, float], float | None]
"""Tokens/s, None where it is not known, if no more than a share of each memory is used. Raises NoRoomError."""


def missing(question: Question, least: Changes | None = None, keep_free_bytes: int = 0) -> Missing:
    """Memory that a question's engine lacks, and ways to run it, with the speed of each.

    ``least``: settings with which it takes the least memory, where they may be chosen. ``keep_free_bytes``: of the
    GPU's memory. Nothing is short, and there are no ways, where it runs.
    """
    room = _EngineRoom(least or {}, keep_free_bytes)
    try:
        room.tokens_per_s(question, 1.0)
    except NoRoomError as error:
        ways = [*islice(_ways(question, room.tokens_per_s), MOST_WAYS)]
        if keep_free_bytes and (way := _way(question, replace(room, keep_free_bytes=0).tokens_per_s, {})):
            ways.append(way._replace(changes={"keep_free_gb": 0}))
        return replace(error.missing, ways=tuple(ways))
    return Missing(question.shape)


def roomier(speed: EngineSpeed) -> tuple[Way, ...]:
    """Ways to use no more than ``FULL`` of any memory, with the speed of each; none where its split does."""
    question, split = speed.question, speed.split
    if speed.splitter.memory(split).fullest <= FULL:
        return ()
    room = _EngineRoom({}, 0, alone=speed.hardware.cpu_only)
    kept = speed.hardware.gpu.reserve_bytes - room.machine(question).gpu.reserve_bytes
    room = replace(room, keep_free_bytes=max(kept, 0))

    def rate(changed: Question, most: float) -> float:
        return room.tokens_per_s(changed, min(most, FULL))

    if not (speed.hardware.one_memory or speed.engine.splits == "experts"):
        named = replace(question, n_cpu_moe=cpu_layers_of(speed.shape, split.cpu_layers))
        if ways := tuple(_first(named, rate, _more_on_cpu(named))):
            return ways
    return tuple(islice(_in_memory(question, rate), MOST_WAYS))


def check_fits(shape: ModelShape, hardware: Hardware, question: Question) -> None:
    """Raises NoRoomError for a model that no policy has room for, with ways to play some."""
    short = least_need(shape, hardware, question).shortages(shape, hardware, question)
    if short:
        raise NoRoomError(Missing(shape.name, short, tuple(islice(_in_memory(question, _unknown_rate), MOST_WAYS))))


def _unknown_rate(question: Question, most: float) -> None:
    """No speed: policies have to be played. Raises NoRoomError where it is not certain that some has room."""
    hardware = question.load_machine()
    if hardware.cpu_only or not surely_runs(question.model_shape, hardware, question):
        raise NoRoomError(Missing(question.shape))


@dataclass(frozen=True)
class _EngineRoom:
    """The room that an engine has; see ``missing``."""

    least: Changes
    keep_free_bytes: int
    alone: bool = False  # the CPU, also next to a GPU

    def tokens_per_s(self, question: Question, most: float) -> float:
        """Speed with the question's own settings, or else with the least; see ``Rate``."""
        speed = self._speed(question)
        if self.least and not speed.has_room:
            speed = self._speed(replace(question, **self.least))
        speed = where_it_fits(speed) if question.disk else speed
        if speed.splitter.memory(speed.split).fullest > most:
            raise NoRoomError(Missing(question.shape))
        return 1e9 / speed.decode.total_ns

    def _speed(self, question: Question) -> EngineSpeed:
        hardware, engine = self.machine(question), engine_of(question, question.load_machine())
        if self.keep_free_bytes:
            reserve = hardware.gpu.reserve_bytes + self.keep_free_bytes
            hardware = hardware.with_numbers({"gpu.reserve_bytes": reserve})
        return EngineSpeed(question, question.model_shape, hardware, engine, question.n_cpu_moe is not None)

    def machine(self, question: Question) -> Hardware:
        """The machine of a question, of which the CPU may be alone."""
        hardware = question.load_machine()
        if not self.alone or hardware.cpu_only:
            return hardware
        return hardware.without_gpu(host_memory_of(question, hardware))


# --- ways -------------------------------------------------------------------------------------------------------------


def _ways(question: Question, rate: Rate) -> Iterator[Way]:
    """Changes that help; last a disk, which is slow."""
    yield from _in_memory(question, rate)
    yield from _first(question, rate, _from_disk(question))


def _in_memory(question: Question, rate: Rate) -> Iterator[Way]:
    """Changes that help by themselves, or where none does, those that help with more memory of the host."""
    alone = [*_single(question, rate)]
    yield from alone
    sizes = larger_ram_gib(question)
    if any(way.changes.keys() != {"weights"} for way in alone) or not sizes:
        return
    for way in _single(replace(question, ram_gb=sizes[-1]), lambda changed, most: rate(changed, min(most, FULL))):
        larger = ({**way.changes, "ram_gb": size} for size in sizes)
        yield from _first(question, rate, () if way.command else larger)


def _single(question: Question, rate: Rate) -> Iterator[Way]:
    """The least change of each kind that helps."""
    yield from _first(question, rate, _more_on_cpu(question))
    yield from _first(question, rate, ({"ram_gb": size} for size in larger_ram_gib(question)))
    yield from _raised_limit(question, rate)
    yield from _first(question, rate, _smaller_weights(question))
    yield from _first(question, rate, ({"batch": batch} for batch in range(question.batch - 1, 0, -1)))
    yield from _first(question, rate, _shorter(question, rate))
    yield from _first(question, rate, _without_gpu(question))


def _first(question: Question, rate: Rate, choices: Iterable[Changes]) -> Iterator[Way]:
    """The first of the choices that helps."""
    ways = (_way(question, rate, changes) for changes in choices)
    yield from islice((way for way in ways if way is not None), 1)


def _way(question: Question, rate: Rate, changes: Changes) -> Way | None:
    """None where the changes do not help. Memory that is bought is not nearly full at once."""
    try:
        return Way(changes, rate(replace(question, **changes), FULL if "ram_gb" in changes else 1.0))
    except NoRoomError:
        return None


def _raised_limit(question: Question, rate: Rate) -> Iterator[Way]:
    """More of a unified memory for the GPU than macOS gives it by itself, which is what Linux gives it."""
    limit = question.wired_limit
    if limit is not None and (way := _way(question, rate, {"system": "linux"})):
        yield way._replace(command=limit.command)


def _smaller_weights(question: Question) -> Iterator[Changes]:
    """Formats with fewer bytes that the engine reads, largest first."""
    hardware, own = question.load_machine(), load_model(question.shape)
    engine = None if hardware.measured else engine_of(question, hardware)
    try:
        names = quantisations_of(load_model(str(parted(question.model)._replace(weights=None))))
    except ShapeError:
        return
    shapes = {name: load_model(with_weights(question.model, name)) for name in names}
    sizes = {name: shape.routed_bytes + shape.non_expert_bytes for name, shape in shapes.items()}
    for name in sorted(names, key=lambda name: -sizes[name]):
        if sizes[name] < own.routed_bytes + own.non_expert_bytes and (engine is None or reads(engine, name)):
            named = parted(question.model).weights is not None
            yield {"model": with_weights(question.model, name)} if named else {"weights": name}


def _more_on_cpu(question: Question) -> Iterator[Changes]:
    """More layers whose experts the CPU computes than the question names."""
    if question.n_cpu_moe is not None:
        blocks = load_model(question.shape).expert_blocks
        yield from ({"n_cpu_moe": count} for count in range(question.n_cpu_moe + 1, blocks[-1] + 2))


def _from_disk(question: Question) -> Iterator[Changes]:
    """Experts without room in the host's memory on the kind of disk that most machines have."""
    if question.disk is None:
        yield {"disk": USUAL_DISK}


def _without_gpu(question: Question) -> Iterator[Changes]:
    """The CPU alone, of a machine that is named by its parts."""
    hardware = question.load_machine()
    if question.ram and not hardware.one_memory and not engine_of(question, hardware).needs_gpu:
        yield {"gpu": NO_GPU, "pcie": None, "n_cpu_moe": None, "ts": None, "sm": None}


def _shorter(question: Question, rate: Rate) -> Iterator[Changes]:
    """The longest window that helps, or prompt where the window has to be shorter than prompt and answer."""

    def helps(changes: Changes) -> bool:
        return _way(question, rate, changes) is not None

    own = question.prompt_tokens + question.generated
    window = longest_prompt(lambda n: helps({"window": n}), question.tokens)
    if window >= own:
        yield {"window": window}
        return
    prompt = longest_prompt(lambda n: helps({"prompt_tokens": n, "window": None}), question.prompt_tokens)
    if prompt:
        named = {} if question.window is None else {"window": prompt + question.generated}
        yield {"prompt_tokens": prompt, **named}
