"""Costs of narrow copies: an expert's weights in fewer bits, next to those in the bits of the model."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.views import ExpertCosts, NarrowCopies


def with_narrow_copies(
    layers: Sequence[ExpertCosts], experts: int, share: float, *, latency_ns: int = 0, back_latency_ns: int = 0,
    bytes_per_ns: float | None = None,
) -> tuple[ExpertCosts, ...]:  # fmt: skip
    """The costs by layer, with a narrow copy of each of a layer's ``experts`` that takes ``share`` of its bytes.

    A copy to the GPU takes ``latency_ns`` and ``share`` of the rest, one back ``back_latency_ns``. The GPU takes less
    by what it need not read at ``bytes_per_ns`` (None: no less), where an expert takes no longer than for one token,
    and by less of it where the products of more tokens take longer than reading. What it takes to unpack the weights is
    not counted.
    """
    narrow = {id(costs): _narrowed(costs, share, (latency_ns, back_latency_ns), bytes_per_ns) for costs in layers}
    return tuple(costs._replace(narrow=NarrowCopies(experts, narrow[id(costs)])) for costs in layers)


def _narrowed(
    costs: ExpertCosts, share: float, latencies_ns: tuple[int, int], bytes_per_ns: float | None
) -> ExpertCosts:
    one_ns, (there_ns, back_ns) = costs.gpu_ns[1], latencies_ns
    saved_ns = 0 if bytes_per_ns is None else round((1 - share) * costs.expert_bytes / bytes_per_ns)
    saved_ns = min(saved_ns, one_ns - 1)
    return costs._replace(
        gpu_ns=(0, *(ns - max(0, saved_ns - (ns - one_ns)) for ns in costs.gpu_ns[1:])),
        copy_ns=max(1, _of_bytes(costs.copy_ns, share, there_ns)),
        writeback_ns=_of_bytes(costs.writeback_ns, share, back_ns),
        expert_bytes=max(1, round(costs.expert_bytes * share)),
    )


def _of_bytes(transfer_ns: int, share: float, latency_ns: int) -> int:
    """A transfer of ``share`` of the bytes."""
    fixed_ns = min(latency_ns, transfer_ns)
    return fixed_ns + round((transfer_ns - fixed_ns) * share)
