"""Assigners that leave missed experts to both sides: some are copied to the GPU, the CPU computes the others."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, LayerView
from policies.parts.assigners import by_tokens, settle
from policies.protocols import Assigner

LEAST_SHARE, MOST_SHARE, SHARE_STEP = 10, 60, 5  # percent: the shares among which a start-up chooses


class MissShare:
    """A share of each layer's missed experts is copied and runs on the GPU, the fraction of an expert left out.

    The copied ones are those with the fewest tokens (ties: the higher number), at most ``most``. An expert whose copy
    is in flight is a missed one, too, which the CPU computes.
    """

    def __init__(self, share: float, most: int) -> None:
        self._share, self._most = share, most

    def assign(self, view: LayerView) -> Assignment:
        missed = missed_of(view)
        return with_copies(view, missed, min(copied(len(missed), self._share), self._most))


class SoonerShare:
    """As many of the missed experts are copied as end the layer soonest by the planner's costs; see ``layer_ns``."""

    def __init__(self, most: int) -> None:
        self._most = most

    def assign(self, view: LayerView) -> Assignment:
        missed = missed_of(view)
        costs = view.costs[view.layer]
        tokens = [view.routing.tokens[place] for place in missed]
        hits_ns = hits_of(view)
        counts = range(min(len(missed), self._most) + 1)
        return with_copies(view, missed, min(counts, key=lambda count: layer_ns(costs, hits_ns, tokens, count)))


class SettledShare:
    """The share that would have ended the layers of the first decode steps soonest, as found at the start of a run.

    For ``probed`` decode steps the share is ``before``; then that of ``LEAST_SHARE`` to ``MOST_SHARE`` with the least
    sum of ``layer_ns`` over their layers, ties to the smaller.
    """

    def __init__(self, before: float, most: int, probed: int) -> None:
        self._assigner: Assigner = MissShare(before, most)
        self._most, self._probed = most, probed
        self._steps: set[int] = set()
        self._seen: list[tuple[ExpertCosts, int, Sequence[int]]] = []  # costs, time of hits, tokens of missed experts
        self.share: float | None = None  # once it is settled

    def assign(self, view: LayerView) -> Assignment:
        if self.share is None and view.phase == "decode":
            self._probe(view)
        return self._assigner.assign(view)

    def _probe(self, view: LayerView) -> None:
        if len(self._steps) == self._probed and view.step not in self._steps:
            self.share = self._best()
            self._assigner, self._seen = MissShare(self.share, self._most), []
            return
        self._steps.add(view.step)
        tokens = [view.routing.tokens[place] for place in missed_of(view)]
        self._seen.append((view.costs[view.layer], hits_of(view), tokens))

    def _best(self) -> float:
        shares = [percent / 100 for percent in range(LEAST_SHARE, MOST_SHARE + 1, SHARE_STEP)]
        return min(shares, key=self._sum_ns)

    def _sum_ns(self, share: float) -> int:
        return sum(
            layer_ns(costs, hits_ns, tokens, min(copied(len(tokens), share), self._most))
            for costs, hits_ns, tokens in self._seen
        )


def copied(missed: int, share: float) -> int:
    """How many of so many missed experts a share is: in 256ths, rounded down (Strata, expert_source.hpp)."""
    return missed * int(256 * share + 0.5) >> 8


def missed_of(view: LayerView) -> list[int]:
    """Places of the active experts that are not on the GPU, by descending workload."""
    active, ready = view.routing.active, view.ready_ns
    return [place for place in by_tokens(view.routing.tokens) if ready[active[place]]]


def hits_of(view: LayerView) -> int:
    """Time in ns of the active experts that are on the GPU."""
    costs, ready = view.costs[view.layer], view.ready_ns
    pairs = zip(view.routing.active, view.routing.tokens, strict=True)
    times = [costs.of(expert).gpu_ns[tokens] for expert, tokens in pairs if not ready[expert]]
    return costs.first_gpu_ns + sum(times) if times else 0


def layer_ns(costs: ExpertCosts, hits_ns: int, missed: Sequence[int], count: int) -> int:
    """Time of a layer's experts if the last ``count`` of the ``missed`` ones, given by their tokens, are copied.

    The GPU computes what it has, then copies, then computes what it has copied; the CPU computes the others meanwhile
    (the table of a SYCL fork of Strata, generate.cpp, measure_pcie_split).
    """
    left = len(missed) - count
    cpu_ns = costs.first_cpu_ns + sum(map(costs.cpu_ns.__getitem__, missed[:left])) if left else 0
    called_ns = costs.first_gpu_ns + sum(map(costs.gpu_ns.__getitem__, missed[left:])) if count else 0
    return max(cpu_ns, hits_ns + count * costs.copy_ns + called_ns)


def with_copies(view: LayerView, missed: Sequence[int], count: int) -> Assignment:
    """The last ``count`` of the missed experts that are in no copy run on the GPU, the others of them on the CPU."""
    active, ready = view.routing.active, view.ready_ns
    absent = [place for place in missed if ready[active[place]] == INFINITE_NS]
    left = {*missed} - {*absent[max(len(absent) - count, 0) :]}
    return settle(view, [place not in left for place in range(len(active))])
