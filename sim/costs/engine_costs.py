"""Cost tables of a machine with an engine: measured, counted kernel by kernel, or fitted to measured speeds.

``pytorch`` starts every kernel of every expert by itself. ``graphs`` records a layer's kernels into a graph, and one
kernel serves all of the layer's experts. For models of small experts that is most of the time of a token. What changes:

- attention, gate and shared experts of a layer are one graph: one launch in place of 15 to 20; so are all experts of a
  layer that run on the GPU, and so on. The GPU starts when the replay has ended.
- the experts of a layer that are on the GPU share their kernels, however few they are: the first bears the fixed time.
  That is 15 us per layer; 17 to 39 us were measured (vLLM's fused experts; ai-dynamo/aiconfigurator's MoE tables). An
  expert that is copied for the layer runs by itself when it has arrived, or with the others (``copied_run``).
- the host waits for a stream by spinning.

Reading of weights, arithmetic, copies and decisions take the same time in both. Engines that people run: see
``sim.costs.fitted_costs``.

*Systems of papers* have the machine's costs, and what their own program makes of them. The published times of DALI,
HybriMoE and DAOP are those of programs whose experts on the CPU are 4 to 20 times slower than the machine's memory and
arithmetic allow, where an expert has few tokens: threads are woken for each expert, and weights are unpacked anew for
each token. With w the tokens of an expert, s ``cpu_share``, k ``small_batch_flops_share`` and T ``cpu_token_ns``
(``sim.costs.software``; B and F as in ``sim.costs.roofline_costs``):

====================  ==============================================================================================
expert, CPU, few w    ``cpu_expert_ns`` + w T + max(bytes / sB, flops x w / skF, or ``small_batch_flops_per_s`` for skF)
expert, CPU, more w   ``cpu_expert_ns`` + max(bytes / sB, flops x w / sF), never less than with few
expert, GPU           the machine's, at least ``gpu_expert_ns``, + weights x ``unpack_bytes`` / B of the GPU
copy                  latency + bytes / (link rate x ``link_share``), from ``copies`` memory, of at most ``copied_bits``
                      a weight, + ``copy_ns``; ``other_weights``: with its part of the model's others;
                      ``serial_copies``: begins when the GPU has done what it was given
write-back            latency + bytes / (link rate x ``link_share``)
layer                 the machine's, after ``layer_ns`` + its experts x ``module_ns`` (in prompts + ``prompt_layer_ns``)
                      in which nothing is launched
decision              the machine's x ``plan_factor``
====================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from policies.mechanism.views import ExpertCosts, NarrowCopies
from sim.costs.cost_table import CostError, CostTable
from sim.costs.engine import PLAIN, CountedEngine, EngineError, FittedEngine, InferenceEngine, load_engine
from sim.costs.fitted_costs import fitted_costs
from sim.costs.measured_costs import measured_costs
from sim.costs.roofline_costs import EXPERT_KERNELS, roofline
from sim.costs.software import Software
from sim.costs.window_costs import window_costs
from sim.machine.hardware import Hardware
from sim.machine.sourced import Sourced
from traces.models.shape import ModelShape

MOST_TOKENS = 1 << 21  # of a step: the tables have an entry for each, 0.2 GB in all


def costs_on(
    hardware: Hardware, shape: ModelShape, max_tokens: int, engine: str | InferenceEngine = PLAIN,
    threads: int | None = None,
) -> CostTable:
    """The cost table of ``shape`` on ``hardware`` for workloads 0..``max_tokens``.

    ``engine``: its name or file. ``threads``: that compute experts on the CPU, of an engine in common use. Raises
    CostError for ``max_tokens`` < 1 or above ``MOST_TOKENS``, HardwareError for a model that a profile lacks or has
    with other sizes, and EngineError for an unknown engine, for ``threads`` of another one, and for a profile with
    another than ``pytorch``, in which it was measured.
    """
    if max_tokens < 1:
        raise CostError(f"max_tokens must be >= 1, the most tokens of any step, got {max_tokens}")
    if max_tokens > MOST_TOKENS:
        raise CostError(
            f"a step of {max_tokens:,} tokens: expected {MOST_TOKENS:,} at most; use a shorter prompt, fewer "
            f"sequences, or prefill_chunk_tokens"
        )
    used = load_engine(engine) if isinstance(engine, str) else engine
    if threads is not None and (hardware.measured or not isinstance(used, FittedEngine)):
        raise EngineError(
            f"threads: engine {used.name!r} on {hardware.name!r} takes no number of threads: expected null, or an "
            f"engine in common use on a machine that was not measured, got {threads}"
        )
    if hardware.measured:
        if not used.differs_by_name(load_engine(PLAIN)):
            raise EngineError(
                f"engine: {hardware.name!r} is a profile, whose times are those of the engine that was measured: "
                f"expected {PLAIN!r} without overrides, got {used.name!r}"
            )
        return measured_costs(hardware, shape, max_tokens)
    if isinstance(used, FittedEngine):
        if used.window is not None:
            return window_costs(shape, hardware, used, used.window, max_tokens, threads)
        return fitted_costs(shape, hardware, used, max_tokens, threads=threads)
    if used.software is None:
        costs = roofline(shape, hardware, max_tokens)
    else:
        costs = software_costs(shape, hardware, used.software, max_tokens)
    return costs if used.starts == "kernels" else graph_costs(costs, hardware, used, shape.top_k)


def graph_costs(costs: CostTable, hardware: Hardware, engine: CountedEngine, top_k: int) -> CostTable:
    """The cost table with recorded graphs. For data sheets: a profile's tables are of the engine that was measured."""
    replay_ns, spin_ns = (number.value for number in (engine.replay_ns, engine.spin_ns) if number)
    kernels_ns, launch_ns = EXPERT_KERNELS * hardware.gpu.kernel_ns, min(replay_ns, costs.expert_launch_ns)
    share = 1 / top_k if engine.copied_run == "together" else 0  # of the layer's kernels and launch, an expert
    saved_ns, first = round(kernels_ns * (1 - share)), share == 0

    def sharing(expert: ExpertCosts) -> ExpertCosts:
        """Costs of an expert that saves most of its kernels' time, while the first of a layer bears the rest."""
        none, *rest = expert.gpu_ns
        gpu_ns = (none, *(max(ns - saved_ns, 1) for ns in rest))
        return expert._replace(gpu_ns=gpu_ns, first_gpu_ns=kernels_ns * first)

    return replace(
        costs.map_experts(sharing),
        attention_launch_ns=min(replay_ns, costs.launch_ns),
        gate_launch_ns=0,
        shared_launch_ns=0,
        expert_launch_ns=int(launch_ns * share),
        first_expert_launch_ns=launch_ns * first,
        combine_launch_ns=min(replay_ns, costs.combine_launch_ns),
        head_launch_ns=min(replay_ns, costs.head_launch_ns),
        dense_launch_ns=min(replay_ns, costs.dense_launch_ns),
        sync_ns=min(spin_ns, costs.sync_ns),
        lead_ns=None,
    )


# --- systems of papers ------------------------------------------------------------------------------------------------


def software_costs(shape: ModelShape, hardware: Hardware, software: Software, max_tokens: int) -> CostTable:
    """The cost table for workloads 0..``max_tokens``."""
    machine = _as_used(hardware, software)
    costs, few = roofline(shape, machine, max_tokens), _few_tokens(shape, machine, software, max_tokens)
    changed = costs.map_experts(
        lambda expert: _in_program(expert, few[expert.expert_bytes], shape, machine, software)
    )
    slower = software.plan_factor.value if software.plan_factor else 1.0
    return replace(
        changed, layer_ns=_ns(software.layer_ns) + shape.experts * _ns(software.module_ns),
        prompt_layer_ns=_ns(software.prompt_layer_ns),
        plan_factor=costs.plan_factor * slower, serial=bool(software.serial and software.serial.value),
        serial_copies=bool(software.serial_copies and software.serial_copies.value),
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
    most, share, rate = software.small_batch_tokens, software.small_batch_flops_share, software.small_batch_flops_per_s
    if most is None or (share is None and rate is None):
        return dict.fromkeys(shape.expert_bytes_by_layer, (0,))
    flops_per_s = rate.value if rate else machine.cpu.flops_per_s * (share.value if share else 1.0)
    cpu = replace(machine.cpu, flops_per_s=flops_per_s)
    experts = roofline(shape, replace(machine, cpu=cpu), min(most.value, max_tokens)).experts
    token_ns = _ns(software.cpu_token_ns)
    return {expert.expert_bytes: [ns + w * token_ns for w, ns in enumerate(expert.cpu_ns)] for expert in experts}


def _in_program(
    expert: ExpertCosts, few: Sequence[int], shape: ModelShape, machine: Hardware, software: Software
) -> ExpertCosts:
    """An expert's costs with those of the program."""
    fixed_ns, least_ns, link = _ns(software.cpu_expert_ns), _ns(software.gpu_expert_ns), machine.link
    weights = shape.matrices_per_expert * shape.hidden * shape.expert_width
    unpacked_bytes = weights * (software.unpack_bytes.value if software.unpack_bytes else 0)
    unpack_ns = round(unpacked_bytes / machine.gpu.read_bytes_per_s * 1e9)
    _, *cpu_ns = accumulate((*few, *expert.cpu_ns[len(few) :]), max)
    gpu_ns = (expert.gpu_ns[0], *(max(ns, least_ns) + unpack_ns for ns in expert.gpu_ns[1:]))
    bits = software.copied_bits.value if software.copied_bits else float("inf")
    share = software.link_share.value if software.link_share else 1.0
    if software.other_weights and software.other_weights.value:
        share *= shape.routed_bytes / (shape.routed_bytes + shape.non_expert_bytes)
    return expert._replace(
        cpu_ns=(0, *(ns + fixed_ns for ns in cpu_ns)), gpu_ns=gpu_ns,
        copy_ns=link.expert_ns(min(expert.expert_bytes, weights * bits / 8) / share) + _ns(software.copy_ns),
        writeback_ns=link.d2h_ns(expert.expert_bytes / share),
    )


def _ns(number: Sourced[float] | None) -> int:
    """A number in whole ns; 0 where there is none."""
    return round(number.value) if number else 0


# --- narrow copies: an expert's weights in fewer bits, next to those in the bits of the model -------------------------


def narrowed(costs: CostTable, hardware: Hardware, experts: int, share: float) -> CostTable:
    """The costs with those of narrow copies, which have ``share`` of the bytes of each of a layer's ``experts``."""
    return with_narrow_copies(
        costs, experts, share, latency_ns=hardware.link.h2d_latency_ns, back_latency_ns=hardware.link.d2h_latency_ns,
        bytes_per_ns=hardware.gpu.read_bytes_per_s / 1e9,
    )


def with_narrow_copies(
    costs: CostTable, experts: int, share: float, *, latency_ns: int = 0, back_latency_ns: int = 0,
    bytes_per_ns: float | None = None,
) -> CostTable:
    """The costs, with a narrow copy of each of a layer's ``experts`` that takes ``share`` of its bytes.

    A copy to the GPU takes ``latency_ns`` and ``share`` of the rest, one back ``back_latency_ns``. The GPU takes less
    by what it need not read at ``bytes_per_ns`` (None: no less), where an expert takes no longer than for one token,
    and by less of it where the products of more tokens take longer than reading. What it takes to unpack the weights is
    not counted.
    """
    latencies_ns = latency_ns, back_latency_ns
    return costs.map_experts(
        lambda one: one._replace(narrow=NarrowCopies(experts, _narrowed(one, share, latencies_ns, bytes_per_ns)))
    )


def _narrowed(
    costs: ExpertCosts, share: float, latencies_ns: tuple[int, int], bytes_per_ns: float | None
) -> ExpertCosts:
    one_ns, (copy_latency_ns, back_latency_ns) = costs.gpu_ns[1], latencies_ns
    saved_ns = 0 if bytes_per_ns is None else round((1 - share) * costs.expert_bytes / bytes_per_ns)
    saved_ns = min(saved_ns, one_ns - 1)
    return costs._replace(
        gpu_ns=(0, *(ns - max(0, saved_ns - (ns - one_ns)) for ns in costs.gpu_ns[1:])),
        copy_ns=max(1, _of_bytes(costs.copy_ns, share, copy_latency_ns)),
        writeback_ns=_of_bytes(costs.writeback_ns, share, back_latency_ns),
        expert_bytes=max(1, round(costs.expert_bytes * share)),
        read_ns=_of_bytes(costs.read_ns, share, 0),
    )


def _of_bytes(transfer_ns: int, share: float, latency_ns: int) -> int:
    """Time in ns of a transfer of ``share`` of the bytes."""
    fixed_ns = min(latency_ns, transfer_ns)
    return fixed_ns + round((transfer_ns - fixed_ns) * share)
