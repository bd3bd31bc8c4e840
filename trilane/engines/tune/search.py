"""Search for the best setting of an engine, by times in closed form.

Where the experts of as many layers are on the host, a prompt in fewer pieces is sooner done. So of all sizes of pieces
those matter with which the memory leaves more layers to the GPU than with any larger ones, next to those that people
use. Of each the search compares every number of layers on the host that has room: the fewest are best where the GPU is
the quicker of the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice, pairwise, product, starmap
from math import inf

import numpy as np
import numpy.typing as npt

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.hit_curve import HitCurve
from trilane.engines.memory import Splitter
from trilane.engines.parallel import takes_cards
from trilane.engines.question import FitError
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_speed import (
    Floats,
    PromptCosts,
    StaticSplit,
    Times,
    mean_decode_costs,
)
from trilane.engines.tune.cards_costs import prompt_parts, step_parts
from trilane.engines.tune.expert_cache import cache_share
from trilane.engines.tune.settings import (
    USUAL_PIECES,
    WORTH_FEWER_BITS,
    WORTH_SETTING,
    Setting,
    SettingSpace,
    TuneQuestion,
    choices,
)
from trilane.engines.tune.tuned import Tuned, Workbench

AS_FAST = 0.005  # of the time that is compared: settings nearer to the best are no runners-up
_NS_PER_MS = 1e6


def searched(question: TuneQuestion, hardware: Hardware, shape: ModelShape, engine: FittedEngine) -> SettingSearch:
    """Compare the settings of an engine without a cache of experts. ``shape``: with any format of its cache."""
    space, bench = choices(question, shape, hardware, engine), Workbench(question, hardware, engine)
    costs: dict[Setting, float] = {}
    for gpu, kv in product(space.gpu, space.kv):
        first = Setting(kv, space.piece_tokens[0], space.threads[0], gpu=gpu)
        several = bench.hardware.further and gpu and not takes_cards(engine)
        costs |= _with_threads((CardsPlacing if several else Placing)(bench, space, first))
    return SettingSearch(bench, space, costs)


def _with_threads(placing: Placing) -> dict[Setting, float]:
    """Times with the numbers of threads of its space, and with the one that is best for the best of these settings."""
    space, costs = placing.space, dict[Setting, float]()
    for threads in space.threads:
        costs |= placing.costs(threads)
    if costs and space.fewer_threads:
        threads = quickest_threads(placing.bench, min(costs, key=lambda one: costs[one]))
        if threads not in space.threads:
            costs |= placing.costs(threads)
    return costs


def quickest_threads(bench: Workbench, setting: Setting) -> int:
    """The number of threads with which a setting is quickest.

    More threads compute sooner and wait longer for one another, so that there is one least time of the threads of fast
    cores, of others, and from one socket to the next.
    """
    speed, cpu = bench.speed(setting), bench.hardware.cpu
    if not speed.hardware.cpu_only and not speed.split.cpu_layers:
        return 1  # the CPU computes nothing

    @cache
    def ms(threads: int) -> float:
        return bench.cost(speed, replace(speed.split, threads=threads))

    def least(first: int, last: int) -> int:
        if last - first > 1 and ms(last) < ms(last - 1):  # none waits too long: most CPUs
            return last
        return first + 1 + bisect_left(range(first + 1, last), True, key=lambda threads: ms(threads + 1) >= ms(threads))

    sockets = (number * cpu.cores // cpu.sockets for number in range(cpu.sockets + 1))
    return min(starmap(least, pairwise(sorted({cpu.fast_cores, *sockets}))), key=ms)


def with_cache(search: SettingSearch, curve: HitCurve) -> SettingSearch:
    """Compare the settings of the same engine with a cache of experts, of these hit rates."""
    bench, space = replace(search.bench, curve=curve), search.space
    costs, numbers = dict[Setting, float](), dict.fromkeys(one.threads for one in search.costs if one.gpu)
    for kv in space.kv:
        first = Setting(kv, space.piece_tokens[0], space.threads[0], cached=True)
        sizes = {one.piece_tokens for one in search.costs if one.kv == kv and one.gpu}
        placing = CachedPlacing(bench, first, _with_smallest(sizes, search), curve)
        for threads in numbers:
            costs |= placing.costs(threads)
    return SettingSearch(bench, space, costs)


def _with_smallest(sizes: Collection[int], search: SettingSearch) -> set[int]:
    """Sizes of pieces, with the smallest ones that divide the prompt into as many pieces: the room that their buffers
    leave goes to the cache, which the comparison without a cache does not count."""
    prompt = search.bench.question.fit.prompt_tokens
    least = {-(-prompt // size): size for size in sorted(search.space.piece_tokens, reverse=True)}
    return {*sizes, *(least[-(-prompt // size)] for size in sizes)}


def best_plain(question: TuneQuestion, hardware: Hardware, shape: ModelShape, engine: FittedEngine) -> Tuned:
    """The best setting of an engine without a cache of experts. Raises FitError where none can run.

    ``hardware``: ``question.hardware``; ``shape``: the model with any format of its cache.
    """
    done = searched(question, hardware, shape, engine)
    return done.bench.tuned(done.best)


@dataclass(frozen=True)
class SettingSearch:
    """Settings of one engine, each with its time in ms that the goal compares."""

    bench: Workbench
    space: SettingSpace
    costs: Mapping[Setting, float]

    @cached_property
    def best(self) -> Setting:
        """The setting in the format with the least ``score``. Raises FitError for none."""
        if not self.costs:
            _ = self.bench.speed(self.least).split
        return self.nearest(self.costs, min(self.costs, key=self.score))

    @property
    def best_other_kv(self) -> Setting | None:
        """The best setting with another format of the KV cache; None where there is none."""
        others = {one: ms for one, ms in self.costs.items() if one.kv != self.best.kv}
        return self.nearest(others, min(others, key=self.score)) if others else None

    def score(self, setting: Setting) -> float:
        """The time that is compared, longer for a KV cache of fewer bits by what that must save."""
        return self.costs[setting] * (1 + WORTH_FEWER_BITS) ** self.space.kv.index(setting.kv)

    def nearest(self, costs: Mapping[Setting, float], quickest: Setting) -> Setting:
        """The one nearest to the engine's own, of those that are as good as the quickest, in its format."""
        limit = (1 + WORTH_SETTING) * costs[quickest]
        as_good = [one for one, ms in costs.items() if one.kv == quickest.kv and ms <= limit]
        return min(as_good, key=lambda one: (self.space.changes(one), costs[one]))

    def leading(self, count: int) -> list[Setting]:
        """The best one, and the next of the others, none of which differs from a better one in its threads alone."""
        kinds: dict[Setting, Setting] = {}
        for setting in (self.best, *sorted(self.costs, key=self.score)):
            kinds.setdefault(setting._replace(threads=0), setting)
        return [*islice(kinds.values(), count)]

    def behind(self) -> Setting | None:
        """The quickest of those that are slower than the best one, and differ in more than their threads."""
        limit, near = (1 + AS_FAST) * self.costs[self.best], self.best._replace(threads=0)
        slower = [one for one, ms in self.costs.items() if ms > limit and one._replace(threads=0) != near]
        return min(slower, key=self.score, default=None)

    @property
    def least(self) -> Setting:
        """The setting that needs the least memory on the GPU."""
        return Setting(self.space.kv[-1], min(self.space.piece_tokens), self.space.threads[0])


@dataclass(frozen=True)
class Placing:
    """The settings of one KV format and device: those of ``first``."""

    bench: Workbench
    space: SettingSpace
    first: Setting
    _places: dict[int, int | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _prompts: dict[int, PromptCosts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def costs(self, threads: int) -> dict[Setting, float]:
        """The time in ms with so many threads and the best split, for each size of pieces that matters."""
        found: dict[Setting, float] = {}
        if self._place(min(self.space.piece_tokens)) is None:
            return found
        usual = [one for size in self.space.piece_tokens if self.is_usual(size) for one in self._alike(size)]
        decode_ns = self._decode(threads)
        for tokens in dict.fromkeys((*usual, *self._largest())):
            if self._place(tokens) is None:
                continue
            costs, floor = self._of_pieces(tokens, threads, decode_ns)
            found |= costs
            if tokens not in usual and floor >= min(found.values()):
                break
        return found

    def is_usual(self, tokens: int) -> bool:
        """True for sizes of pieces that people use, and for those that the CPU computes where others are copied."""
        few = self.first.gpu and tokens < self.bench.engine.prompt.copies_from_tokens.value
        return few or tokens in (*USUAL_PIECES, self.space.piece_tokens[0])

    def _alike(self, tokens: int) -> tuple[int, ...]:
        """The size, and that of as many pieces of one size: copies ahead hide best behind pieces that take as long, and
        where a disk is read, smaller buffers on the host leave it more memory."""
        prompt, ahead = self.bench.question.fit.prompt_tokens, self.bench.engine.prompt.experts.value == "copied ahead"
        alike = -(-prompt // -(-prompt // tokens))
        return (tokens, alike) if (ahead or self._reads_disk) and alike in self.space.piece_tokens else (tokens,)

    def _largest(self) -> Iterator[int]:
        """Yield the largest size of pieces, and each with which there is room for more experts on the GPU."""
        sizes = sorted(self.space.piece_tokens)

        def place(number: int) -> float:
            return inf if (known := self._place(sizes[number])) is None else known

        number = len(sizes) - 1
        while number >= 0:
            yield sizes[number]
            number = bisect_left(range(number), place(number), key=place) - 1

    def _place(self, tokens: int) -> int | None:
        """Number of the first split with room; None for no room."""
        if tokens not in self._places:
            try:
                self._places[tokens] = self._splitter(tokens).best_number
            except FitError:
                self._places[tokens] = None
        return self._places[tokens]

    def _splitter(self, tokens: int) -> Splitter:
        return self._with_pieces(tokens).splitter

    def _with_pieces(self, tokens: int) -> EngineSpeed:
        return self.bench.speed(self.first._replace(piece_tokens=tokens))

    def _of_pieces(
        self, tokens: int, threads: int, decode_ns: Sequence[Times]
    ) -> tuple[dict[Setting, float], float]:
        """Times with pieces of one size, and the least that there may be with smaller ones."""
        first, least = self._place(tokens) or 0, self._place(min(self.space.piece_tokens)) or 0
        splitter, found, floor = self._splitter(tokens), {}, inf
        for pinned, prompt in self._prompts_with(tokens, threads):
            parts = decode_ns, prompt.parts(*self._splits)
            waits = self._with_pieces(tokens).disk_ns(self._splits[0], parts[1][-1], threads)
            costs = self.bench.compared_ms(*([*times, wait] for times, wait in zip(parts, waits, strict=True)))
            number = self._best_with_room(splitter, costs, first)
            layers = None if number == first else splitter.splits[number].cpu_layers
            setting = self.first._replace(piece_tokens=tokens, threads=threads, host_layers=layers, pinned=pinned)
            found[setting], floor = float(costs[number]), min(floor, float(costs[least:].min()))
        return found, floor

    def _prompts_with(self, tokens: int, threads: int) -> Iterator[tuple[bool, PromptCosts]]:
        """The prompt in pieces of one size, with the file mapped, and with it in pinned memory."""
        speed = self._speed
        asked, split = (speed.shape, speed.hardware), self._split(threads, tokens)
        mapped = self._mapped(tokens, split)
        yield False, mapped
        if self.first.gpu and True in self.space.pinned:
            yield True, mapped.with_experts(*asked, self.bench.reading(pinned=True), split)

    def _mapped(self, tokens: int, split: StaticSplit) -> PromptCosts:
        """The prompt in pieces of one size; next to a GPU, threads compute experts alone."""
        speed, prompt_tokens = self._speed, self.bench.question.fit.prompt_tokens
        asked = speed.shape, speed.hardware, speed.engine, split
        if speed.hardware.cpu_only or tokens not in self._prompts:
            self._prompts[tokens] = PromptCosts.of(*asked, prompt_tokens)
            return self._prompts[tokens]
        return self._prompts[tokens].with_experts(*asked)

    def _best_with_room(self, splitter: Splitter, costs: Floats, first: int) -> int:
        """Number of the quickest split from the first one with room on."""
        others = range(first, len(costs)) if splitter.engine.splits == "layers" else (first, len(costs) - 1)
        quickest = sorted(others, key=lambda number: costs[number])
        return next(number for number in quickest if number == first or splitter.has_room(splitter.splits[number]))

    @cached_property
    def _splits(self) -> tuple[npt.NDArray[np.int64], Floats]:
        """The layers of each split on the host, and the share of their experts that the GPU has nevertheless."""
        splits = self._splitter(self.first.piece_tokens).splits
        experts = self._speed.shape.experts
        return np.array([one.cpu_layers for one in splits]), np.array([one.gpu_experts / experts for one in splits])

    @cached_property
    def _reads_disk(self) -> bool:
        return bool(self._speed.splitter.all_on_host.disk_bytes)

    @cached_property
    def _speed(self) -> EngineSpeed:
        return self.bench.speed(self.first)

    def _split(self, threads: int, tokens: int) -> StaticSplit:
        return replace(self._splitter(tokens).splits[0], threads=threads)

    def _decode(self, threads: int) -> list[Times]:
        """The parts of a token's time with each split."""
        speed = self._speed
        asked = speed.shape, speed.hardware, speed.engine, self._split(threads, self.first.piece_tokens)
        return mean_decode_costs(*asked, speed.decode_lengths, speed.question.batch).parts(*self._splits)


@dataclass(frozen=True)
class CardsPlacing(Placing):
    """Settings on several cards, whose division depends on the size of pieces, too."""

    def _decode(self, threads: int) -> list[Times]:
        return []  # depends on the division

    def _of_pieces(
        self, tokens: int, threads: int, decode_ns: Sequence[Times]
    ) -> tuple[dict[Setting, float], float]:
        first, least = self._place(tokens) or 0, self._place(min(self.space.piece_tokens)) or 0
        speed, found, floor = self._with_pieces(tokens), {}, inf
        splits, steps = speed.splitter.splits, step_parts(speed, threads)
        for pinned in self.space.pinned:
            costs = self._costs(speed, threads, pinned, steps)
            number = self._best_with_room(speed.splitter, costs, first)
            setting = self.first._replace(
                piece_tokens=tokens, threads=threads, host_layers=splits[number].cpu_layers, pinned=pinned,
                ts=splits[number].by_card, sm=splits[number].mode,
            )
            found[setting], floor = float(costs[number]), min(floor, float(costs[least:].min()))
        return found, floor

    def _costs(self, speed: EngineSpeed, threads: int, pinned: bool, decode_ns: Floats) -> Floats:
        """Times in ms that are compared, of all splits."""
        parts = decode_ns, prompt_parts(speed, self.bench.reading(pinned), threads)
        layers = np.array([split.cpu_layers for split in speed.splitter.splits])
        waits = speed.disk_ns(layers, parts[1][-1], threads)
        return self.bench.compared_ms(*([*times, wait] for times, wait in zip(parts, waits, strict=True)))


@dataclass(frozen=True)
class CachedPlacing:
    """The settings with a cache of experts, of one KV format, for some ``sizes`` of pieces."""

    bench: Workbench
    first: Setting
    sizes: Collection[int]
    curve: HitCurve

    def costs(self, threads: int) -> dict[Setting, float]:
        """The time in ms with so many threads and the best number of layers on the host, for each size of pieces."""
        speed, found = self.bench.speed(self.first), dict[Setting, float]()
        asked = speed.shape, speed.hardware, speed.engine
        split = replace(speed.splitter.splits[0], threads=threads)
        decode = mean_decode_costs(*asked, split, speed.decode_lengths, self.bench.question.fit.batch)
        for tokens, (prompt, layers, held) in self._prompts.items():
            prompt = prompt.with_experts(*asked, replace(split, piece_tokens=tokens))
            rates = self.curve.rates(held)
            costs = self.bench.compared_ms(decode.parts(layers, hit_rate=rates), prompt.parts(layers, held=held))
            best = int(costs.argmin())
            setting = self.first._replace(piece_tokens=tokens, threads=threads, host_layers=int(layers[best]))
            found[setting] = float(costs[best])
        return found

    @cached_property
    def _prompts(self) -> dict[int, tuple[PromptCosts, npt.NDArray[np.int64], Floats]]:
        """By size of pieces the prompt with any number of threads, and what ``_rooms`` gives."""
        speed, prompts = self.bench.speed(self.first), {}
        for tokens in sorted(self.sizes):
            layers, held = self._rooms(tokens)
            if len(layers):
                split = replace(speed.splitter.splits[0], piece_tokens=tokens)
                asked = speed.shape, speed.hardware, speed.engine, split
                prompts[tokens] = PromptCosts.of(*asked, self.bench.question.fit.prompt_tokens), layers, held
        return prompts

    def _rooms(self, tokens: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """Numbers of layers on the host with room for a cache, and the share of their experts that it holds."""
        splitter = self.bench.speed(self.first._replace(piece_tokens=tokens)).splitter
        rooms = {
            split.cpu_layers: cache_share(splitter.memory(split), splitter.shape)
            for split in splitter.splits[1:] if splitter.has_room(split)
        }
        held = {layers: share for layers, share in rooms.items() if share}
        return np.array([*held], np.int64), np.array([*held.values()], np.float64)
