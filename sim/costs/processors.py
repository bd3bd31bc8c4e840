"""GPUs and CPUs in an engine that was fitted to measured speeds: times of reading, of products and of what is fixed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.costs.engine import Cached, CpuWork, GpuWork, LayerKind, NumaMode, PromptWork
from sim.machine.devices import Cpu, Gpu
from sim.machine.sourced import Sourced
from traces.models.attention import Attention
from traces.models.codings import Coding, Codings

INTEGER_RATIO = 2  # 8-bit integer operations over 16-bit ones, where a card's rate is not stated: true of most
QUANTISED_BITS = 8  # weights of fewer are unpacked by other kernels
WIDE_BITS = 16  # keys and values of fewer are unpacked
FEW_ROWS = 4  # an expert of few is part of a small piece, whose tiles are half as wide (ggml-org/llama.cpp PR 28552)
STATE_READ_BYTES = 8  # of an element of a state, and of each token: the 32-bit elements of its key and its query
_THREADS_POWER = 3  # estimate: how sharply a rate saturates; 1 would be as slow as one after the other
_VECTOR_BITS = 512  # that a core computes in a cycle: two registers of AVX2, or four of NEON
# A barrier takes the time of so many threads more than it has: 2.5 us with 4 threads and 3.2 with 8 of an EPYC
# (ggml-org/llama.cpp PR 9598), a token of a tiny model 203, 294 and 366 us with 8, 16 and 24 of an i9-13900K (PR 7993).
_BARRIER_THREADS = 12
_USUAL_THREADS = 16  # for which ``region_ns`` is stated
_USUAL_HZ = 4e9  # estimate: of a machine that states no clock
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
    def cache_bits(self, kind: Cached, bits: float) -> float:
        """Bits whose reading takes as long as that of keys and values of ``bits``, which are fewer than 16."""

    def cache_ns(self, elements: float, bits: float, kind: LayerKind) -> float:
        """Keys and values, or the state of linear attention, in the time of as many bytes of weights, or of a factor
        more."""
        factor = 1.0
        if kind != "state":
            bits, factor = unpacked_bits(bits, self.cache_bits(kind, bits)), self.work.cache_factor[kind].value
        return elements * bits / 8 * factor / self.read_bytes_per_s * 1e9

    @abstractmethod
    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        """Weights of all but the routed experts, applied to so many rows; ``flops``: of one row."""

    @abstractmethod
    def attention_ns(self, work: AttentionWork, kind: LayerKind, rows: int, sequences: int) -> float:
        """Products of queries with keys and values, of so many rows of all ``sequences``. A GPU computes the first row
        of each while it reads."""

    def state_ns(self, elements: float, rows: int) -> float:
        """Products with a state of so many elements, of so many rows; none on a CPU, whose other products take long."""
        return 0.0

    @abstractmethod
    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """One expert with each number of rows; ``flops``: of one row."""


class AttentionWork(NamedTuple):
    """Arithmetic of a layer's attention: operations, pairs of a query of a head and a key; elements and bits of keys
    and values."""

    flops: float
    pairs: float
    elements: float
    bits: float


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
        slower *= self._factor(work.vendor_layers or {})
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
        read_ns = self.read_ns(size, bits)
        row_ns = self._products(flops, self.work.product_share.value, self.codings.others)
        return read_ns + (rows - 1) * min(row_ns, read_ns)

    def cache_bits(self, kind: Cached, bits: float) -> float:
        return self.work.cache_bits[kind].value * (self.work.four_bits[kind].value if bits < QUANTISED_BITS else 1.0)

    def attention_ns(self, work: AttentionWork, kind: LayerKind, rows: int, sequences: int) -> float:
        share = self.work.attention_share.value * self._factor(self.work.vendor_attention_share)
        factor, unpacking_ns = 1.0, 0.0
        if kind != "state" and work.bits < WIDE_BITS:
            factor = self.work.unpacked_products[kind].value
            unpacked = work.elements if rows > sequences and factor == 1 else 0.0
            unpacking_ns = unpacked * (work.bits + WIDE_BITS) / 8 / self.read_bytes_per_s * 1e9
        flops_per_s = self.gpu.effective_flops_per_s * share
        return unpacking_ns + work.flops * factor * (rows - sequences) / rows / flops_per_s * 1e9

    def state_ns(self, elements: float, rows: int) -> float:
        """One row after another: each column of the state fetches the row's key and query anew, from caches."""
        return STATE_READ_BYTES * elements * rows / (self.gpu.bandwidth_bytes_per_s * self.work.state_reads.value) * 1e9

    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        work, more = self.work, np.maximum(rows - 1, 0)
        started = work.expert_ns.value * more / np.maximum(rows, 1)
        row_ns = self._products(flops, work.expert_product_share.value, self.codings.experts)
        read_ns = self.read_ns(size, bits)
        computed_ns = (1 + work.tile_rows.value / (more + FEW_ROWS)) * row_ns
        times: npt.NDArray[np.float64] = read_ns + more * np.minimum(computed_ns, read_ns) + started
        return times

    def _products(self, flops: float, share: float, codings: Mapping[Coding, float]) -> float:
        share *= self._factor(self.work.vendor_product_share) / _mean_cycles(codings, self.work.coded_products)
        ops_per_s = self.gpu.flops_per_s if self.work.products_16_bit else self._stated_ops_per_s
        return flops / (ops_per_s * self.gpu.flops_fraction * share) * 1e9

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

    @cached_property
    def read_bytes_per_s(self) -> float:
        return self._bytes_per_s(_PLAIN, WIDE_BITS)

    def read_ns(self, size: float, bits: float) -> float:
        return size / self._bytes_per_s(self.codings.others, bits) * 1e9

    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        return max(self.read_ns(size, bits), rows * flops / self.flops_per_s(self.codings.others) * 1e9)

    def cache_bits(self, kind: Cached, bits: float) -> float:
        return self.work.cache_bits.value

    def attention_ns(self, work: AttentionWork, kind: LayerKind, rows: int, sequences: int) -> float:
        """Tiles of queries share what they prepare; of rows one by one, each pair takes its cycles in addition: its
        exponential, the sum over a vector, calls."""
        flash, products = self.work.flash, work.flops / 2
        if rows >= flash.tile_rows.value * sequences and work.bits >= flash.tile_bits.value:
            return products / flash.products_per_cycle.value / self._cycles_per_s * 1e9
        cycles = products / flash.row_products_per_cycle.value + work.pairs * flash.pair_cycles.value
        cycles += products * flash.unpack_cycles.value if work.bits < WIDE_BITS else 0.0
        return cycles / self._cycles_per_s * 1e9

    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        codings = self.codings.experts
        flops_per_s = self.flops_per_s(codings) * self.work.expert_products.value
        products = rows.astype(np.float64) * (flops / flops_per_s * 1e9)
        return np.maximum(size / self._bytes_per_s(codings, bits) * 1e9, products)

    def _bytes_per_s(self, codings: Mapping[Coding, float], bits: float) -> float:
        """Rate of reading weights of ``bits`` bits, as fast as the memory gives and threads unpack them."""
        unpacked = self._cycles_per_s / _mean_cycles(codings, self.work.weights_per_cycle) * bits / 8
        return saturated(self._memory_bytes_per_s, unpacked, power=_THREADS_POWER)

    @cached_property
    def _memory_bytes_per_s(self) -> float:
        read = self.cpu.read_bytes_per_s * self._sockets_share
        return saturated(read * self.work.read_share.value, self.work.ceiling_bytes_per_s.value)

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

    @cached_property
    def _cycles_per_s(self) -> float:
        """Cycles of all threads in which a fast core of ``_VECTOR_BITS`` does as much."""
        cpu = self.cpu
        slow = min(max(self.threads - cpu.fast_cores, 0), cpu.efficiency_cores or 0)
        cores = min(self.threads, cpu.fast_cores) + slow * self.work.efficiency_core.value
        own = (self.work.instructions or {}).get(cpu.instructions or "avx2")
        cores *= own.value if own else 1.0
        return cores * (cpu.clock_hz or _USUAL_HZ) * (cpu.vector_bits or _VECTOR_BITS) / _VECTOR_BITS


def _mean_cycles(codings: Mapping[Coding, float], per_cycle: Mapping[Coding, Sourced[float]]) -> float:
    """Cycles of a weight, or their ratio to others', in the mean over parts of codings."""
    return sum(part / per_cycle[coding].value for coding, part in codings.items())
