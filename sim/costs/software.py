"""Numbers of a program on a machine whose kernels are counted (formulas: ``sim.costs.engine_costs``), of one on
several GPUs (``trilane.engines.layer_split``), and of attention on the CPU (``sim.costs.processors``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from sim.costs.kernel_costs import Copies
from sim.machine.sourced import Sourced
from trilane.common.hints import above, at_least, at_most, between

Share = Annotated[float, above(0), at_most(1)]
Bits = Annotated[float, above(0), at_most(64)]
Factor = Annotated[float, above(0), at_most(1000)]
Ns = Annotated[float, between(0, 1e12)]
Rate = Annotated[float, above(0), at_most(1e18)]
SplitMode = Literal["layer", "row", "tensor", "graph"]  # of -sm


class NumberRange(NamedTuple):
    """Values of a number in the quickest and the slowest of several programs."""

    quick: float
    slow: float


class Calibrated(NamedTuple):
    """A number that a program's own times set, and why it is the one to be set at its place."""

    number: str
    why: str


class Software(NamedTuple):
    """Numbers of a system's own program on a machine, where kernels are counted; what is absent is the machine's.

    Up to ``small_batch_tokens`` tokens an expert on the CPU takes ``cpu_token_ns`` for each, and reaches
    ``small_batch_flops_share`` of the arithmetic, or ``small_batch_flops_per_s`` on any machine.
    """

    first_cpu_ns: Sourced[Ns] | None = None  # extra time of a layer's first CPU expert, in place of the machine's
    cpu_expert_ns: Sourced[Ns] | None = None  # fixed time of every CPU expert
    cpu_share: Sourced[Factor] | None = None  # of the CPU's rates, of memory and arithmetic
    small_batch_tokens: Sourced[Annotated[int, at_least(1)]] | None = None
    small_batch_flops_share: Sourced[Share] | None = None
    small_batch_flops_per_s: Sourced[Rate] | None = None
    cpu_token_ns: Sourced[Ns] | None = None
    gpu_expert_ns: Sourced[Ns] | None = None  # least time of every GPU expert, whose kernels the program starts slowly
    unpack_bytes: Sourced[Bits] | None = None  # that the GPU reads and writes for each weight, before an expert runs
    copy_ns: Sourced[Ns] | None = None  # fixed time that the copy of an expert takes in addition
    copied_bits: Sourced[Bits] | None = None  # of each weight of an expert: its copy on the GPU has no more
    copies: Sourced[Copies] | None = None  # host memory from which experts are copied
    link_share: Sourced[Share] | None = None  # of the link's rate, that copies of experts reach
    serial_copies: Sourced[bool] | None = None  # whether a copy that a layer waits for waits for the GPU's work first
    other_weights: Sourced[bool] | None = None  # whether the model's other weights are copied along with the experts
    module_ns: Sourced[Ns] | None = None  # of the host for each expert of a layer, used or not, before the layer
    layer_ns: Sourced[Ns] | None = None  # of the host before each layer, while nothing is launched
    prompt_layer_ns: Sourced[Ns] | None = None  # the same in a prompt, in addition
    plan_factor: Sourced[Factor] | None = None  # time of decisions over the machine's
    serial: Sourced[bool] | None = None  # whether the CPU's experts of a layer wait for the GPU's, and for their copies


class SumsWork(NamedTuple):
    """Sums of all cards' results, in a ring of 2 (cards - 1) steps."""

    step_ns: Sourced[Ns]  # of each step through the host's memory, whatever the size
    host_bytes_per_s: Sourced[Rate]  # of kernels that read the host's memory, in addition to both slots
    step_bytes: Sourced[Annotated[int, between(1, 4)]]  # of an element, of one row a sequence
    prompt_bytes: Sourced[Annotated[int, between(1, 4)]]  # of more rows
    shared: Sourced[bool]  # whether shared experts have a sum of their own
    copied: Sourced[bool]  # whether prompts copy the host's experts to the first card; else the CPU computes them


class CardsWork(NamedTuple):
    """Several GPUs, each with a range of layers. ``copies``: of a prompt's inputs; with more than one its pieces follow
    one another through the cards, if these have all experts."""

    hand_over_ns: Sourced[Ns]  # of hidden states from one card to the next, through the host's memory
    copies: Sourced[Annotated[int, between(1, 64)]]
    turn_share: Mapping[str, Sourced[Share]]  # of a card's speed that it has in turns, while it decodes, by vendor
    launches_ns: Sourced[Ns] | None = None  # of a layer, in addition: with copies, its kernels are started one by one
    gather_ns: Sourced[Ns] | None = None  # of rows: a product's input to the other cards, and its results back
    row_starts_ns: Sourced[Ns] | None = None  # of rows: of a layer, whose kernels are started one by one
    sums: SumsWork | None = None  # of tensors: of what the cards have computed


class CpuAttention(NamedTuple):
    """Kernels of attention on the CPU: in tiles of queries, or of one query after another."""

    tile_rows: Sourced[Annotated[int, at_least(1)]]  # fewer of a sequence are computed one after another
    tile_bits: Sourced[Bits]  # so are keys and values of fewer
    products_per_cycle: Sourced[Factor]  # of tiles, as those of weights
    row_products_per_cycle: Sourced[Factor]  # of one query after another
    pair_cycles: Sourced[Annotated[float, between(0, 1e6)]]  # then, of a query of one head and a key, of any width
    unpack_cycles: Sourced[Annotated[float, between(0, 1e6)]]  # then, of each element of fewer than 16 bits
