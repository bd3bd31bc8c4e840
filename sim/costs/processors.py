"""Processors in a fitted engine: the times of reading weights, of products and of attention, on a GPU or a CPU."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.costs.fitted_engine import CpuWork, GpuWork, LayerKind, PromptWork
from sim.machine.devices import Cpu, Gpu
from traces.models.attention import Attention

INTEGER_RATIO = 2  # 8-bit integer operations over 16-bit ones, where a card's rate is not stated: true of most
QUANTISED_BITS = 8  # weights of fewer are unpacked by other kernels
WIDE_BITS = 16  # keys and values of fewer are unpacked
_THREADS_POWER = 3  # how sharply a rate saturates; 1 would be as slow as one after the other


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

    def cache_ns(self, elements: float, bits: float, kind: LayerKind) -> float:
        """Keys and values, or the state of linear attention, in the time of as many bytes of weights, or of a factor
        more."""
        factor = 1.0
        if kind != "state":
            bits, factor = unpacked_bits(bits, self.work.cache_bits.value), self.work.cache_factor[kind].value
        return elements * bits / 8 * factor / self.read_bytes_per_s * 1e9

    @abstractmethod
    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        """Weights of all but the routed experts, applied to so many rows; ``flops``: of one row."""

    @abstractmethod
    def attention_ns(self, flops: float, bits: float, rows: int) -> float:
        """Products of queries with keys and values of so many bits."""

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
        vendor = self.work.vendor_share.get(self.gpu.vendor or "") if self.gpu.kind is None else None
        return self.gpu.bandwidth_bytes_per_s * self.work.read_share.value * (vendor.value if vendor else 1.0)

    def unpacked_share(self, bits: float) -> float:
        return self.work.quantised_share.value if bits < QUANTISED_BITS else 1.0

    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        return self.read_ns(size, bits) + self._products((rows - 1) * flops, self.work.product_share.value)

    def attention_ns(self, flops: float, bits: float, rows: int) -> float:
        return self._products(flops * (rows - 1) / rows, self.work.attention_share.value)

    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        work, more = self.work, np.maximum(rows - 1, 0)
        started = work.expert_ns.value * more / np.maximum(rows, 1)
        return self.read_ns(size, bits) + started + more * self._products(flops, work.expert_product_share.value)

    def _products(self, flops: float, share: float) -> float:
        return flops / (self._ops_per_s * share) * 1e9

    @property
    def _ops_per_s(self) -> float:
        vendor = self.work.vendor_product_share.get(self.gpu.vendor or "")
        return self._stated_ops_per_s * (vendor.value if vendor else 1.0)

    @property
    def _stated_ops_per_s(self) -> float:
        return self.gpu.integer_ops_per_s or INTEGER_RATIO * self.gpu.flops_per_s


@dataclass(frozen=True)
class CpuProcessor(Processor):
    """A CPU with so many ``threads``; more than its cores read, but multiply no faster: two of a core share its units.

    ``repacked``: weights are in the CPU's own order of rows, where the engine has one.
    """

    cpu: Cpu
    work: CpuWork
    prompt: PromptWork
    threads: int
    repacked: bool = False

    @property
    def step_ns(self) -> float:
        return self.work.region_ns.value

    def attention_fixed_ns(self, kind: LayerKind) -> float:
        regions = 3 * self.work.region_ns.value  # projections in, attention, projection out
        return regions + (self.work.state_ns.value if kind == "state" else 0.0)

    @property
    def mixture_fixed_ns(self) -> float:
        return 3 * self.work.region_ns.value  # gate and up, down, the sum

    @property
    def read_bytes_per_s(self) -> float:
        work = self.work
        memory = saturated(self.cpu.read_bytes_per_s * work.read_share.value, work.ceiling_bytes_per_s.value)
        return saturated(memory, self.threads * work.thread_bytes_per_s.value, power=_THREADS_POWER)

    def matrix_ns(self, size: float, bits: float, flops: float, rows: int) -> float:
        return max(self.read_ns(size, bits), rows * flops / self.flops_per_s * 1e9)

    def attention_ns(self, flops: float, bits: float, rows: int) -> float:
        factor = (
            self.work.attention_factor.value * unpacked_bits(bits, self.work.cache_bits.value) / min(bits, WIDE_BITS)
        )
        return flops * (rows - 1) / rows * factor / self.flops_per_s * 1e9

    def expert_ns(self, size: float, bits: float, flops: float, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        products = rows.astype(np.float64) * (flops / self.flops_per_s * 1e9)
        return np.maximum(self.read_ns(size, bits), products)

    @property
    def flops_per_s(self) -> float:
        """Products of many rows."""
        thread, ceiling = self.work.thread_flops_per_s, self.work.ceiling_flops_per_s
        if self.repacked:
            thread = self.prompt.repacked_thread_flops_per_s or thread
            ceiling = self.prompt.repacked_ceiling_flops_per_s or ceiling
        return saturated(min(self.threads, self.cpu.cores) * thread.value, ceiling.value)
