"""How kernels are started: by recorded graphs and shared between experts, or one by one.

The numbers of presets and of parts are those of a program that starts every kernel of every expert by itself, as
PyTorch does: ``eager``. The engines that people run (llama.cpp, KTransformers, vLLM) record a layer's kernels into a
graph, and one kernel serves all of the layer's experts: ``graphs``. For models of small experts that is most of the
time of a token. What changes:

- attention, gate and shared experts of a layer are one graph: one launch in place of 15 to 20; so are all experts of a
  layer that run on the GPU, and so on. A replay takes 3.1 us (RTX 4090; paiml/realizar issue 113), and the GPU starts
  when it is over.
- the experts of a layer share their kernels: each bears its share of their fixed time. In all that is 15 us a layer;
  17 to 39 us were measured (vLLM's fused experts; ai-dynamo/aiconfigurator's MoE tables).
- the host waits for a stream by spinning: 6 us (typical, 5-10; an estimate).

Reading weights, arithmetic, copies and decisions take what they take in ``eager``.
"""

from __future__ import annotations

from dataclasses import replace

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable
from sim.costs.roofline_costs import EXPERT_KERNELS
from sim.machine.hardware import Hardware

RUNTIMES = ("eager", "graphs")
REPLAY_NS = 3_100
SPIN_NS = 6_000


def graph_costs(costs: CostTable, hardware: Hardware, sharing: int) -> CostTable:
    """The cost table with recorded graphs. ``sharing``: experts of a layer that share their kernels in a decode step.

    Meant for data sheets: a profile's tables are of the runtime that was measured.
    """
    saved = round(EXPERT_KERNELS * hardware.gpu.kernel_ns * (1 - 1 / sharing))
    tables = {id(expert): expert for expert in costs.experts}  # layers share them
    by_expert = {key: _shared(expert, saved) for key, expert in tables.items()}
    return replace(
        costs,
        experts=tuple(by_expert[id(expert)] for expert in costs.experts),
        attention_launch_ns=min(REPLAY_NS, costs.launch_ns),
        gate_launch_ns=0,
        shared_launch_ns=0,
        expert_launch_ns=min(REPLAY_NS, costs.expert_launch_ns) // sharing,
        combine_launch_ns=min(REPLAY_NS, costs.combine_launch_ns),
        head_launch_ns=min(REPLAY_NS, costs.head_launch_ns),
        dense_launch_ns=min(REPLAY_NS, costs.dense_launch_ns),
        sync_ns=min(SPIN_NS, costs.sync_ns),
        lead_ns=None,
    )


def _shared(expert: ExpertCosts, saved_ns: int) -> ExpertCosts:
    """An expert whose kernels are not all its own."""
    first, *rest = expert.gpu_ns
    return expert._replace(gpu_ns=(first, *(max(ns - saved_ns, 1) for ns in rest)))
