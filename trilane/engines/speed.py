"""The answer for an engine that people run: its split, speeds, what they are made of, what better parts would give, and
what a prompt in larger pieces would, where experts are copied less often and fewer have room on the GPU.

All of it is in closed form (``trilane.engines.split_speed``), on times that were fitted to measured speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from sim.costs.engine import FittedEngine
from sim.machine.assembly import NO_GPU
from sim.machine.disks import disk
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.units import GIB
from trilane.engines.accuracy.errors import ErrorToExpect, Regime, error_to_expect, regime_of
from trilane.engines.cards_splitter import CardsSplitter
from trilane.engines.command_line import command_words, cpu_layers_of
from trilane.engines.disk import DiskReads
from trilane.engines.gains import (
    BETTER,
    CPU_CORES,
    CPU_READS,
    DISK,
    HOST_MEMORY,
    PARTS,
    Gain,
    better_numbers,
    limiting_part,
    ranked,
    reads_all_it_can,
)
from trilane.engines.memory import SplitMemory, Splitter, host_memory_of
from trilane.engines.parallel import takes_cards, together
from trilane.engines.parallel_memory import ParallelSplitter, ParallelVllmSplitter
from trilane.engines.question import FitError, Question, check_engine, check_setting, engine_of
from trilane.engines.row_table import TableReads, table_reads
from trilane.engines.split_modes import PROPORTIONS
from trilane.engines.split_speed import (
    DecodeTime,
    Layers,
    PromptCosts,
    PromptTime,
    Rates,
    StaticSplit,
    Times,
    mean_decode_time,
    prompt_time,
)
from trilane.engines.vllm_memory import VllmSplitter

_ON_GPU = ("GPU memory", "GPU bandwidth", "GPU compute", "PCIe")
_SCALED: Mapping[str, tuple[str, tuple[str, ...]]] = {  # owner, and keys of the machine
    **{part.name: (part.owner, part.keys) for part in PARTS if part.name in (*_ON_GPU, "DRAM", CPU_READS)},
    "GPU compute": ("the GPU's arithmetic", ("gpu.flops_per_s", "gpu.integer_ops_per_s")),
    CPU_CORES.name: (CPU_CORES.owner, CPU_CORES.keys),
}
PIECES = (1024, 2048, 4096)  # prompt tokens at once that people choose
SOONER = 0.1  # of the time to the first token: less is not worth telling
_BACK_END = {"amd": "ROCm", "intel": "SYCL", "apple": "Metal"}  # others': CUDA
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class EngineGain(Gain):
    """``ttft``: what the same part gives at the first token, old over new, minus 1."""

    ttft: float


@dataclass(frozen=True)
class EngineSpeed:
    """A question on a machine with an engine; ``named``: as ``Splitter`` has it. All but ``splitter`` and ``has_room``
    raise FitError without room."""

    question: Question
    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    named: bool = False

    @classmethod
    def asked(cls, question: Question, shape: ModelShape, hardware: Hardware) -> EngineSpeed:
        """The question of a user, who may have named a split."""
        named = question.n_cpu_moe is not None or question.ts is not None
        return cls(question, shape, hardware, engine_of(question, hardware), named)

    @cached_property
    def splitter(self) -> Splitter:
        """The splits that there are."""
        alone, vllm = not self.hardware.further, self.engine.dialect == "vllm-serve"
        kind: type[Splitter] = CardsSplitter
        if alone or takes_cards(self.engine):
            kinds = (Splitter, VllmSplitter) if alone else (ParallelSplitter, ParallelVllmSplitter)
            kind = kinds[vllm]
        return kind(self.question, self.shape, self.hardware, self.engine, self.named)

    @cached_property
    def split(self) -> StaticSplit:
        """The one that is used; of divisions over several cards the quickest for the whole answer."""
        best = self.splitter.best()
        alike = self.splitter.alike(best) if isinstance(self.splitter, CardsSplitter) else []
        return min(alike, key=self._answer_with) if len(alike) > 1 else best

    def _answer_with(self, split: StaticSplit) -> int:
        prompt, decode = self._prompts(split, None), self.decode_with(split)
        return prompt.total_ns + (self.question.generated - 1) * decode.total_ns

    @property
    def measured(self) -> bool:
        """True if times are those of kernels that were measured on one machine, whatever parts are named."""
        return self.engine.measured_on(self.hardware)

    @property
    def has_room(self) -> bool:
        """True if there is a split with room for the model, the context and what is computed."""
        try:
            return bool(self.split)
        except FitError:
            return False

    @cached_property
    def decode(self) -> DecodeTime:
        """A step with a token of each sequence, in the mean over the answer."""
        return self.decode_with(self.split)

    def decode_with(self, split: StaticSplit) -> DecodeTime:
        """Mean time of such a step with another split."""
        asked = self.shape, self.hardware, self.engine, split
        time = mean_decode_time(*asked, self.decode_lengths, self.question.batch)
        return replace(time, disk_ns=round(float(self.disk_ns(split.cpu_layers, 0, split.threads)[0])))

    @property
    def decode_lengths(self) -> range:
        """Tokens in the KV cache of a sequence after each step of its answer."""
        first = self.question.prompt_tokens + 1
        return range(first, max(first + self.question.generated - 1, first + 1))

    @property
    def middle_tokens(self) -> int:
        """Tokens in the KV cache of a sequence in the middle of its answer."""
        return self.question.prompt_tokens + self.question.generated // 2

    @cached_property
    def prompt(self) -> PromptTime:
        """All of the prompts, one after another."""
        return self._prompts(self.split, self._prompt_costs)

    def prompt_with(self, split: StaticSplit) -> PromptTime:
        """Prompts with a split whose pieces have the same size; next to a GPU, its threads compute experts alone."""
        known = None if self.hardware.cpu_only else self._prompt_costs
        return self._prompts(split, known and known.with_experts(self.shape, self.hardware, self.engine, split))

    def _prompts(self, split: StaticSplit, costs: PromptCosts | None) -> PromptTime:
        asked = self.shape, self.hardware, self.engine, split, self.question.prompt_tokens
        one = prompt_time(*asked, costs=costs)
        one = replace(one, disk_ns=round(float(self.disk_ns(split.cpu_layers, one.copies_ns, split.threads)[1])))
        return PromptTime(*(self.question.batch * ns for ns in vars(one).values()))

    @cached_property
    def _prompt_costs(self) -> PromptCosts:
        return PromptCosts.of(self.shape, self.hardware, self.engine, self.split, self.question.prompt_tokens)

    def disk_ns(self, layers: Layers, copies_ns: Times, threads: int | None) -> tuple[Rates, Rates]:
        """Times for which a step and a prompt wait for a disk, with the experts of the first ``layers`` on the host; 0
        where its memory has room for them. ``copies_ns``: of the prompt's copies to the GPU; ``threads``: None is one a
        fast core."""
        reads, question = self._disk_reads, self.question
        if reads is None:
            return 0.0, 0.0
        host = self.shape.moe_layers if self.hardware.cpu_only else layers
        computed = self.hardware.cpu_only or self.engine.prompt.experts.value == "computed"
        prompt = question.prompt_tokens, min(self.splitter.piece_tokens, question.prompt_tokens)
        copied, faults = None if computed else copies_ns, threads or self.hardware.cpu.fast_cores
        return reads.decode_ns(host, faults, question.batch), reads.prompt_ns(host, faults, *prompt, copied)

    @cached_property
    def _disk_reads(self) -> DiskReads | None:
        """None where the host's memory has room for all experts."""
        memory, question = self.splitter.all_on_host, self.question
        if not memory.disk_bytes:
            return None
        held = (memory.experts_bytes if memory.one_memory else memory.host_bytes) - memory.disk_bytes
        return DiskReads(self.shape, disk(str(question.disk)), held, question)

    @property
    def answer_ns(self) -> int:
        """Until the last token."""
        return self.prompt.total_ns + (self.question.generated - 1) * self.decode.total_ns

    def error_to_expect(self, regime: Regime) -> ErrorToExpect | None:
        """The error of decode speeds that others measured; None where none of such were."""
        on_disk = self.splitter.memory(self.split).disk_bytes
        if self.question.batch > 1 or self.measured or on_disk or self.hardware.further or self.engine.by_name:
            return None
        return error_to_expect(self.shape, self.hardware, regime, self.engine)

    @property
    def words(self) -> list[str]:
        """The command line.

        Where the CPU computes everything, llama.cpp would copy the weights in its own order of rows, for which there is
        no room next to a file that is mapped (ggml-org/llama.cpp issue 23603).
        """
        words = command_words(self.question, self.shape, self.engine, self.split, self.hardware)
        memory, llama = self.splitter.memory(self.split), self.engine.dialect == "llama"
        words += ["--no-repack"] if llama and self.hardware.cpu_only and memory.disk_bytes else []
        loads_all = self.hardware.gpu.kind == "unified" and self.table is not None and self.table.on_disk_bytes > 0
        return [*words, "-lzm on"] if llama and loads_all else words

    def parts_ms(self, time: DecodeTime | PromptTime) -> dict[str, float]:
        """Parts of a time by the names of ``DecodeTime`` and ``PromptTime``. Of cards that work at the same time, what
        is handed over are sums; others have those of prompts, and where all work on each layer, all."""
        names = (name for name, ns in vars(time).items() if ns or name != "disk_ns")
        parts = {name.removesuffix("_ns"): getattr(time, name) / _NS_PER_MS for name in names}
        if self.hardware.cpu_only:  # where there is no GPU, the CPU takes its place
            parts["cpu_experts"] += parts.pop("gpu_experts")
        in_parts = self.split.mode in PROPORTIONS
        if in_parts and "handing_over" in parts:
            parts["sums"] = parts.pop("handing_over")
        elif in_parts or together(self.engine, self.hardware):
            parts["others_and_sums"] = parts.pop("others")
        return parts

    @property
    def table(self) -> TableReads | None:
        """The model's table of rows; None without one, and of engines that load all weights."""
        memory = self.splitter.memory(self.split)
        return table_reads(self.shape, memory, self.question.disk) if self.engine.maps_files else None

    @property
    def without_device(self) -> tuple[str, ...]:
        """Words of a command line on which the CPU computes everything next to a GPU."""
        own = self.question.gpu == NO_GPU or not self.hardware.cpu_only
        return () if own or "no_device" not in self.engine.options else ("-dev none",)

    def gains(self) -> Iterator[EngineGain]:
        """From each part of the machine 25 % better, with the split that it then has; none where times are measured.

        More cores than are useful stay idle, rather than make the others wait.
        """
        if self.measured:
            return
        at_ceiling = reads_all_it_can(self.hardware)
        for part, (owner, keys) in _SCALED.items():
            if (self.hardware.cpu_only and part in _ON_GPU) or (part == CPU_READS and not at_ceiling):
                continue
            gains = self._gains_of(self._with(keys))
            yield EngineGain(part, owner, *(max(gain, 0.0) if part == CPU_CORES.name else gain for gain in gains))
        if self.decode.disk_ns:
            yield EngineGain(HOST_MEMORY.name, HOST_MEMORY.owner, *self._gains_of(self._with_host_memory))
            yield EngineGain(DISK.name, DISK.owner, *(_quicker_disk(time) for time in (self.decode, self.prompt)))

    def _gains_of(self, better: EngineSpeed) -> tuple[float, float]:
        """Gains of other speeds in decoding and in prompts."""
        return self.decode.total_ns / better.decode.total_ns - 1, self.prompt.total_ns / better.prompt.total_ns - 1

    @property
    def _with_host_memory(self) -> EngineSpeed:
        """Return the speeds with 25 % more memory of the host, which is known."""
        if self.hardware.cpu_only:
            return self._with(("gpu.memory_bytes",))
        more = round((host_memory_of(self.question, self.hardware) or 0) * BETTER / GIB)
        return replace(self, question=replace(self.question, ram_gb=more))

    def _with(self, keys: tuple[str, ...]) -> EngineSpeed:
        """Return the speeds with some numbers of the machine 25 % better."""
        threads = self.question.threads
        more = round(threads * BETTER) if threads and "cpu.cores" in keys else threads
        hardware = self.hardware.on_cards(lambda card: card.with_numbers(better_numbers(card, _known(card, keys))))
        return replace(self, hardware=hardware, question=replace(self.question, threads=more))


def _known(hardware: Hardware, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if key in hardware.flat()]


def _quicker_disk(time: DecodeTime | PromptTime) -> float:
    """Gain of a disk that is ``BETTER`` times as fast."""
    saved_ns = time.disk_ns * (1 - 1 / BETTER)
    return time.total_ns / (time.total_ns - saved_ns) - 1


@dataclass(frozen=True)
class LargerPieces:
    """The arguments that change, and the times then, in ms."""

    arguments: str
    ttft_ms: float
    tpot_ms: float


def larger_pieces(speed: EngineSpeed) -> LargerPieces | None:
    """Piece size with which the answer ends soonest; None where the question names it, and where the first token would
    be no sooner by a tenth."""
    own, question = speed.splitter.piece_tokens, speed.question
    if question.ubatch is not None:
        return None
    sizes = [tokens for tokens in PIECES if own < tokens < 2 * question.prompt_tokens and own < question.prompt_tokens]
    others = [replace(speed, question=replace(question, ubatch=tokens)) for tokens in sizes]
    best = min((speed, *(other for other in others if other.has_room)), key=lambda choice: choice.answer_ns)
    if best.prompt.total_ns > (1 - SOONER) * speed.prompt.total_ns:
        return None
    changed = [word for word in best.words if word not in speed.words]
    return LargerPieces(" ".join(changed), best.prompt.total_ns / 1e6, best.decode.total_ns / 1e6)


@dataclass(frozen=True)
class EngineAnswer:
    """Times in ms; parts of a time by name. Decode times are the mean over the answer."""

    engine: str
    about: str
    command: str
    cpu_layers: int  # N of --n-cpu-moe: layers, from the first on, whose experts the CPU computes
    layers: int  # up to the last one with experts
    gpu_experts: int  # of each of those layers that the GPU has nevertheless
    cpu_only: bool  # the machine has no GPU
    memory: SplitMemory
    tpot_ms: float
    decode_ms: Mapping[str, float]
    ttft_ms: float
    prompt_ms: Mapping[str, float]
    piece_tokens: int
    pieces: int
    larger_pieces: LargerPieces | None  # None: they give little
    gains: tuple[EngineGain, ...]
    limit: str | None  # the part that limits decoding; None: no part by itself, or not known
    regime: Regime
    error: ErrorToExpect | None  # of decode speeds that others measured; None: of batches, and of measured times
    table: TableReads | None  # of which each token reads some rows; None: the model has none
    measured: bool  # times are those of kernels that were measured on one machine


def engine_answer(question: Question, shape: ModelShape, hardware: Hardware) -> EngineAnswer:
    """Raises FitError for what the engine has no room for, does not run on or does not read."""
    speed = EngineSpeed.asked(question, shape, hardware)
    check_setting(question, speed.engine, hardware)
    check_engine(speed.engine, shape, hardware)
    speed = where_it_fits(speed)
    hardware = speed.hardware
    split, gains = speed.split, ranked(speed.gains())
    regime = regime_of(shape, hardware, speed.engine, split)
    piece = min(speed.splitter.piece_tokens, question.prompt_tokens)
    return EngineAnswer(
        engine=speed.engine.name,
        about=engine_about(speed.engine, hardware),
        command=" ".join([*speed.words, *speed.without_device]),
        cpu_layers=cpu_layers_of(shape, split.cpu_layers),
        layers=shape.expert_blocks[-1] + 1,
        gpu_experts=split.gpu_experts,
        cpu_only=hardware.cpu_only,
        memory=speed.splitter.memory(split),
        tpot_ms=speed.decode.total_ns / _NS_PER_MS,
        decode_ms=speed.parts_ms(speed.decode),
        ttft_ms=speed.prompt.total_ns / _NS_PER_MS,
        prompt_ms=speed.parts_ms(speed.prompt),
        piece_tokens=piece,
        pieces=question.batch * -(-question.prompt_tokens // piece),
        larger_pieces=larger_pieces(speed),
        gains=gains,
        limit=limiting_part(gains),
        regime=regime,
        error=speed.error_to_expect(regime),
        table=speed.table,
        measured=speed.measured,
    )


def where_it_fits(speed: EngineSpeed) -> EngineSpeed:
    """Speeds of a machine, or of its CPU alone where a system keeps so much of one memory from the GPU that only the
    CPU has room, as macOS does."""
    hardware = speed.hardware
    if hardware.gpu.kind != "unified" or "no_device" not in speed.engine.options or speed.has_room:
        return speed
    alone = replace(speed, hardware=hardware.without_gpu(host_memory_of(speed.question, hardware)))
    return alone if alone.has_room else speed


def engine_about(engine: FittedEngine, hardware: Hardware) -> str:
    """The engine, and what it runs on."""
    if hardware.cpu_only:
        return f"{engine.about}, the CPU alone"
    if engine.back_end is not None:  # the text names it
        return engine.about
    return f"{engine.about}, {_BACK_END.get(hardware.gpu.vendor or '', 'CUDA')}"
