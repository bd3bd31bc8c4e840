"""Costs and traces small enough to compute by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts
from sim.machine.devices import ResultPath
from sim.machine.plan_costs import PlanCost, PlanCosts
from traces.trace import Trace
from trilane.testing.random_worlds import ConstantSteps
from trilane.testing.worlds import token_places, toy_shape


def uniform_costs(
    layers: int = 2,
    *,
    max_tokens: int = 64,
    gpu_ns: int = 5,  # an expert, the same for every workload
    cpu_ns: int = 7,  # an expert, per token
    first_cpu_ns: int = 0,
    first_gpu_ns: int = 0,
    copy_ns: int = 20,
    writeback_ns: int = 0,
    expert_bytes: int = 100,
    attention_ns: int = 10,
    dense_ns: int = 0,
    gate_ns: int = 2,
    speculate_ns: int = 2,
    estimator_ns: int = 3,
    shared_ns: int = 0,
    combine_ns: int = 1,
    head_ns: int = 4,
    routing_ns: int = 1,
    activations_ns: int = 1,
    result_ns: int = 1,
    attention_launch_ns: int = 1,
    gate_launch_ns: int = 0,
    shared_launch_ns: int = 0,
    expert_launch_ns: int = 1,
    first_expert_launch_ns: int = 0,
    combine_launch_ns: int = 1,
    head_launch_ns: int = 1,
    dense_launch_ns: int = 0,
    sync_ns: int = 1,
    plan_ns: int = 1,
    foresee_ns: int = 1,
    cpu_permille: int = 1000,
    copy_permille: int = 1000,
    both_ways_permille: int = 1000,
    gpu_permille: int = 1000,
    gpu_with_cpu_permille: int = 1000,
    cpu_with_gpu_permille: int = 1000,
    lead_ns: int | None = None,
    tail_ns: int = 0,
    result_path: ResultPath = "direct",
) -> CostTable:
    """A table of small constants. Validated."""
    workloads = range(max_tokens + 1)
    expert = ExpertCosts(
        tuple(gpu_ns * (w > 0) for w in workloads), tuple(cpu_ns * w for w in workloads), first_cpu_ns, copy_ns,
        expert_bytes, cpu_permille=cpu_permille, copy_permille=copy_permille, first_gpu_ns=first_gpu_ns,
        both_ways_permille=both_ways_permille, writeback_ns=writeback_ns,
    )
    steps = ConstantSteps(
        StepCosts(
            attention_ns, dense_ns, gate_ns, speculate_ns, estimator_ns, shared_ns, combine_ns, head_ns, routing_ns,
            activations_ns, result_ns,
        )
    )
    decisions = PlanCosts({"default": PlanCost(plan_ns, 0)}, {"default": PlanCost(foresee_ns, 0)})
    costs = CostTable(
        (expert,) * layers, steps, result_path, attention_launch_ns, gate_launch_ns, shared_launch_ns, expert_launch_ns,
        combine_launch_ns, head_launch_ns, dense_launch_ns, sync_ns, decisions,
        first_expert_launch_ns=first_expert_launch_ns,
        gpu_permille=gpu_permille, gpu_with_cpu_permille=gpu_with_cpu_permille,
        cpu_with_gpu_permille=cpu_with_gpu_permille, lead_ns=lead_ns, tail_ns=tail_ns,
    )
    costs.validate()
    return costs


# --- traces -----------------------------------------------------------------------------------------------------------

Routing = Sequence[Sequence[Sequence[int]]]


def toy_trace(routing: Routing, *, prompt_tokens: int = 0, experts: int | None = None, **shape_fields: Any) -> Trace:
    """One sequence written out: ``routing[token][layer]`` lists the token's experts, the best first.

    The first ``prompt_tokens`` tokens are prefill, the others one decode step each. Weights are equal. ``experts``
    defaults to the largest id + 1.
    """
    ids = np.asarray(routing, np.int16)
    tokens, layers, top_k = ids.shape
    shape = toy_shape(layers, experts or int(ids.max()) + 1, top_k, **shape_fields)
    tensors = {
        **token_places([(prompt_tokens, tokens - prompt_tokens)]),
        "topk_ids": ids,
        "topk_weights": np.full(ids.shape, 1 / top_k, np.float16),
    }
    return Trace.from_tensors(shape, tensors, {"model": "toy"})


# --- headers of safetensors files -------------------------------------------------------------------------------------

def declare_empty(path: Path, name: str, dtype: str, shape: Sequence[int]) -> None:
    """Add a tensor without content, of whatever type and shape, to the header of a file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}
    text = json.dumps({**json.loads(data[8:end]), name: entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
