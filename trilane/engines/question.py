"""The question of ``trilane fit``: what will this model do on that machine, and with which engine?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeGuard

from sim.costs.engine import FittedEngine, InferenceEngine, engine_names, load_engine
from sim.costs.software import SplitMode
from sim.machine.assembly import NO_GPU, assembled_name
from sim.machine.cards import cards_in, load_machine, machine_name
from sim.machine.disks import disk
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import UnifiedPart, Vendor, is_unified, part, rules
from traces.models.catalogue import load_model, model_named
from traces.models.names import parted
from traces.models.quantisation import format_named, quantisation_files, quantisations_of
from traces.models.shape import ModelShape
from trilane.common.computer import System
from trilane.common.errors import TrilaneError
from trilane.common.hints import Count, Name, at_least
from trilane.common.quoting import quoted
from trilane.common.schema import check
from trilane.common.units import GIB
from trilane.engines.layer_split import blocks_of, splits_cards
from trilane.engines.parallel import divides_heads, takes_cards
from trilane.engines.split_modes import PROPORTIONS, why_not

USUAL_WEIGHTS = "q4_k_m"
_NO_GGUF = "awq"  # in place of that, in engines that read no GGUF files
KvFormat = Literal["f16", "q8_0", "q4_0"]
KV_BITS: Mapping[KvFormat, float] = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # ggml: 32 share a 16-bit scale
_PARTS = ("gpu", "ram", "cpu", "cores", "channels", "sockets", "pcie")
PROMPT_ROWS = 256  # prompt tokens that are routed one by one at most, all sequences together
_STEPS = ((8, 24), (2, 32), (1, 56))  # from this batch on, the most decode steps that are played
_USUAL_LAYERS, _FEWEST_STEPS = 48, 20
USUAL_ENGINE = "llama.cpp"
USUAL_POLICIES = "usual"  # in place of the names of some policies
_OF_VENDOR = {"amd": "llama.cpp-vulkan", "intel": "llama.cpp-vulkan", "apple": "llama.cpp-metal"}
_OF_ANY_VENDOR = "llama.cpp-vulkan"  # of cards of several
_UNSTATED: Vendor = "nvidia"  # of cards that state no vendor
_THREADS_A_CORE = 2
_TITLES: dict[Vendor, str] = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple"}


class FitError(TrilaneError):
    """A question without an answer: it is incomplete, or its model cannot run; the message says by how many GB."""


class WiredLimit(NamedTuple):
    """Unified memory, the part of it that macOS gives the GPU, and ``iogpu.wired_limit_mb`` (MiB) with which only the
    system's own is left."""

    memory_bytes: int
    gpu_bytes: int
    raised_mib: int

    @property
    def command(self) -> str:
        """The line that raises the limit, until the next start."""
        return f"sudo sysctl iogpu.wired_limit_mb={self.raised_mib}"


@dataclass(frozen=True)
class Question:
    """A model, a machine, and lengths.

    The machine is made of parts (``gpu``, ``ram``, and ``cpu`` or ``cores``), or a preset or profile (``machine``).
    ``gpu`` "none" is a machine whose CPU computes everything; one with unified memory (gb10) has its own ``ram``.
    ``weights``: a quantisation; None: q4_k_m, or the format of a model that is published in fewer than 16 bits, or the
    model's own weights where the machine is a profile, which was measured with these.
    ``prompt_tokens`` and ``generated``, tokens of the answer, are those of each of ``batch`` sequences. ``ram_gb``: all
    memory of the host in GiB; None: enough. ``trace``, and ``calibration``, a trace of other prompts; None: see
    ``engines.routing``. ``policies``: those to choose from, "usual" among them standing for
    ``fit.prepared_question.DEFAULT_CANDIDATES``; None: no policy is simulated where an engine has an answer.
    ``policy_engine``: on which policies are played (``sim.costs.engine``); a profile has the one that was measured.
    ``engine``: the one that people run; None: llama.cpp, for cards of AMD and Intel its Vulkan build. Of it are
    ``threads`` (None: one a core), ``n_cpu_moe``, layers whose experts are on the CPU (None: the fewest that the memory
    takes), and ``ubatch``, prompt tokens computed at once (None: the engine's own).
    ``kv``: format of the KV cache, of policies too; None: f16. ``window``: tokens of a sequence for which the KV cache
    has room at least; None: those of prompt and answer. ``system``: the operating system, which may limit what the GPU
    takes of the memory and what can be pinned; None: macOS on Apple's chips, else not known, no limit. ``disk``: a kind
    of disk, or its GB/s, from which experts are read that the host's memory has no room for; None: they must have room.
    ``gpu`` may be several cards (``sim.machine.cards``); ``sm``: how they divide the model, None: chosen; ``ts``:
    blocks of each, the quickest first, with the output layer, or of a mode in which each has a part of every layer,
    proportions, None: chosen.
    """

    model: str
    gpu: str | None = None
    ram: str | None = None
    cpu: str | None = None
    cores: Count | None = None
    channels: Count | None = None
    sockets: Count | None = None
    pcie: str | None = None
    machine: str | None = None
    ram_gb: Count | None = None
    weights: str | None = None
    prompt_tokens: Count = 4096
    generated: Count = 256
    batch: Count = 1
    trace: str | None = None
    calibration: str | None = None
    policies: tuple[str, ...] | None = None
    policy_engine: Name = "graphs"
    engine: Name | None = None
    threads: Count | None = None
    kv: KvFormat | None = None
    n_cpu_moe: Annotated[int, at_least(0)] | None = None
    ubatch: Count | None = None
    window: Count | None = None
    system: System | None = None
    disk: Name | None = None
    ts: tuple[Annotated[int, at_least(0)], ...] | None = None
    sm: SplitMode | None = None

    def __post_init__(self) -> None:
        if self.policies is not None:
            object.__setattr__(self, "policies", tuple(self.policies))
        if self.ts is not None:
            object.__setattr__(self, "ts", tuple(self.ts))
        check(self, FitError)
        object.__setattr__(self, "model", str(model_named(self.model).name))
        if parted(self.model).weights is not None and self.weights is not None:
            raise FitError(f"model {quoted(self.model)} with weights {quoted(self.weights)} names its weights twice")
        if self.weights is not None:
            object.__setattr__(self, "weights", format_named(self.weights))
        self._check_disk()
        for name, given in (("ts", self.ts and ",".join(map(str, self.ts))), ("sm", self.sm)):
            if given is not None and self.machine is None and len(cards_in(self.gpu or "")) < 2:
                raise FitError(f"{name} {given}: expected several GPUs with it, as --gpu 2x-rtx-3090")
        if self.machine is not None:
            parts = [name for name in _PARTS if getattr(self, name) is not None]
            if parts:
                raise FitError(f"expected a machine or its parts, got machine {quoted(self.machine)} and {_and(parts)}")
            return
        if self.gpu and not self.ram and self.gpu != NO_GPU and not self._unified:
            for card in cards_in(self.gpu):
                part("gpu", card)
        if not (self.gpu and (self.ram or self._unified)):
            raise FitError(
                "expected gpu and ram (such as --gpu rtx-4080 --ram ddr5-5600), or machine, a preset or a profile's "
                "file (--machine)"
            )

    def _check_disk(self) -> None:
        """Raises HardwareError for an unknown kind, FitError for one of a machine whose memory is not stated."""
        if self.disk is None:
            return
        disk(self.disk)
        if self.ram_gb is None and self.machine is None and not self._unified:
            raise FitError(
                f"disk {self.disk}: expected the size of the host's memory with it (ram_gb, --ram-gb): where none is "
                f"named there is room for all experts, and nothing is read"
            )

    @property
    def hardware(self) -> str:
        """The machine's name for ``load_hardware``. Raises HardwareError for an unknown part."""
        if self.machine is not None:
            return _sized(self.machine, self.ram_gb)
        if self.gpu and len(cards_in(self.gpu)) > 1:
            others = {"cpu": self.cpu, "cores": self.cores, "channels": self.channels, "sockets": self.sockets}
            return machine_name(self.gpu, self.ram, self.pcie, **others)
        return assembled_name(
            self.gpu or "", self.ram, self.cpu, cores=self.cores, channels=self.channels, pcie=self.pcie,
            sockets=self.sockets, ram_gib=self.ram_gb if self.gpu == NO_GPU or self._unified else None,
        )

    def load_machine(self) -> Hardware:
        """The machine, without the memory that its system keeps from the GPU. Raises HardwareError."""
        hardware = load_machine(self.hardware)
        share = self._gpu_share(hardware.gpu.memory_bytes)
        kept = 0 if share is None else round((1 - share) * hardware.gpu.memory_bytes)
        if kept <= hardware.gpu.reserve_bytes:
            return hardware
        return hardware.with_numbers({"gpu.reserve_bytes": kept})

    @property
    def wired_limit(self) -> WiredLimit | None:
        """The limit of macOS for the GPU; None on other systems, and where the memory is not unified."""
        if self.gpu is None or not self._unified or self._runs_on != "macos":
            return None
        hardware = load_hardware(self.hardware)
        memory = hardware.gpu.memory_bytes
        limit = round((self._gpu_share(memory) or 1) * memory)
        return WiredLimit(memory, limit, (memory - hardware.gpu.reserve_bytes) // GIB * 1024)

    def _gpu_share(self, memory_bytes: int) -> float | None:
        """Share of a unified memory that the system gives the GPU at most; None: no limit is known."""
        unified = part("gpu", self.gpu) if self.gpu and self._unified else None
        if not isinstance(unified, UnifiedPart):
            return None
        if self._runs_on == "macos":
            shares = rules().macos_shares
            return shares[max(gib for gib in shares if gib * GIB <= memory_bytes)].value
        windows = self._runs_on == "windows" and unified.windows_share
        return windows.value if windows else None

    @property
    def _runs_on(self) -> System | None:
        """The operating system; of Apple's chips macOS, unless another is named."""
        apple = self.gpu is not None and self._unified and part("gpu", self.gpu).vendor
        return self.system or ("macos" if apple and apple.value == "apple" else None)

    @property
    def shape(self) -> str:
        """The name of the model with its weights, for ``load_model``."""
        if self.weights is not None:
            return with_weights(self.model, self.weights)
        if parted(self.model).weights is not None or self.on_profile:
            return self.model
        formats = quantisations_of(load_model(self.model))
        if self.engine is not None and "gguf" not in (load_engine(self.engine).reads or ("gguf",)):
            return with_weights(self.model, _NO_GGUF) if _NO_GGUF in formats else self.model
        usual = USUAL_WEIGHTS if USUAL_WEIGHTS in formats else next(iter(formats), None)
        return with_weights(self.model, usual) if usual else self.model

    @property
    def model_shape(self) -> ModelShape:
        """The model with its weights and its KV cache."""
        return self.with_cache(load_model(self.shape))

    def with_cache(self, shape: ModelShape) -> ModelShape:
        """A model with the question's KV cache."""
        return shape if self.kv is None else _with_cache(shape, KV_BITS[self.kv])

    @property
    def tokens(self) -> int:
        """Tokens of a sequence for which the KV cache has room: at least prompt and answer."""
        return max(self.prompt_tokens + self.generated, self.window or 0)

    @property
    def most_steps(self) -> int:
        """Decode steps that are played at most (``sim.runs.sampling`` has the measured error)."""
        return most_steps(self.batch, load_model(self.shape).moe_layers)

    @property
    def _unified(self) -> bool:
        return is_unified(self.gpu)

    @property
    def on_profile(self) -> bool:
        """True if times are those of a measured profile."""
        return self.machine is not None and load_machine(self.machine).measured


def most_steps(batch: int, layers: int) -> int:
    """Fewer for larger batches, and for models of more layers than most have, in each of which more is to be done.

    Of seven questions (six policies each, batch 1), TPOT was off from that of all 256 steps by
    1.6 % in the mean and 6.7 % at most (56 steps), by 2.9 % and 14.8 % (36), and by 4.5 % and 30.6 % (20); the most
    where the cache is small. More layers do not make it less: whole tokens are alike or unlike.
    """
    of_batch = next(steps for sequences, steps in _STEPS if batch >= sequences)
    return max(int(of_batch * min(_USUAL_LAYERS / layers, 1) ** 2), _FEWEST_STEPS)


def _sized(machine: str, ram_gib: int | None) -> str:
    """Parts without a GPU, with so much memory, if they name none; other machines as they are."""
    first, *others = machine.split("+")
    sized = ram_gib is None or first != NO_GPU or any(word.endswith("gb") for word in others)
    return machine if sized else f"{machine}+{ram_gib}gb"


@lru_cache(maxsize=256)
def _with_cache(shape: ModelShape, bits: float) -> ModelShape:
    return replace(shape, kv_bits=bits)


def with_weights(model: str, weights: str) -> str:
    """The name of a model in a quantisation."""
    return str(parted(model)._replace(weights=weights))


def _and(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]


def engine_of(question: Question, hardware: Hardware) -> FittedEngine:
    """The engine that was asked for, or the usual one of the card. Raises FitError for one that was not fitted."""
    vendors = {card.gpu.vendor for card in hardware.cards}
    own = _OF_VENDOR.get(hardware.gpu.vendor or "", USUAL_ENGINE) if len(vendors) == 1 else _OF_ANY_VENDOR
    engine = load_engine(question.engine or own)
    if isinstance(engine, FittedEngine) and engine.window:
        raise FitError(f"engine {engine.name!r} has settings of its own: use `trilane tune --engine {engine.name}`")
    if not serves_users(engine):
        raise FitError(
            f"engine {engine.name!r} serves policies, which are played on it: use `trilane fit --policy-engine "
            f"{engine.name}`; --engine takes one whose speeds were fitted, such as {USUAL_ENGINE}"
        )
    return engine


def check_setting(question: Question, engine: FittedEngine, hardware: Hardware) -> None:
    """Raises FitError for an engine and for settings that such a machine has no use for."""
    if hardware.one_memory and question.n_cpu_moe:
        raise FitError(f"n_cpu_moe {question.n_cpu_moe}: all of {hardware.name} is in one memory; leave it out")
    if hardware.cpu_only and engine.needs_gpu:
        raise FitError(f"{engine.name}: expected a machine with a GPU, got {hardware.name}; choose {USUAL_ENGINE}")
    if (question.ts or question.sm) and takes_cards(engine):
        raise FitError(f"ts, sm: {engine.name} divides every layer over all GPUs alike; leave it out")
    if question.sm is not None and not hardware.further:
        raise FitError(f"sm {question.sm}: expected several GPUs with it, as 2x-rtx-3090, got {hardware.name}")
    if question.sm is not None and (why := why_not(question.sm, engine, question.model_shape)):
        other = " or --engine ik_llama.cpp" if question.sm == "graph" and "graph" not in engine.split_modes else ""
        raise FitError(f"sm {question.sm}: {why}; use layer{other}")
    if question.ts is not None:
        _check_division(question.ts, load_model(question.shape), len(hardware.cards), question.sm)
    if engine.dialect == "vllm-serve" and question.kv not in (None, "f16"):
        raise FitError(f"kv {question.kv}: expected f16 with {engine.name}, whose --kv-cache-dtype fp8 is not modelled")
    if question.threads is not None and question.threads > _THREADS_A_CORE * hardware.cpu.cores:
        raise FitError(
            f"threads {question.threads}: expected at most {_THREADS_A_CORE * hardware.cpu.cores}, "
            f"{_THREADS_A_CORE} on each of the {hardware.cpu.cores} cores"
        )


def _check_division(ts: tuple[int, ...], shape: ModelShape, cards: int, mode: SplitMode | None) -> None:
    """Raises FitError for other numbers of cards or blocks, and for a first card without any, which would still receive
    the experts of prompts."""
    blocks = blocks_of(shape) + 1
    if mode in PROPORTIONS:
        if len(ts) != cards or not all(ts):
            raise FitError(f"ts {','.join(map(str, ts))}: expected a proportion for each of {cards} GPUs, at least 1")
        return
    if len(ts) != cards or cards == 1 or sum(ts) != blocks or not ts[0]:
        raise FitError(
            f"ts {','.join(map(str, ts))}: expected a number of layers for each of several cards, at least 1 on the "
            f"first, together {blocks}, of which one is the output layer; GPUs: {cards}"
        )


def check_engine(engine: InferenceEngine, shape: ModelShape, hardware: Hardware) -> None:
    """Raises FitError for cards that the engine does not run on, and for weights that it does not read."""
    vendors = dict.fromkeys(card.gpu.vendor or _UNSTATED for card in hardware.cards)
    vendor, weights = next(iter(vendors)), parted(shape.name).weights
    refused = [one for one in vendors if not hardware.cpu_only and not engine.runs_on(one)]
    if refused:
        others = [name for name, other in fitted_engines().items() if all(map(other.runs_on, vendors))]
        verb = "has no numbers for" if isinstance(engine, FittedEngine) and engine.by_name else "does not run on"
        raise FitError(f"{engine.name} {verb} {_TITLES[refused[0]]}'s GPUs; use {' or '.join(others)}")
    old = [card.gpu.name for card in hardware.cards if card.gpu.launches == "single"]  # before Volta
    if old and isinstance(engine, FittedEngine) and engine.dialect == "vllm-serve":
        raise FitError(f"{engine.name}: expected GPUs of compute capability 7.0 or more, got {old[0]}; use llama.cpp")
    _check_several(engine, shape, hardware)
    if weights is not None and not reads(engine, weights):
        others = [name for name, other in fitted_engines().items() if other.runs_on(vendor) and reads(other, weights)]
        use = f"; {' or '.join(others)} does" if others else "; choose other weights (trilane models --quantisations)"
        raise FitError(f"{engine.name} does not read weights in {weights}{use}")


def _check_several(engine: InferenceEngine, shape: ModelShape, hardware: Hardware) -> None:
    """Raises FitError for several cards that the engine does not take, or among which it cannot divide the heads."""
    cards = len(hardware.cards)
    if cards == 1:
        return
    if not (isinstance(engine, FittedEngine) and (splits_cards(engine) or takes_cards(engine))):
        raise FitError(f"{engine.name}: expected one GPU, got {cards}; use llama.cpp or ik_llama.cpp")
    if takes_cards(engine) and not divides_heads(shape, cards):
        fewer = next(count for count in range(cards - 1, 0, -1) if divides_heads(shape, count))
        raise FitError(f"{engine.name}: expected GPUs that all have as many of the heads of {shape.name}, got {cards}; "
                       f"use {fewer} of them, or llama.cpp")


def reads(engine: InferenceEngine, weights: str) -> bool:
    """True if an engine reads a format."""
    return engine.reads is None or bool({*engine.reads} & {*quantisation_files(weights)})


def fitted_engines() -> dict[str, FittedEngine]:
    """Engines of today that people run, by name, but for those that answer where they are named alone."""
    engines = {name: load_engine(name) for name in engine_names()}
    served = {name: one for name, one in engines.items() if serves_users(one) and not one.by_name}
    return {name: one for name, one in served.items() if one.superseded_by is None}


def serves_users(engine: InferenceEngine) -> TypeGuard[FittedEngine]:
    """True if it splits a model once and for all, with times that were fitted: no policy decides while it runs, and
    not every layer has a part on the CPU, or rows of drafts."""
    return isinstance(engine, FittedEngine) and not (engine.decides or engine.cpu_in_turn or engine.window)
