"""Layer views to test policies with, written out or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, LayerView, Phase, ResidencyView, Routing

NO_PLAN = Assignment((), (), (), 0)  # for prefetchers that do not look at the layer's plan


def costs(gpu_ns: Sequence[int], cpu_ns: Sequence[int], *, first_cpu_ns: int = 0, copy_ns: int = 0) -> ExpertCosts:
    """Tables by workload from 1 on."""
    return ExpertCosts((0, *gpu_ns), (0, *cpu_ns), first_cpu_ns, copy_ns, 1)


def view(
    workload: Mapping[int, int],
    cost: ExpertCosts,
    *,
    ready: Mapping[int, int] | None = None,
    layer: int = 0,
    step: int = 0,
    phase: Phase = "decode",
    resident: Sequence[Sequence[int]] = ((),),
) -> LayerView:
    """A view of ``layer``; experts that ``ready`` does not name are absent."""
    active = tuple(sorted(workload))
    known = ready or {}
    return LayerView(
        step=step,
        layer=layer,
        phase=phase,
        routing=Routing(active, tuple(workload[e] for e in active)),
        scores=None,
        sequences=(),
        ready_ns={e: known.get(e, INFINITE_NS) for e in active},
        h2d_backlog_ns=0,
        cpu_backlog_ns=0,
        costs=(cost,) * (layer + 1),
        residency=ResidencyView(resident, [()] * len(resident)),
    )


@st.composite
def views(draw: st.DrawFn, most: int = 12, longest_ns: int = 1000) -> LayerView:
    """Up to ``most`` active experts, some resident, some loading; arbitrary tables."""
    time = st.integers(1, longest_ns)
    heaviest = draw(st.integers(1, 6))
    table = st.lists(time, min_size=heaviest, max_size=heaviest)
    cost = costs(draw(table), draw(table), first_cpu_ns=draw(st.integers(0, longest_ns)), copy_ns=draw(time))
    workload = draw(st.dictionaries(st.integers(0, 63), st.integers(1, heaviest), min_size=1, max_size=most))
    ready = {e: draw(st.sampled_from((0, 0, cost.copy_ns // 2, INFINITE_NS, INFINITE_NS))) for e in sorted(workload)}
    return view(workload, cost, ready=ready)
