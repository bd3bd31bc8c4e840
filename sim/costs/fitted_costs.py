"""Cost tables of an engine that was fitted to measured speeds, such as llama.cpp.

With R the rate at which a processor reads weights in this engine (``Processor``):

====================  ==============================================================================================
attention, a layer    weights + max(keys and values / R x a factor, products of all rows of a sequence but one)
                      + the state of linear attention / R + its reads for all rows but one + fixed time of the layer
expert                weights; the first one of a layer on the CPU adds the time of handing over and of three regions
others                weights; a step adds a fixed time
weights               GPU: weights / R + products of all rows but one; CPU: max(weights / R, products)
====================  ==============================================================================================

The fixed times of a layer hold what an engine's kernels cost in addition to their bytes, launches included, so that
launches are free here; one that decides nothing on the host waits for no routing. A machine without a GPU computes all
of it on the CPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts, by_layer
from sim.costs.engine import Cached, CpuWork, FittedEngine, GpuWork, LatentProducts, LayerKind, NumaMode, PromptWork
from sim.costs.kernel_costs import kernel_costs, split_costs
from sim.costs.roofline_costs import ACTIVATION_BYTES, ROUTING_BYTES, attention_work
from sim.machine.devices import Cpu, Gpu
from sim.machine.hardware import Hardware
from sim.machine.interpolation import table_ns, time_ns, whole
from sim.machine.plan_costs import PlanCosts
from sim.machine.sourced import Sourced
from traces.models.attention import STATE_BYTES, Attention
from traces.models.codings import Coding, Codings, codings_of
from traces.models.shape import ModelShape

INTEGER_RATIO = 2  # 8-bit integer operations over 16-bit ones, where a card's rate is not stated: true of most
QUANTISED_BITS = 8  # weights of fewer are unpacked by other kernels
WIDE_BITS = 16  # keys and values of fewer are unpacked
ROTARY_WIDTH = 64  # of a latent: elements that are keys and no values, in every DeepSeek and GLM
FEW_ROWS = 4  # an expert of few is part of a small piece, whose tiles are half as wide (ggml-org/llama.cpp PR 28552)
STATE_READ_BYTES = 8  # of an element of a state, and of each token: the 32-bit elements of its key and its query
_THREADS_POWER = 3  # how sharply a rate saturates; 1 would be as slow as one after the other
_TILE_ROWS = 64  # fewer of a sequence are computed one by one on a CPU (ggml-org/llama.cpp ggml-cpu, GGML_FA_TILE_Q)
_COPIES_POWER = 3  # how sharply copies saturate
_VECTOR_BITS = 512  # that a core computes in a cycle: two registers of AVX2, or four of NEON
# A barrier takes the time of so many threads more than it has: 2.5 us with 4 threads and 3.2 with 8 of an EPYC
# (ggml-org/llama.cpp PR 9598), a token of a tiny model 203, 294 and 366 us with 8, 16 and 24 of an i9-13900K (PR 7993).
_BARRIER_THREADS = 12
_USUAL_THREADS = 16  # for which ``region_ns`` is stated
_USUAL_HZ = 4e9  # of a machine that states no clock
_ALL_PLAIN = Codings()
_PLAIN = _ALL_PLAIN.others


class Processor(ABC):
    """A device that computes layers. Sizes in bytes, times in ns."""

    work: GpuWork | CpuWork

    @property
    @abstractmethod
    def step_ns(self) -> float:
        """Fixed time of a step."""

    @abstractmethod
    def attention_fixed_ns(self, kind: LayerKind) -> float:
        """Fixed time of a layer's attention, with what else is fixed in a layer of the GPU."""

    @property
    @abstractmethod
    def mixture_fixed_ns(self) -> float:
        """Fixed time of a layer's experts, gate and sum."""

    @property
    @abstractmethod
    def read_bytes_per_s(self) -> float:
        """Rate of reading weights of 8 bits or more."""

    def unpacked_share(self, bits: float) -> float:
        """Share of ``read_bytes_per_s`` reached with weights of ``bits`` bits."""
        return 1.0

    def read_ns(self, size: float, bits: float) -> float:
        """Weights of all but the routed experts."""
        return size / (self.read_bytes_per_s * self.unpacked_share(bits)) * 1e9

    @abstractmethod
    def cache_bits(self, kind: Cached) -> float:
        """Bits whose reading takes as long as that of keys and values of fewer than 16."""

    def cache_ns(self, elements: float, bits: float, kind: LayerKind) -> float:
        """Keys and values, or the state of linear attention, in the time of as many bytes of weights, or of a factor
        more."""
        factor = 1.0
        if kind != "state":
            bits, factor = unpacked_bits(bits, self.cache_bits(kind)), self.work.cache_factor[kind].value
        return elements * bits / 8 * factor / self.read_bytes_per_s * 1e9

    @abstractmethod
    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        """Weights of all but the routed experts, applied to so many rows; ``flops``: of one row."""

    @abstractmethod
    def attention_ns(
        self, flops: float, bits: float, kind: LayerKind, rows: int, sequences: int, alone_ns: float
    ) -> float:
        """Products of queries with keys and values of so many bits, of all rows but one of each of the ``sequences``.

        ``alone_ns``: the time if each row reads anew what it attends to, which holds the products of a row alone.
        """

    def state_ns(self, elements: float, rows: int) -> float:
        """Products with a state of so many elements, of so many rows; none on a CPU, whose other products take long."""
        return 0.0

    @abstractmethod
    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """One expert with each number of rows; ``flops``: of one row."""


def layer_kind(attention: Attention) -> LayerKind:
    """Linear attention, a compressed latent for all heads, or keys and values that groups of heads share."""
    if attention.reach == "state":
        return "state"
    return "latent" if attention.latent else "grouped"


def unpacked_bits(bits: float, cache_bits: float) -> float:
    """Bits whose reading takes as long as that of keys and values of ``bits``."""
    return bits if bits >= WIDE_BITS else max(bits, cache_bits)


def saturated(*limits: float, power: float = 1) -> float:
    """A rate that comes near the least of its limits, and is below it where others are near."""
    return float(sum(limit**-power for limit in limits) ** (-1 / power))


@dataclass(frozen=True)
class GpuProcessor(Processor):
    """A graphics card."""

    gpu: Gpu
    work: GpuWork
    codings: Codings = _ALL_PLAIN

    @property
    def step_ns(self) -> float:
        return self.work.step_ns.value

    def attention_fixed_ns(self, kind: LayerKind) -> float:
        work = self.work
        slower = math.pow(work.layer_ops_per_s.value / self._stated_ops_per_s, work.layer_exponent.value)
        return work.layer_ns[kind].value * slower + (work.launches_ns.value if self.gpu.launches == "single" else 0.0)

    @property
    def mixture_fixed_ns(self) -> float:
        return 0.0  # ``attention_fixed_ns`` is that of whole layers

    @property
    def read_bytes_per_s(self) -> float:
        vendor = self._factor(self.work.vendor_share) if self.gpu.kind is None else 1.0
        return self.gpu.bandwidth_bytes_per_s * self.work.read_share.value * vendor

    def unpacked_share(self, bits: float) -> float:
        return self.work.quantised_share.value if bits < QUANTISED_BITS else 1.0

    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        products_ns = self._products((rows - 1) * flops, self.work.product_share.value, self.codings.others)
        return self.read_ns(size, bits) + products_ns

    def cache_bits(self, kind: Cached) -> float:
        return self.work.cache_bits[kind].value

    def attention_ns(
        self, flops: float, bits: float, kind: LayerKind, rows: int, sequences: int, alone_ns: float
    ) -> float:
        share = self.work.attention_share.value * self._factor(self.work.vendor_attention_share)
        if kind != "state" and bits < WIDE_BITS:
            flops *= self.work.unpacked_products[kind].value
        return flops * (rows - sequences) / rows / (self.gpu.flops_per_s * share) * 1e9

    def state_ns(self, elements: float, rows: int) -> float:
        """One row after another: each column of the state fetches the row's key and query anew, from caches."""
        return STATE_READ_BYTES * elements * rows / (self.gpu.bandwidth_bytes_per_s * self.work.state_reads.value) * 1e9

    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        work, more = self.work, np.maximum(rows - 1, 0)
        started = work.expert_ns.value * more / np.maximum(rows, 1)
        row_ns = self._products(flops, work.expert_product_share.value, self.codings.experts)
        times: npt.NDArray[np.float64] = (
            self.read_ns(size, bits) + started + more * (1 + work.tile_rows.value / (more + FEW_ROWS)) * row_ns
        )
        return times

    def _products(self, flops: float, share: float, codings: Mapping[Coding, float]) -> float:
        share *= self._factor(self.work.vendor_product_share) / _mean_cycles(codings, self.work.coded_products)
        return flops / (self._stated_ops_per_s * share) * 1e9

    def _factor(self, of_vendors: Mapping[str, Sourced[float]]) -> float:
        """The card's vendor's, 1 where none is stated."""
        own = of_vendors.get(self.gpu.vendor or "")
        return own.value if own else 1.0

    @property
    def _stated_ops_per_s(self) -> float:
        return self.gpu.integer_ops_per_s or INTEGER_RATIO * self.gpu.flops_per_s


@dataclass(frozen=True)
class CpuProcessor(Processor):
    """A CPU with so many ``threads``: on fast cores first, then on slow ones; two of a core share its units, so that
    more threads than cores compute no faster.

    ``repacked``: weights are in the CPU's own order of rows, where the engine has one. ``numa``: with "distribute", as
    in engines whose ``two_sockets`` is 1, sockets read what lies in their own memory.
    """

    cpu: Cpu
    work: CpuWork
    prompt: PromptWork
    threads: int
    repacked: bool = False
    codings: Codings = _ALL_PLAIN
    numa: NumaMode | None = None

    @property
    def step_ns(self) -> float:
        return self._region_ns

    def attention_fixed_ns(self, kind: LayerKind) -> float:
        regions = 3 * self._region_ns  # projections in, attention, projection out
        return regions + (self.work.state_ns.value if kind == "state" else 0.0)

    @property
    def mixture_fixed_ns(self) -> float:
        return 3 * self._region_ns  # gate and up, down, the sum

    @property
    def read_bytes_per_s(self) -> float:
        return self._bytes_per_s(_PLAIN, WIDE_BITS)

    def read_ns(self, size: float, bits: float) -> float:
        return size / self._bytes_per_s(self.codings.others, bits) * 1e9

    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        return max(self.read_ns(size, bits), rows * flops / self.flops_per_s(self.codings.others) * 1e9)

    def cache_bits(self, kind: Cached) -> float:
        return self.work.cache_bits.value

    def attention_ns(
        self, flops: float, bits: float, kind: LayerKind, rows: int, sequences: int, alone_ns: float
    ) -> float:
        factor = (
            self.work.attention_factor.value * unpacked_bits(bits, self.work.cache_bits.value) / min(bits, WIDE_BITS)
        )
        products_ns = flops * (rows - sequences) / rows * factor / self.flops_per_s(_PLAIN) * 1e9
        return products_ns if rows >= _TILE_ROWS * sequences else min(products_ns, alone_ns)

    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        codings = self.codings.experts
        flops_per_s = self.flops_per_s(codings) * self.work.expert_products.value
        products = rows.astype(np.float64) * (flops / flops_per_s * 1e9)
        return np.maximum(size / self._bytes_per_s(codings, bits) * 1e9, products)

    def _bytes_per_s(self, codings: Mapping[Coding, float], bits: float) -> float:
        """Rate of reading weights of ``bits`` bits, as fast as the memory gives and threads unpack them."""
        work = self.work
        read = self.cpu.read_bytes_per_s * self._sockets_share
        memory = saturated(read * work.read_share.value, work.ceiling_bytes_per_s.value)
        unpacked = self._cycles_per_s / _mean_cycles(codings, work.weights_per_cycle) * bits / 8
        return saturated(memory, unpacked, power=_THREADS_POWER)

    def flops_per_s(self, codings: Mapping[Coding, float]) -> float:
        """Products of many rows."""
        per_cycle = 1 / _mean_cycles(codings, self.work.products_per_cycle)
        if self.repacked and self.prompt.repacked_products_per_cycle:
            per_cycle = self.prompt.repacked_products_per_cycle[self.cpu.instructions or "avx2"].value
        return saturated(2 * per_cycle * self._cycles_per_s, self.work.ceiling_flops_per_s.value)

    @property
    def _region_ns(self) -> float:
        """Time of a parallel region: barriers, at which threads arrive one after another."""
        alone, usual = _BARRIER_THREADS, _USUAL_THREADS
        return self.work.region_ns.value * (alone + self.threads) / (alone + usual)

    @property
    def _sockets_share(self) -> float:
        """Share of what all sockets read that these threads do: those of some sockets no more than these ones'."""
        cpu, placed = self.cpu, self.numa == "distribute"
        used = min(-(-self.threads * cpu.sockets // cpu.cores), cpu.sockets) / cpu.sockets
        return used * (1.0 if placed or cpu.sockets == 1 else self.work.two_sockets.value)

    @property
    def _cycles_per_s(self) -> float:
        """Cycles of all threads in which a fast core of ``_VECTOR_BITS`` does as much."""
        cpu = self.cpu
        slow = min(max(self.threads - cpu.fast_cores, 0), cpu.efficiency_cores or 0)
        cores = min(self.threads, cpu.fast_cores) + slow * self.work.efficiency_core.value
        return cores * (cpu.clock_hz or _USUAL_HZ) * (cpu.vector_bits or _VECTOR_BITS) / _VECTOR_BITS


def _mean_cycles(codings: Mapping[Coding, float], per_cycle: Mapping[Coding, Sourced[float]]) -> float:
    """Cycles of a weight, or their ratio to others', in the mean over parts of codings."""
    return sum(part / per_cycle[coding].value for coding, part in codings.items())


def fitted_costs(
    shape: ModelShape,
    hardware: Hardware,
    engine: FittedEngine,
    max_tokens: int,
    *,
    threads: int | None = None,
    repacked: bool = False,
    numa: NumaMode | None = None,
) -> CostTable:
    """The cost table for workloads 0..``max_tokens``. ``threads``: None is one a fast core. ``repacked``,
    ``numa``: see ``CpuProcessor``."""
    if engine.kernels is not None and hardware.cpu_only:
        return kernel_costs(shape, hardware, engine.kernels, max_tokens, threads or hardware.cpu.cores)
    if engine.gpu_kernels is not None and engine.split is not None and not hardware.cpu_only:
        return split_costs(
            shape, hardware, engine.gpu_kernels, engine.split, engine.prompt.copies.value, max_tokens,
            threads or hardware.cpu.cores,
        )
    threads = threads or hardware.cpu.fast_cores
    cpu = CpuProcessor(hardware.cpu, engine.cpu, engine.prompt, threads, repacked, codings_of(shape), numa)
    main: Processor = cpu if hardware.cpu_only else GpuProcessor(hardware.gpu, engine.gpu, codings_of(shape))
    steps = FittedSteps(shape, hardware, engine, main, cpu)
    sync_ns = engine.spin_ns.value if engine.decides and engine.spin_ns else 0
    if engine.cpu_in_turn:
        sync_ns += round(engine.cpu.layer_ns.value + cpu.mixture_fixed_ns)
    return CostTable(
        experts=by_layer(shape, hardware, lambda size: steps.expert(size, max_tokens)),
        steps=steps,
        sync_ns=sync_ns,
        serial=engine.cpu_in_turn,
        result_path=hardware.link.result_path,
        plan_costs=hardware.plan_costs if engine.decides else PlanCosts(),
        plan_factor=hardware.host.plan_factor,
    )


@dataclass(frozen=True)
class FittedSteps:
    """Step costs outside the routed experts, on the ``main`` processor, and those of one expert."""

    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    main: Processor
    cpu: CpuProcessor
    _steps: dict[tuple[int, int], StepCosts] = field(default_factory=dict, init=False, repr=False, compare=False)
    _products: dict[tuple[int, float, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def expert(self, size: int, max_tokens: int) -> ExpertCosts:
        """Tables of one routed expert of ``size`` bytes."""
        shape, link = self.shape, self.hardware.link
        rows, flops = np.arange(max_tokens + 1), 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width
        copies_per_s = copy_bytes_per_s(self.hardware, self.engine.prompt)
        no_visit = self.hardware.cpu_only or self.engine.cpu_in_turn  # of the first expert: a wait of every layer then
        return ExpertCosts(
            gpu_ns=table_ns(self.main.expert_ns(size, shape.weight_bits, flops, rows)),
            cpu_ns=table_ns(self.cpu.expert_ns(size, shape.weight_bits, flops, rows)),
            first_cpu_ns=0 if no_visit else round(self.engine.cpu.layer_ns.value + self.cpu.mixture_fixed_ns),
            copy_ns=time_ns(link.h2d_latency_ns + size / copies_per_s * 1e9),
            expert_bytes=size,
            writeback_ns=link.d2h_ns(size),
        )

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        shape = self.shape
        attention_ns = shape.mean_of_layers(lambda kind: self._kind(kind, tokens, context))
        dense_ns = attention_ns + self._product(shape.dense_ffn_params, shape.bits.dense, tokens)
        dense_ns += self.main.mixture_fixed_ns
        return self._without_context(tokens, len(context))._replace(
            attention_ns=time_ns(attention_ns), dense_ns=whole(shape.dense_layers * dense_ns)
        )

    def _without_context(self, tokens: int, sequences: int) -> StepCosts:
        """Return the costs that the lengths of the sequences do not change; attention and dense layers are 0."""
        if (known := self._steps.get((tokens, sequences))) is not None:
            return known
        shape, main, link, bits = self.shape, self.main, self.hardware.link, self.shape.bits
        hidden_bytes = tokens * shape.hidden * ACTIVATION_BYTES
        gate_ns = time_ns(self._product(shape.hidden * shape.experts, bits.router, tokens) + main.mixture_fixed_ns)
        known = self._steps[tokens, sequences] = StepCosts(
            attention_ns=0,
            dense_ns=0,
            gate_ns=gate_ns,
            speculate_ns=gate_ns,
            estimator_ns=gate_ns,
            shared_ns=whole(self._product(shape.shared_params, bits.shared, tokens)),
            combine_ns=time_ns(main.read_ns((shape.top_k + 2) * hidden_bytes, 16)),
            head_ns=time_ns(self._product(shape.vocab * shape.hidden, bits.head, sequences) + main.step_ns),
            routing_ns=link.d2h_ns(tokens * shape.top_k * ROUTING_BYTES) if self.engine.decides else 0,
            activations_ns=link.d2h_ns(hidden_bytes),
            result_ns=link.h2d_ns(hidden_bytes),
        )
        return known

    def _kind(self, kind: Attention, tokens: int, context: Sequence[int]) -> float:
        """Norms and attention of a layer of one kind."""
        main, name = self.main, layer_kind(kind)
        read, pairs = attention_work(kind, tokens, context)
        cache_ns = main.cache_ns(read * kind.kv_width, self.shape.cache_bits, name)
        state_ns = main.cache_ns(2.0 * len(context) * kind.state_bytes, 8, "state")
        state_ns += main.state_ns(kind.state_bytes / STATE_BYTES, tokens - len(context))
        scores_ns = main.attention_ns(
            attention_flops(kind, self.engine.prompt.latent.value, pairs, read), self.shape.cache_bits, name, tokens,
            len(context), main.cache_ns(pairs * kind.kv_width, self.shape.cache_bits, name),
        )
        product_ns = self._product(kind.params, self.shape.bits.of_attention(kind), tokens)
        return product_ns + max(cache_ns, scores_ns) + state_ns + main.attention_fixed_ns(name)

    def _product(self, weights: int, bits: float, tokens: int) -> float:
        """``weights`` matrix elements of ``bits`` each, applied to ``tokens`` rows."""
        if (known := self._products.get((weights, bits, tokens))) is None:
            known = self.main.matrix_ns(weights * bits / 8, bits, 2.0 * weights, tokens)
            self._products[weights, bits, tokens] = known
        return known


def attention_flops(kind: Attention, latent: LatentProducts, pairs: float, read: float) -> float:
    """Arithmetic within attention of a layer: so many pairs of positions, so many read.

    In llama.cpp all heads meet a latent as it is kept, whose whole width are keys and all but the rotary part values:
    two to three times what keys and values of heads need (ggml-org/llama.cpp src/models/deepseek2.cpp, which multiplies
    queries and results by the matrices that unpack it). Others unpack all that is read for each piece.
    """
    if layer_kind(kind) != "latent":
        return 4.0 * kind.heads * kind.head_dim * pairs
    values = kind.kv_width - ROTARY_WIDTH
    if latent == "compressed":
        return 2.0 * kind.heads * (kind.kv_width + values) * pairs
    return 4.0 * kind.heads * (kind.head_dim * pairs + values * (kind.head_dim - ROTARY_WIDTH) * read)


def copy_bytes_per_s(hardware: Hardware, prompt: PromptWork) -> float:
    """Rate of copies of experts. The link and the host's memory limit those from pinned memory; those from pageable
    memory cross the host's three times, since a thread of the driver puts them into pinned memory first.
    """
    link, memory = hardware.link.h2d_bytes_per_s, hardware.cpu.read_bytes_per_s
    if prompt.copies.value == "pinned":
        return saturated(link, memory, power=_COPIES_POWER)
    shares = link * prompt.link_share.value, memory * prompt.memory_share.value
    return saturated(*shares, prompt.staging_bytes_per_s.value, power=_COPIES_POWER)
