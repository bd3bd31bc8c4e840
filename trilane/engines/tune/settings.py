"""The question of ``trilane tune``, which command line is best for this model on that machine, and the settings of an
engine to choose from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, get_args

from sim.costs.engine import FittedEngine
from sim.costs.software import SplitMode
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.hints import Share, between
from trilane.common.quoting import quoted
from trilane.common.schema import check
from trilane.common.units import GB
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.layer_split import ByCard
from trilane.engines.question import KV_BITS, FitError, KvFormat, Question
from trilane.engines.speed import EngineSpeed

Goal = Literal["decode", "prompt", "both"]
GOALS: tuple[Goal, ...] = get_args(Goal)
KV_FORMATS: tuple[KvFormat, ...] = ("f16", "q8_0")  # that are tried unless the question names others
USUAL_PIECES = (256, 512, 1024, 2048, 4096, 8192)  # prompt tokens at once that people choose
_THREAD_SHARES = (1.0, 0.75, 0.5)  # of the cores, with kernels that were measured: others are fastest with all
WORTH_SETTING = 0.01  # of the time that is compared: settings as near to the best one are as good
WORTH_FEWER_BITS = 0.05  # of it: a KV cache of fewer bits changes what the model writes
WORTH_CACHING = 0.1  # a cache of experts is experimental, and its costs are estimates; losses: docs/tune.md
KV_BLOCK = 32  # elements that share a scale in a quantised KV cache (ggml)


@dataclass(frozen=True)
class TuneQuestion:
    """A question of ``trilane fit``, and what is asked of the settings that it leaves open.

    ``fit``: model, machine and engine; a prompt and an answer, by whose times settings are compared; the window for
    which the KV cache has room. ``goal``: the least time per token ("decode"), until the first token ("prompt"), or
    until the last one ("both"). ``kv``: formats of the KV cache to choose from, in any order (kept as
    most bits first: the engine itself takes f16). ``keep_free_gb``: of the GPU's memory
    (of all memory where there is no GPU), in GB. ``draft_acceptance``: the share of drafts of the model's own layers
    that are accepted behind accepted ones; None: a range that was published.
    """

    fit: Question
    goal: Goal = "both"
    kv: tuple[KvFormat, ...] = KV_FORMATS
    keep_free_gb: Annotated[float, between(0, 1e5)] = 0.0
    draft_acceptance: Share | None = None

    def __post_init__(self) -> None:
        check(self, FitError)
        object.__setattr__(self, "kv", tuple(sorted({*self.kv}, key=lambda kv: -KV_BITS[kv])))
        if not self.kv:
            raise FitError(f"tune: kv: expected at least one format of the KV cache, of {', '.join(KV_BITS)}")

    @property
    def hardware(self) -> Hardware:
        """The machine without the memory that is kept free. Raises HardwareError, and FitError for a profile."""
        hardware = self.fit.load_machine()
        if hardware.measured:
            raise FitError(
                f"tune: {quoted(hardware.name)} is a profile of one engine's times, which have no settings: expected "
                f"parts or a preset"
            )
        reserve = hardware.gpu.reserve_bytes + round(self.keep_free_gb * GB)
        return hardware.with_numbers({"gpu.reserve_bytes": reserve})

    def shape_with(self, kv: KvFormat) -> ModelShape:
        return replace(self.fit, kv=kv).model_shape


class Setting(NamedTuple):
    """One choice of everything. ``host_layers``: MoE layers whose experts the host keeps; None: as few as the memory
    takes. ``cached``: all memory that is left is a cache of these experts. ``pinned``: the file is read into pinned
    memory rather than mapped. ``gpu``: False for the CPU alone, next to a GPU."""

    kv: KvFormat
    piece_tokens: int
    threads: int
    host_layers: int | None = None
    cached: bool = False
    pinned: bool = False
    gpu: bool = True
    ts: ByCard | None = None  # blocks of each of several cards, or proportions
    sm: SplitMode | None = None  # how these divide the model

    def question(self, question: Question, shape: ModelShape) -> Question:
        blocks = None if self.host_layers is None else cpu_layers_of(shape, self.host_layers)
        named = replace(question, kv=self.kv, ubatch=self.piece_tokens, threads=self.threads)
        return replace(named, n_cpu_moe=blocks, ts=self.ts, sm=self.sm)


@dataclass(frozen=True)
class SettingSpace:
    """Values that each part of a setting may have; the first of each is the engine's own.

    ``fewer_threads``: other numbers of threads may be chosen, too."""

    kv: tuple[KvFormat, ...]
    piece_tokens: tuple[int, ...]
    threads: tuple[int, ...]
    fewer_threads: bool
    pinned: tuple[bool, ...]
    gpu: tuple[bool, ...]
    cached: bool  # the engine has a cache of experts

    @property
    def usual(self) -> Setting:
        """Setting that the engine has by itself."""
        return Setting(self.kv[0], self.piece_tokens[0], self.threads[0])

    def count(self, layers: int) -> int:
        """Settings in all, with none to all of so many layers on the host."""
        splits = (layers + 1) * len(self.pinned) + len(self.gpu) - 1
        return len(self.kv) * len(self.piece_tokens) * len(self.threads) * splits

    def changes(self, setting: Setting) -> tuple[int, bool]:
        """A key by which settings come first that are nearer to the engine's own, then those that people use."""
        own, usual = self.usual, setting.piece_tokens in (*USUAL_PIECES, self.piece_tokens[0])
        parts = (setting.piece_tokens != own.piece_tokens, setting.threads != own.threads, setting.pinned)
        return sum((*parts, not setting.gpu, setting.sm not in (None, "layer"))), not usual


def choices(question: TuneQuestion, shape: ModelShape, hardware: Hardware, engine: FittedEngine) -> SettingSpace:
    """Choices of an engine. What the question fixes is not chosen."""
    fit, in_16_bits = question.fit, engine.splits == "experts" or engine.dialect == "vllm-serve"
    in_memory = not EngineSpeed(fit, shape, hardware, engine).splitter.all_on_host.disk_bytes
    return SettingSpace(
        kv=("f16",) if in_16_bits else _kv(question, shape, measured=engine.measured_on(hardware)),
        piece_tokens=_pieces(fit, engine, copied=not hardware.cpu_only),
        threads=(fit.threads,) if fit.threads else _threads(hardware, engine),
        fewer_threads=fit.threads is None and not engine.measured_on(hardware),
        pinned=(False, True) if in_memory and may_be_pinned(hardware, engine) and fit.system != "windows" else (False,),
        gpu=(True, False) if _may_be_alone(hardware, engine) else (True,),
        cached=in_memory and _may_cache(hardware, engine),
    )


def _kv(question: TuneQuestion, shape: ModelShape, *, measured: bool) -> tuple[KvFormat, ...]:
    """Formats that a head's keys and values can have. Raises FitError if none is left.

    ``measured``: by an engine's file with measured kernels, which knows the times of 16 bits alone.
    """
    formats = tuple(kv for kv in question.kv if KV_BITS[kv] == 16 or (shape.head_dim % KV_BLOCK == 0 and not measured))
    if not formats and measured:
        raise FitError(f"tune: kv: expected f16, with which the engine was measured, got {', '.join(question.kv)}")
    if not formats:
        raise FitError(f"tune: kv: expected f16 for heads of {shape.head_dim}, others take whole blocks of {KV_BLOCK}")
    return formats


def _pieces(question: Question, engine: FittedEngine, *, copied: bool) -> tuple[int, ...]:
    """The engine's own first. Of all sizes with which a prompt has as many pieces the smallest needs the least memory;
    of those that the CPU computes, where others are copied, the largest is quickest."""
    if question.ubatch:
        return (question.ubatch,)
    tokens, prompt = question.prompt_tokens, engine.prompt
    most = prompt.most_piece_tokens.value if prompt.most_piece_tokens else tokens
    copied_from = prompt.copies_from_tokens.value
    counts = range(1, -(-tokens // copied_from) + 1)
    sizes = {*(-(-tokens // count) for count in counts), *(usual for usual in USUAL_PIECES if usual < 2 * tokens)}
    sizes |= {min(copied_from - 1, tokens)} if copied and copied_from > 1 else set()
    own = prompt.piece_tokens.value
    return (own, *sorted({size for size in sizes if size <= most} - {own}))


def _threads(hardware: Hardware, engine: FittedEngine) -> tuple[int, ...]:
    """One a fast core first, and one a core."""
    cpu, shares = hardware.cpu, _THREAD_SHARES[1:] if engine.measured_on(hardware) else ()
    return tuple(dict.fromkeys([cpu.fast_cores, cpu.cores, *(max(round(share * cpu.cores), 1) for share in shares)]))


def may_be_pinned(hardware: Hardware, engine: FittedEngine) -> bool:
    """True if prompts copy experts out of a mapped file, in an engine of today that can read it instead.

    On Windows what is pinned and what the GPU holds must together stay below the card's memory (24 GB measured on an
    RTX 3090, ashalliants/ninfer-3090 PR 45): experts that have no room on the GPU cannot be pinned.
    """
    prompt = engine.prompt
    copied = prompt.experts.value == "copied" and prompt.copies.value == "pageable"
    return copied and not hardware.one_memory and "whole_files" in engine.options and not engine.measured_on(hardware)


def _may_be_alone(hardware: Hardware, engine: FittedEngine) -> bool:
    """True if the CPU may compute everything next to a GPU, which has less memory, or of one memory a part."""
    without = {"no_device", "hidden_device"} & {*engine.options}
    return not hardware.cpu_only and bool(without) and not engine.measured


def _may_cache(hardware: Hardware, engine: FittedEngine) -> bool:
    one_card = not (hardware.one_memory or hardware.further)
    return one_card and "expert_cache" in engine.options and not engine.measured_on(hardware)
