"""Cost tables of a paper's system: the machine's, and what the system's own program makes of them.

The published times of DALI, HybriMoE and DAOP are those of programs whose experts on the CPU are 4 to 20 times slower
than the machine's memory and arithmetic allow, where an expert has few tokens: threads are woken for each expert, and
weights are unpacked anew for each token. With w the tokens of an expert, s ``cpu_share``, k ``small_batch_flops_share``
and T ``cpu_token_ns`` (``sim.costs.engine.Software``; B and F as in ``sim.costs.roofline_costs``):

====================  ==============================================================================================
expert, CPU, few w    ``cpu_expert_ns`` + w T + max(bytes / sB, flops x w / skF)
expert, CPU, more w   ``cpu_expert_ns`` + max(bytes / sB, flops x w / sF), never less than with few
expert, GPU           the machine's, at least ``gpu_expert_ns``
copy                  the machine's, from ``copies`` memory, of at most ``copied_bits`` a weight, + ``copy_ns``
layer                 the machine's, after ``layer_ns`` (in prompts + ``prompt_layer_ns``) in which nothing is launched
decision              the machine's x ``plan_factor``
====================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable
from sim.costs.engine import Software
from sim.costs.roofline_costs import roofline
from sim.machine.devices import HostLink
from sim.machine.hardware import Hardware
from sim.machine.sourced import Sourced
from traces.models.shape import ModelShape


def software_costs(shape: ModelShape, hardware: Hardware, software: Software, max_tokens: int) -> CostTable:
    """The cost table for workloads 0..``max_tokens``."""
    machine = _as_used(hardware, software)
    costs, few = roofline(shape, machine, max_tokens), _few_tokens(shape, machine, software, max_tokens)
    changed = costs.map_experts(lambda expert: _expert(expert, few[expert.expert_bytes], shape, machine.link, software))
    slower = software.plan_factor.value if software.plan_factor else 1.0
    return replace(
        changed, layer_ns=_ns(software.layer_ns), prompt_layer_ns=_ns(software.prompt_layer_ns),
        plan_factor=costs.plan_factor * slower, serial=bool(software.serial and software.serial.value),
    )


def _as_used(hardware: Hardware, software: Software) -> Hardware:
    """The machine as the program uses it."""
    share = software.cpu_share.value if software.cpu_share else 1.0
    first_ns = _ns(software.first_cpu_ns) if software.first_cpu_ns else hardware.cpu.first_expert_ns
    copies = software.copies.value if software.copies else hardware.link.copies
    cpu = replace(
        hardware.cpu, read_bytes_per_s=hardware.cpu.read_bytes_per_s * share,
        flops_per_s=hardware.cpu.flops_per_s * share, first_expert_ns=first_ns,
    )
    return replace(hardware, cpu=cpu, link=replace(hardware.link, copies=copies))


def _few_tokens(shape: ModelShape, machine: Hardware, software: Software, max_tokens: int) -> dict[int, Sequence[int]]:
    """CPU times of experts with few tokens, by their bytes; only that of no token where few cost as much as many."""
    most, share = software.small_batch_tokens, software.small_batch_flops_share
    if most is None or share is None:
        return dict.fromkeys(shape.expert_bytes_by_layer, (0,))
    cpu = replace(machine.cpu, flops_per_s=machine.cpu.flops_per_s * share.value)
    experts = roofline(shape, replace(machine, cpu=cpu), min(most.value, max_tokens)).experts
    each_ns = _ns(software.cpu_token_ns)
    return {expert.expert_bytes: [ns + w * each_ns for w, ns in enumerate(expert.cpu_ns)] for expert in experts}


def _expert(
    expert: ExpertCosts, few: Sequence[int], shape: ModelShape, link: HostLink, software: Software
) -> ExpertCosts:
    """An expert's costs with those of the program."""
    fixed_ns, least_ns = _ns(software.cpu_expert_ns), _ns(software.gpu_expert_ns)
    _, *cpu_ns = accumulate((*few, *expert.cpu_ns[len(few) :]), max)
    gpu_ns = (expert.gpu_ns[0], *(max(ns, least_ns) for ns in expert.gpu_ns[1:]))
    bits = software.copied_bits.value if software.copied_bits else float("inf")
    copied = min(expert.expert_bytes, shape.matrices_per_expert * shape.hidden * shape.expert_width * bits / 8)
    copy_ns = link.expert_ns(copied) + _ns(software.copy_ns)
    return expert._replace(cpu_ns=(0, *(ns + fixed_ns for ns in cpu_ns)), gpu_ns=gpu_ns, copy_ns=copy_ns)


def _ns(number: Sourced[float] | None) -> int:
    """Whole ns; none, no time."""
    return round(number.value) if number else 0
