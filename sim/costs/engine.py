"""Engines: what a machine does with the software that runs a model on it, as data (``sim/costs/engines/*.yaml``).

There are two kinds. In a ``CountedEngine``, such as ``pytorch`` and ``graphs``, kernels are counted, and each costs the
machine's own times (``sim.costs.roofline_costs``); so are those of papers' systems, such as ``dali-2025``, whose own
programs take more time than the machine does (``sim.costs.engine_costs``). Of a ``FittedEngine``, such as
``llama.cpp``, which people run, the times of whole layers and the shares of a data sheet's rates that they reach are
known from measured speeds (``sim.costs.fitted_costs``). The sections of a file say of which kind its engine is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

from sim.costs import software
from sim.costs.kernel_costs import Copies, Kernels, SplitKernels, fits
from sim.costs.software import Calibrated, CardsWork, CpuAttention, Factor, Ns, NumberRange, Rate, Share, Software
from sim.costs.window_work import WindowWork
from sim.machine.hardware import Hardware
from sim.machine.parts import Instructions, Vendor
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced, numbers_in, with_numbers
from traces.models.codings import Coding
from traces.models.quantisation import WeightFiles
from trilane.common.hints import Name, at_least, between
from trilane.common.names import unknown
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

Cached = Literal["grouped", "latent"]
LayerKind = Literal["grouped", "latent", "state"]
LatentProducts = Literal["compressed", "heads"]
NumaMode = Literal["distribute", "isolate", "numactl"]  # of --numa
CopiedExperts = Literal["used", "all"]
PromptExperts = Literal["copied", "copied ahead", "computed"]
_FOLDER = Path(str(files("sim.costs"))) / "engines"
PLAIN = "pytorch"  # the engine of scenarios that name none, and of profiles
Dialect = Literal["llama", "llama-2025", "ik", "ik-2025", "sglang", "strata", "vllm-serve"]  # of command lines
_DEEPEST = 8  # of files that are like others, which are like others
BackEnd = Literal["vulkan", "metal", "rocm"]
Option = Literal["whole_files", "drafts", "expert_cache", "no_device", "hidden_device"]


class GpuWork(NamedTuple):
    """The GPU, in an engine that was fitted to measured speeds.

    Times of a layer hold for a card of ``layer_ops_per_s`` and grow as (that / its own) ** ``layer_exponent``. Products
    of weights are with 8-bit activations, at shares of the card's 8-bit integer rate; those within attention at ones of
    its 16-bit rate: of as much of the data sheet's as 16-bit products reach on that card (``Gpu.flops_fraction``). Of a
    step's rows, all but the first take time in addition to reading the weights.
    """

    layer_ns: Mapping[LayerKind, Sourced[Ns]]
    layer_ops_per_s: Sourced[Rate]
    layer_exponent: Sourced[Annotated[float, between(0, 4)]]
    launches_ns: Sourced[Ns]  # of a layer, in addition, on cards whose kernels are started one by one
    step_ns: Sourced[Ns]
    read_share: Sourced[Share]
    quantised_share: Sourced[Factor]  # times that, for weights of fewer than 8 bits
    vendor_share: Mapping[str, Sourced[Factor]]  # times that, for other vendors' cards with memory of their own
    cache_factor: Mapping[Cached, Sourced[Factor]]  # time to read keys and values over that of as many bytes of weights
    cache_bits: Mapping[Cached, Sourced[Factor]]  # keys and values of fewer than 16 take the time of so many, unpacked
    four_bits: Mapping[Cached, Sourced[Factor]]  # times that, for those of four bits
    unpacked_products: Mapping[Cached, Sourced[Factor]]  # and in prompts so many times that of their products
    product_share: Sourced[Share]
    expert_product_share: Sourced[Share]
    coded_products: Mapping[Coding, Sourced[Factor]]  # times these shares, for weights that are unpacked so
    tile_rows: Sourced[Annotated[float, between(0, 1000)]]  # computed in vain of each expert of a prompt
    attention_share: Sourced[Share]
    vendor_attention_share: Mapping[str, Sourced[Factor]]  # times that, for other vendors' cards
    state_reads: Sourced[Factor]  # linear attention of prompts: rate of reading keys and queries over the memory's
    expert_ns: Sourced[Ns]  # of an expert's own kernels, where those of many rows are multiplied one after another
    vendor_product_share: Mapping[str, Sourced[Factor]]
    products_16_bit: Sourced[bool] | None = None  # shares of products are then of the 16-bit rate
    vendor_layers: Mapping[str, Sourced[Factor]] | None = None  # fixed times over those that ``layer_ns`` gives


class CpuWork(NamedTuple):
    """The CPU. Rates saturate: the memory's near ``ceiling_bytes_per_s``, that of threads near the memory's.

    Threads unpack weights before they multiply them, so many in a cycle of a core that computes 512 bits in it:
    ``weights_per_cycle`` for a vector alone, ``products_per_cycle`` for many, which share what was unpacked.
    """

    read_share: Sourced[Factor]  # of the machine's ``cpu.read_bytes_per_s``
    ceiling_bytes_per_s: Sourced[Rate]
    weights_per_cycle: Mapping[Coding, Sourced[Factor]]
    products_per_cycle: Mapping[Coding, Sourced[Factor]]
    expert_products: Sourced[Share]  # times that, of an expert, which has few of a prompt's rows
    efficiency_core: Sourced[Share]  # work of a slow core over that of a fast one
    two_sockets: Sourced[Factor]  # times that, where a socket's threads read what lies in the other's memory, too
    layer_ns: Sourced[Ns]  # a layer's experts on the CPU: handing over, and waiting, without their parallel regions
    region_ns: Sourced[Ns]  # a parallel region of 16 threads: barriers, which take longer with more
    state_ns: Sourced[Ns]  # of a layer of linear attention on the CPU, in addition
    cache_factor: Mapping[Cached, Sourced[Factor]]
    cache_bits: Sourced[Factor]  # as the GPU's, of both kinds
    ceiling_flops_per_s: Sourced[Rate]
    flash: CpuAttention
    instructions: Mapping[Instructions, Sourced[Factor]] | None = None  # times what a core does in a cycle
    every_layer: Sourced[bool] | None = None  # whether every layer waits ``layer_ns``, after the GPU's experts


class PromptWork(NamedTuple):
    """Prompts: pieces, and experts that are not on the GPU."""

    piece_tokens: Sourced[Annotated[int, at_least(1)]]
    experts: Sourced[PromptExperts]  # "copied ahead": those of the next layer while one is computed
    copies_from_tokens: Sourced[Annotated[int, at_least(1)]]  # of a piece; experts of fewer are computed
    latent: Sourced[LatentProducts]  # whether queries meet latents as they are kept, or keys and values of all heads
    copied_experts: Sourced[CopiedExperts]  # of a layer: those that a piece uses, or all
    copies: Sourced[Copies]  # host memory from which experts are copied; what follows limits those from pageable memory
    link_share: Sourced[Factor]  # of the link's rate
    memory_share: Sourced[Factor]  # of what the CPU reads
    staging_bytes_per_s: Sourced[Rate]  # of the driver's thread that puts them into pinned memory first
    repacked_products_per_cycle: Mapping[Instructions, Sourced[Factor]] | None = None  # of weights in its own order
    most_piece_tokens: Sourced[Annotated[int, at_least(1)]] | None = None  # of a piece that a GPU takes; None: any


class EngineError(HardwareError):
    """An engine that is unknown, or cannot answer the question."""


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """Facts that engines of both kinds state.

    ``copied_run``: whether an expert that is copied for its layer runs as soon as it is there, in a graph of its own,
    or in the kernels of all. ``starts``: how the host starts kernels; ``graphs`` need ``replay_ns`` and ``spin_ns``,
    and let the experts of a layer share kernels. ``decides``: whether the host waits for the routing and decides in
    every layer. ``splits``: whether the GPU has all experts of some layers, or some experts of every layer. ``set_by``:
    published figures, by their ids in ``trilane papers``, from which numbers of the engine or of its machine were
    taken; those of a file that it is ``like``, too. ``vendors``: those of GPUs that it runs on; ``reads``: files of
    weights (``traces.models.quantisation``); None: any.
    """

    name: Name
    about: str
    starts: Literal["kernels", "graphs"]
    decides: bool
    splits: Literal["layers", "experts"] = "layers"
    copied_run: Literal["alone", "together"] = "alone"
    replay_ns: Sourced[Annotated[int, at_least(0)]] | None = None  # host time to start one graph
    spin_ns: Sourced[Annotated[int, at_least(0)]] | None = None  # to wait for a stream
    set_by: tuple[str, ...] = ()
    vendors: tuple[Vendor, ...] | None = None
    reads: tuple[WeightFiles, ...] | None = None

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise EngineError(f"engine {self.name!r}: {fault}")

    def _faults(self) -> Iterator[str]:
        if self.replays and (self.replay_ns is None or self.spin_ns is None):
            yield "expected replay_ns and spin_ns, since it starts graphs"

    @property
    def replays(self) -> bool:
        """True if kernels are recorded, and start together."""
        return self.starts == "graphs"

    def runs_on(self, vendor: Vendor) -> bool:
        return self.vendors is None or vendor in self.vendors

    def differs_by_name(self, other: InferenceEngine) -> bool:
        """True if all but the name is that of another engine, which a file that is only ``like`` it has."""
        return replace(other, name=self.name) == self

    def flat(self) -> dict[str, Sourced[Any]]:
        """Every number by its dotted key."""
        return numbers_in(vars(self))

    def keys(self) -> list[str]:
        """Dotted keys of the numbers that it has, or could have in place of the machine's."""
        return list(self.flat())

    def with_numbers(self, changed: Mapping[str, float]) -> Self:
        """The engine with other values for some dotted keys. Raises EngineError for a key that it lacks."""
        for key in changed:
            if key not in self.flat():
                raise EngineError(f"engine {self.name!r}: {unknown('key', key, self.flat())}")
        return self._map({key: self.flat()[key]._replace(value=value) for key, value in changed.items()})

    def with_sources(self, sources: Mapping[str, str]) -> Self:
        """The engine with other sources for some dotted keys."""
        return self._map({key: n._replace(source=sources[key]) for key, n in self.flat().items() if key in sources})

    def _map(self, changed: Mapping[str, Sourced[Any]]) -> Self:
        return replace(self, **with_numbers(vars(self), changed))


@dataclass(frozen=True, kw_only=True)
class CountedEngine(_Engine):
    """An engine whose kernels are counted; ``software``: a program's own numbers.

    One with a ``spread`` stands for a kind of programs: its numbers lie between these values. ``calibrated``: the
    numbers that a program's own times set, in this order.
    """

    software: Software | None = None
    spread: Mapping[str, NumberRange] = field(default_factory=dict)
    calibrated: tuple[Calibrated, ...] = ()

    def keys(self) -> list[str]:
        return ["replay_ns", "spin_ns", *(f"software.{name}" for name in Software._fields)]

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        small = self.software or Software()
        share, rate = small.small_batch_flops_share, small.small_batch_flops_per_s
        few = small.small_batch_tokens, share or rate
        if None in few and any((*few, small.cpu_token_ns and small.cpu_token_ns.value)):
            yield "software: expected small_batch_tokens and small_batch_flops_share, or _per_s, together"
        if share and rate:
            yield "software: expected small_batch_flops_share or small_batch_flops_per_s, got both"
        for key in (*self.spread, *(each.number for each in self.calibrated)):
            if key not in self.flat():
                yield f"spread, calibrated: {unknown('number', key, self.flat())}"


@dataclass(frozen=True, kw_only=True)
class FittedEngine(_Engine):
    """An engine whose times are those of whole layers, fitted to measured speeds.

    Its traits say what else differs between programs and their builds: the ``program`` whose published errors it
    shares, on whichever ``back_end`` (None: the one that its vendor's cards usually have); a build is ``superseded_by``
    another; one ``by_name`` answers where it is named alone. ``dialect``: of its command line; ``options``: what that
    takes in addition. ``copies_at_once``: what comes to the GPU of a layer's experts on the host, for a prompt.
    ``cache_costs``: an engine that waits for the host's routing as this one does with a cache of experts. ``fit``: the
    measured speeds to which ``tools/fit_engines.py`` fitted the numbers whose source says from which value.
    """

    spread: ClassVar[Mapping[str, NumberRange]] = {}  # it is one program
    calibrated: ClassVar[tuple[Calibrated, ...]] = ()  # no single times set its numbers
    program: str = ""
    superseded_by: Name | None = None
    by_name: bool = False
    back_end: BackEnd | None = None
    dialect: Dialect = "llama"
    options: tuple[Option, ...] = ()
    copies_at_once: Literal["matrix", "layer"] = "layer"
    cache_costs: Name | None = None
    model: Name | None = None
    fit: str | None = None
    gpu: GpuWork
    cpu: CpuWork
    prompt: PromptWork
    cards: CardsWork | None = None  # None: it takes one GPU
    split_modes: tuple[software.SplitMode, ...] = ("layer",)  # of several
    window: WindowWork | None = None  # None: a step computes one token of each sequence
    kernels: Kernels | None = None  # measured on one machine: those of machines without a GPU, in place of the others
    gpu_kernels: Kernels | None = None  # measured on one GPU: those of machines with one, in place of the others
    split: SplitKernels | None = None  # experts that stay with the CPU next to it

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if "expert_cache" in self.options and self.cache_costs is None:
            yield "expected cache_costs, since it has an expert_cache"
        if (self.gpu_kernels is None) != (self.split is None):
            yield "expected gpu_kernels and split together, or none of them"
        for section in ("kernels", "gpu_kernels", "split"):
            for name, lists, lengths in part.lists() if (part := getattr(self, section)) else ():
                if not fits(lists, lengths):
                    counts = "".join(f", with {count} values each" for count in lengths[1:])
                    what = f"expected {lengths[0]} entries{counts}, as many as threads, depths and rows were measured"
                    yield f"{section}.{name}: {what}"

    @property
    def scored_as(self) -> str:
        """Name under which errors are kept: the program, of whichever builds, with its back end."""
        return f"{self.program}-{self.back_end}" if self.back_end else self.program

    @property
    def needs_gpu(self) -> bool:
        """True if its numbers are for machines with a GPU only."""
        return self.splits == "experts" or self.back_end is not None or self.dialect == "vllm-serve"

    def with_expert_cache(self) -> FittedEngine:
        """Return the engine with the costs of layers whose experts come from a cache. Raises EngineError."""
        costs = load_fitted(self.cache_costs or self.name)
        return replace(self, decides=costs.decides, spin_ns=costs.spin_ns)

    def copying_from(self, copies: Copies | None) -> FittedEngine:
        """Return the engine with the host memory from which it copies experts; None: its own."""
        own = self.prompt.copies
        return replace(self, prompt=self.prompt._replace(copies=own._replace(value=copies or own.value)))

    @property
    def maps_files(self) -> bool:
        """True if weights on the host are pages of a file that is mapped, which need not be in memory."""
        return self.dialect not in ("sglang", "vllm-serve")

    @property
    def cpu_in_turn(self) -> bool:
        """True if the CPU takes its turn in every layer, after the GPU."""
        return bool(self.cpu.every_layer and self.cpu.every_layer.value)

    @property
    def measured(self) -> bool:
        """True if kernels were measured on some machine."""
        return self.kernels is not None or self.gpu_kernels is not None

    def measured_on(self, hardware: Hardware) -> bool:
        """True if its times on such a machine, with or without a GPU, are those of kernels measured on one."""
        return (self.kernels if hardware.cpu_only else self.gpu_kernels) is not None


InferenceEngine: TypeAlias = CountedEngine | FittedEngine


def engine_names() -> list[str]:
    """The engines that come with the simulator, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_engine(name_or_path: str, overrides: Mapping[str, bool | float | str] | None = None) -> InferenceEngine:
    """An engine by its name, or a file of the same form. Raises EngineError.

    A file may be ``like`` another one and state only what differs. ``overrides`` replaces values by dotted key, such as
    ``{"software.layer_ns": 1e6}``; of a counted engine also those that its file leaves to the machine.
    """
    return _with_overrides(name_or_path, overrides) if overrides else _as_stated(name_or_path)


@cache
def _as_stated(name_or_path: str) -> InferenceEngine:
    path = _path_of(name_or_path)
    return _read(_document(path), path, path.name)


def _with_overrides(name_or_path: str, overrides: Mapping[str, bool | float | str]) -> InferenceEngine:
    stated = _as_stated(name_or_path)
    where = f"engine {stated.name!r}, overrides"
    for key in overrides:
        if key not in (known := stated.keys()):
            raise EngineError(f"{where}: {unknown('key', key, known)}")
    changed: dict[str, Any] = {}
    for key, value in overrides.items():
        *sections, name = key.split(".")
        section = reduce(lambda outer, inner: outer.setdefault(inner, {}), sections, changed)
        section[name] = {"value": value, "source": "override", "confidence": "high"}
    path = _path_of(name_or_path)
    return _read(_over(_document(path), changed), path, where)


def _path_of(name_or_path: str) -> Path:
    path = _FOLDER / f"{name_or_path}.yaml" if name_or_path in engine_names() else Path(name_or_path)
    if not path.is_file():
        message = unknown("engine", name_or_path, engine_names(), "trilane engines")
        raise EngineError(f"{message}; or name a YAML file like theirs")
    return path


def _read(document: Mapping[str, Any], path: Path, where: str) -> InferenceEngine:
    kind: type[InferenceEngine] = FittedEngine if {"gpu", "cpu", "prompt"} & {*document} else CountedEngine
    return from_dict(kind, {"name": path.stem, **document}, where, EngineError)


def load_fitted(name_or_path: str) -> FittedEngine:
    """Return an engine with times of whole layers. Raises EngineError for one whose kernels are counted."""
    engine = load_engine(name_or_path)
    if not isinstance(engine, FittedEngine):
        raise EngineError(f"engine {engine.name!r}: its kernels are counted, it has no times of whole layers")
    return engine


def _document(path: Path, depth: int = 0) -> dict[str, Any]:
    """The file, over the one that it is like. Raises EngineError."""
    document = read_yaml(path, EngineError)
    if not isinstance(document, dict):
        raise EngineError(f"{path.name}: expected a mapping")
    base = document.pop("like", None)
    if base is None:
        return document
    if base not in engine_names() or depth > _DEEPEST:
        raise EngineError(f"{path.name}: like: {unknown('engine', str(base), engine_names())}")
    return _over(_bundled(str(base), depth + 1), document)


@cache
def _bundled(name: str, depth: int) -> dict[str, Any]:
    return _document(_FOLDER / f"{name}.yaml", depth)


def _over(base: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """A mapping with some of its entries changed, section by section; a number is changed as a whole, an empty section
    stands for itself, and what set the base set numbers of this one, too."""
    merged = dict(base)
    for key, value in changed.items():
        old = merged.get(key)
        section = isinstance(value, dict) and value and "source" not in value and isinstance(old, dict)
        both = [*(old or ()), *value] if key == "set_by" and isinstance(value, list) else value
        merged[key] = _over(old, value) if section and old is not None else both
    return merged
