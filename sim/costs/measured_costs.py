"""Cost tables of measured machines, from the tables of their profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts
from sim.costs.roofline_costs import ATTENTION_KERNELS, EXPERT_KERNELS, GATE_KERNELS
from sim.machine.hardware import Hardware
from sim.machine.interpolation import Table, table_ns, whole
from sim.machine.plausibility import HardwareError
from sim.machine.profile import MeasuredModel
from traces.models.shape import ModelShape


def measured_costs(hardware: Hardware, shape: ModelShape, max_tokens: int) -> CostTable:
    """The cost table of ``shape`` on a measured machine for workloads 0..``max_tokens``: every cost from the tables of
    its profile, but decisions and the path of results, which are the machine's.

    Raises HardwareError for a model that the profile lacks or has with other sizes.
    """
    where = f"profile {hardware.name!r}"
    model = hardware.measured_profile().model_of(shape, where)
    if shape.dense_layers and model.dense_ffn is None:
        raise HardwareError(f"{where}: model {shape.name!r} has dense layers, of which none was measured")
    steps = MeasuredSteps(model, shape.dense_layers)
    shared = EXPERT_KERNELS if model.shared else 0
    kernels = ATTENTION_KERNELS + GATE_KERNELS + shared  # of a layer's launch, which was measured as a whole
    gate_ns, shared_ns = (model.launch.ns * part // kernels for part in (GATE_KERNELS, shared))
    return CostTable(
        experts=(_expert_costs(model, steps.step(1, (1,)), max_tokens),) * shape.moe_layers,
        steps=steps,
        attention_launch_ns=model.launch.ns - gate_ns - shared_ns,
        gate_launch_ns=gate_ns,
        shared_launch_ns=shared_ns,
        expert_launch_ns=model.expert_launch.ns,
        combine_launch_ns=model.combine_launch.ns,
        head_launch_ns=model.head_launch.ns,
        dense_launch_ns=shape.dense_layers * model.dense_launch.ns if model.dense_launch else 0,
        sync_ns=model.sync.ns,
        gpu_permille=model.gpu_permille.permille,
        gpu_with_cpu_permille=model.gpu_with_cpu_permille.permille if model.gpu_with_cpu_permille else 1000,
        cpu_with_gpu_permille=model.cpu_with_gpu_permille.permille if model.cpu_with_gpu_permille else 1000,
        result_path=hardware.link.result_path,
        plan_costs=hardware.decisions,
        lead_ns=model.launch_lead.ns if model.launch_lead else None,
        tail_ns=model.launch_tail.ns if model.launch_tail else 0,
    )


def _expert_costs(model: MeasuredModel, one: StepCosts, max_tokens: int) -> ExpertCosts:
    """Tables of one expert; ``one`` is a step of one token, whose parts lie between two layers' experts."""
    return ExpertCosts(
        gpu_ns=_rising(model.expert_gpu, max_tokens),
        cpu_ns=_rising(model.expert_cpu, max_tokens),
        first_cpu_ns=model.first_cpu_expert.ns,
        copy_ns=max(model.copy.ns, 1),
        expert_bytes=model.sizes.expert_bytes,
        writeback_ns=model.writeback.ns,
        cpu_permille=model.cpu_permille.permille,
        copy_permille=model.copy_permille.permille,
        between_ns=one.combine_ns + one.attention_ns + one.gate_ns + one.routing_ns + model.sync.ns,
    )


def _rising(table: Table, max_tokens: int) -> tuple[int, ...]:
    return table_ns(np.array([table(workload) for workload in range(max_tokens + 1)], np.float64))


@dataclass(frozen=True)
class MeasuredSteps:
    """Step costs outside the routed experts, from a model's tables."""

    model: MeasuredModel
    dense_layers: int

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        m, attention_ns = self.model, self._attention_ns(tokens, context)
        dense_ns = attention_ns + m.dense_ffn(tokens) if m.dense_ffn else 0
        return StepCosts(
            attention_ns=whole(attention_ns),
            dense_ns=whole(self.dense_layers * dense_ns),
            gate_ns=whole(m.gate(tokens)),
            speculate_ns=whole(m.speculate(tokens)),
            estimator_ns=whole(m.estimator(tokens)),
            shared_ns=whole(m.shared(tokens)) if m.shared else 0,
            combine_ns=whole(m.combine(tokens)),
            head_ns=whole(m.head(len(context))),
            routing_ns=whole(m.routing(tokens)),
            activations_ns=whole(m.activations(tokens)),
            result_ns=whole(m.result(tokens)),
        )

    def _attention_ns(self, tokens: int, context: Sequence[int]) -> float:
        """Time in ns of one layer's norms and attention.

        In decode all sequences attend in one call, over the longest of their contexts. In prefill those of different
        lengths take the mean of what batches of each of them would. As in the roofline, contexts that hold no more than
        this step's tokens are prefilled from nothing; otherwise every sequence has an even share of the tokens.
        """
        batch, fresh = len(context), sum(context) == tokens
        if tokens == batch:
            return self.model.attention_decode(batch, max(context))
        ns = [self._prefill_ns(batch, length if fresh else min(tokens / batch, length), length) for length in context]
        return sum(ns) / batch

    def _prefill_ns(self, batch: int, new: float, length: int) -> float:
        """Time in ns of ``batch`` sequences of ``length`` tokens, ``new`` of them in this step.

        A chunk is a prefill of its own and reads the cache of earlier tokens once, as a decode step does; its
        further products with that cache are in no table.
        """
        decode = self.model.attention_decode
        return self.model.attention_prefill(batch, new) + max(decode(batch, length) - decode(batch, new), 0)
