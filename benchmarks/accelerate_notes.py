"""Notes on the figures of ``beside_accelerate``."""

from __future__ import annotations

import time
from statistics import median

import torch

from realrun.generation.hosted_model import HostedModel
from realrun.machine.host_lanes import HostLanes
from realrun.machine.lanes import Machine
from traces.models.shape import ModelShape


def about(shape: ModelShape, memory_gb: float, lanes: Machine) -> list[str]:
    """The runs and their rules."""
    notes = [
        f"model: Qwen3-MoE with random weights in bfloat16, {shape.moe_layers} layers of {shape.experts} experts, "
        f"{shape.top_k} per token, {shape.expert_bytes_by_layer[0] / 1e6:.1f} MB each, "
        f"{shape.routed_bytes / 1e9:.2f} GB in all; a trained model's routing has more regularities for caches to use",
        "TPOT: median of all decode steps of all runs, after one warm-up run; the programs take turns in alternating "
        "order; greedy decoding, one sequence",
        f"{memory_gb:g} GB of GPU memory hold all weights except experts. In addition, accelerate holds all experts of "
        "as many layers as leave room for the experts of one more layer, which are copied and dropped; Trilane (ours)"
        " holds the KV cache, staging slots and as many experts as fit",
        "accelerate copies the weights of a called module as a whole, which means all experts of a layer, and then "
        "drops them",
        "Trilane's planners use microbenchmarks of this machine, and are calibrated on other prompts",
    ]
    return notes + (_on_host_lanes(lanes) if isinstance(lanes, HostLanes) else [])


def _on_host_lanes(lanes: HostLanes) -> list[str]:
    return [
        "no GPU: one core, with one thread of torch, stands in for it, for accelerate and for Trilane; Trilane also "
        "uses the machine's other core for experts and copies, like the CPU next to a GPU",
        f"the link is a memory copy, limited to {lanes.settings.link_bytes_per_s / 1e9:g} GB/s, for both. Without "
        "a GPU accelerate offloads to disk only, and its weights are mapped from the page cache; here they are in "
        "ordinary memory, as with a GPU, and its hooks copy them over the link at each access",
        "the row without a link is accelerate's disk offload without changes: experts are computed in the mapped file "
        "itself, so nothing is copied, only the routed experts are read, and the limit has no effect. It is the cost "
        "of this model when the core can read all of it directly, and not a case of offloading",
    ]


def link_beside_copies(model: HostedModel, lanes: Machine) -> list[str]:
    """The rate of plain copies of experts, one after another, to new places, next to the pace of the link."""
    if not isinstance(lanes, HostLanes):
        return []
    targets = [torch.zeros_like(model.store.buffer(0, expert)) for expert in range(model.shape.experts)]
    times_ns = []
    for layer in range(model.shape.moe_layers):
        for expert, target in enumerate(targets):
            begin = time.perf_counter_ns()
            target.copy_(model.store.buffer(layer, expert))
            times_ns.append(time.perf_counter_ns() - begin)
    rate = targets[0].numel() / median(times_ns)
    return [
        f"copied without a limit, experts move at {rate:.1f} GB/s here. The link is slower, as real links are: "
        "a core that computes an expert as fast as it reads it has to wait for one that is copied, as a GPU has to"
    ]
