"""Numbers of an engine on a machine, fitted to measured speeds: the times of whole layers, and shares of a data sheet's
rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from sim.machine.sourced import Sourced
from trilane.common.hints import above, at_least, at_most, between

Share = Annotated[float, above(0), at_most(1)]
Bits = Annotated[float, above(0), at_most(64)]
Factor = Annotated[float, above(0), at_most(1000)]
Rate = Annotated[float, above(0), at_most(1e18)]
Ns = Annotated[float, between(0, 1e12)]
Cached = Literal["grouped", "latent"]
LayerKind = Literal["grouped", "latent", "state"]
PromptExperts = Literal["copied", "copied ahead", "computed"]
Copies = Literal["pinned", "pageable"]


class GpuWork(NamedTuple):
    """The GPU, in an engine that was fitted to measured speeds.

    Times of a layer hold for a card of ``layer_ops_per_s`` and grow as (that / its own) ** ``layer_exponent``. Rates of
    products are shares of the card's 8-bit integer rate; of the rows of a step, all but the first take time in addition
    to reading the weights.
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
    cache_bits: Sourced[Factor]  # keys and values of fewer than 16 bits take the time of so many, to be unpacked
    product_share: Sourced[Share]
    expert_product_share: Sourced[Share]
    attention_share: Sourced[Share]
    expert_ns: Sourced[Ns]  # of an expert's own kernels, where those of many rows are multiplied one after another
    vendor_product_share: Mapping[str, Sourced[Factor]]


class CpuWork(NamedTuple):
    """The CPU. Rates saturate: the memory's near ``ceiling_bytes_per_s``, that of threads near the memory's."""

    read_share: Sourced[Factor]  # of the machine's ``cpu.read_bytes_per_s``
    ceiling_bytes_per_s: Sourced[Rate]
    thread_bytes_per_s: Sourced[Rate]
    layer_ns: Sourced[Ns]  # a layer's experts on the CPU: handing over, waiting, a parallel region
    region_ns: Sourced[Ns]  # a parallel region of a machine that computes everything on the CPU
    state_ns: Sourced[Ns]  # of a layer of linear attention on the CPU, in addition
    cache_factor: Mapping[Cached, Sourced[Factor]]
    cache_bits: Sourced[Factor]  # as the GPU's
    thread_flops_per_s: Sourced[Rate]
    ceiling_flops_per_s: Sourced[Rate]
    attention_factor: Sourced[Factor]  # time of attention's products over that of as many others
    every_layer: Sourced[bool] | None = None  # whether it takes its turn in every layer, after the GPU's experts and
    # also without any of its own: ``layer_ns`` is then a wait of every layer


class PromptWork(NamedTuple):
    """Prompts: pieces, and experts that are not on the GPU."""

    piece_tokens: Sourced[Annotated[int, at_least(1)]]
    experts: Sourced[PromptExperts]  # "copied ahead": those of the next layer while one is computed
    copies_from_tokens: Sourced[Annotated[int, at_least(1)]]  # of a piece; experts of fewer are computed
    copies: Sourced[Copies]  # host memory from which experts are copied; what follows limits those from pageable memory
    link_share: Sourced[Factor]  # of the link's rate
    memory_share: Sourced[Factor]  # of what the CPU reads
    staging_bytes_per_s: Sourced[Rate]  # of the driver's thread that puts them into pinned memory first
    repacked_thread_flops_per_s: Sourced[Rate] | None = None  # of weights in the CPU's own order of rows
    repacked_ceiling_flops_per_s: Sourced[Rate] | None = None
