"""Cost tables of a runtime: kernels started one by one, or recorded as graphs and shared between experts.

The numbers of presets and of parts are those of a program that starts every kernel of every expert by itself, as
PyTorch does: ``eager``. The engines in use (llama.cpp, KTransformers, vLLM) record a layer's kernels into a graph, and
one kernel serves all of the layer's experts: ``graphs``. For models of small experts that is most of the time of a
token. What changes:

- attention, gate and shared experts of a layer are one graph: one launch in place of 15 to 20; so are all experts of a
  layer that run on the GPU, and so on. The GPU starts when the replay has ended.
- the experts of a layer share their kernels: each takes its share of their fixed time. In all that is 15 us per layer;
  17 to 39 us were measured (vLLM's fused experts; ai-dynamo/aiconfigurator's MoE tables).
- the host waits for a stream by spinning.

Reading of weights, arithmetic, copies and decisions take the same time as in ``eager``. The times of a replay and of
spinning are in ``runtimes.yaml``, with their sources.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostError, CostTable
from sim.costs.measured_costs import measured_costs
from sim.costs.roofline_costs import EXPERT_KERNELS, roofline
from sim.machine.hardware import Hardware
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced, read_file
from traces.models.shape import ModelShape

Runtime = Literal["eager", "graphs"]
MOST_TOKENS = 1 << 21  # of a step: the tables have an entry for each, 0.2 GB in all
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)


class GraphNumbers(NamedTuple):
    """Host times of a runtime with graphs."""

    replay_ns: Sourced[int]  # to start one graph
    spin_ns: Sourced[int]  # to wait for a stream


@cache
def graph_numbers() -> GraphNumbers:
    """The numbers of ``runtimes.yaml``. Raises HardwareError for a faulty file."""
    found: GraphNumbers = read_file(GraphNumbers, Path(str(files("sim.costs"))) / "runtimes.yaml")
    return found


def costs_on(
    hardware: Hardware, shape: ModelShape, max_tokens: int, runtime: Runtime = "eager", batch: int = 1
) -> CostTable:
    """The cost table of ``shape`` on ``hardware`` for workloads 0..``max_tokens``: measured, or else a roofline.

    ``batch``: sequences of a decode step, whose experts share kernels in ``graphs``. Raises CostError for
    ``max_tokens`` < 1 or above ``MOST_TOKENS``, and HardwareError for a model that a profile lacks or has with other
    sizes, and for a profile in another runtime than that in which it was measured.
    """
    if max_tokens > MOST_TOKENS:
        raise CostError(
            f"a step of {max_tokens:,} tokens: expected {MOST_TOKENS:,} at most; use a shorter prompt, fewer "
            f"sequences, or prefill_chunk_tokens"
        )
    if not hardware.measured:
        costs = roofline(shape, hardware, max_tokens)
        sharing = min(shape.top_k * batch, shape.experts)
        return costs if runtime == "eager" else graph_costs(costs, hardware, sharing)
    if runtime != "eager":
        raise HardwareError(
            f"runtime: {hardware.name!r} is a profile, whose times are those of the runtime that was measured: "
            f"expected 'eager', got {runtime!r}"
        )
    return measured_costs(hardware, shape, max_tokens)


def graph_costs(costs: CostTable, hardware: Hardware, sharing: int) -> CostTable:
    """The cost table with recorded graphs. ``sharing``: experts of a layer that share their kernels in a decode step.

    Meant for data sheets: a profile's tables are of the runtime that was measured.
    """
    saved_ns = round(EXPERT_KERNELS * hardware.gpu.kernel_ns * (1 - 1 / sharing))
    numbers = graph_numbers()
    replay_ns, spin_ns = numbers.replay_ns.value, numbers.spin_ns.value
    return replace(
        costs.map_experts(lambda expert: _shared(expert, saved_ns)),
        attention_launch_ns=min(replay_ns, costs.launch_ns),
        gate_launch_ns=0,
        shared_launch_ns=0,
        expert_launch_ns=min(replay_ns, costs.expert_launch_ns) // sharing,
        combine_launch_ns=min(replay_ns, costs.combine_launch_ns),
        head_launch_ns=min(replay_ns, costs.head_launch_ns),
        dense_launch_ns=min(replay_ns, costs.dense_launch_ns),
        sync_ns=min(spin_ns, costs.sync_ns),
        lead_ns=None,
    )


def _shared(expert: ExpertCosts, saved_ns: int) -> ExpertCosts:
    """An expert that shares its kernels with others."""
    first, *rest = expert.gpu_ns
    return expert._replace(gpu_ns=(first, *(max(ns - saved_ns, 1) for ns in rest)))
