"""Costs of narrow copies: an expert's weights in fewer bits, next to those in the bits of the model."""

from __future__ import annotations

from dataclasses import replace

from policies.mechanism.views import ExpertCosts, NarrowCopies
from sim.costs.cost_table import CostTable


def with_narrow_copies(
    costs: CostTable, experts: int, share: float, *, latency_ns: int = 0, bytes_per_ns: float | None = None
) -> CostTable:  # fmt: skip
    """The table, with a narrow copy of each of a layer's ``experts`` that takes ``share`` of its bytes.

    A copy to the GPU takes ``latency_ns`` and ``share`` of the rest. The GPU takes less by what it need not read at
    ``bytes_per_ns`` (None: no less), where an expert takes no longer than for one token, and by less of it where the
    products of more tokens take longer than reading. What it takes to unpack the weights is not counted.
    """
    tables = {id(expert): expert for expert in costs.experts}
    narrow = {key: _narrowed(expert, share, latency_ns, bytes_per_ns) for key, expert in tables.items()}
    return replace(
        costs, experts=tuple(e._replace(narrow=NarrowCopies(experts, narrow[id(e)])) for e in costs.experts)
    )


def _narrowed(costs: ExpertCosts, share: float, latency_ns: int, bytes_per_ns: float | None) -> ExpertCosts:
    fixed_ns = min(latency_ns, costs.copy_ns)
    saved_ns = 0 if bytes_per_ns is None else round((1 - share) * costs.expert_bytes / bytes_per_ns)
    one_ns = costs.gpu_ns[1]
    saved_ns = min(saved_ns, one_ns - 1)
    return costs._replace(
        gpu_ns=(0, *(ns - max(0, saved_ns - (ns - one_ns)) for ns in costs.gpu_ns[1:])),
        copy_ns=max(1, fixed_ns + round((costs.copy_ns - fixed_ns) * share)),
        writeback_ns=round(costs.writeback_ns * share),
        expert_bytes=max(1, round(costs.expert_bytes * share)),
    )
