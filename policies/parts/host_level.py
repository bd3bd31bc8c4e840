"""Parts for the host's memory above a disk: what stays there, what is read ahead, and which experts the GPU loads."""

from __future__ import annotations

from collections.abc import Container, Sequence

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, Forecast, LayerView, Phase
from policies.parts.prefetchers import next_forecast
from policies.protocols import Assigner, HostCache


class NothingStays:
    """Every expert only passes through the host's memory: direct reads, without a cache there."""

    admits = False

    def observe(self, view: LayerView) -> None:
        """Learn nothing."""

    def admitted(self, key: ExpertId, group: int) -> None:
        """Called for nothing: none is admitted."""

    def evicted(self, key: ExpertId, group: int) -> None:
        """Called for nothing."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return None


class OnlyIn:
    """Another cache, which admits, and counts, in one phase alone: what a prompt reads does not displace what decode
    steps use."""

    def __init__(self, phase: Phase, cache: HostCache) -> None:
        self.phase, self.cache = phase, cache
        self.admits = False
        self.admitted, self.evicted, self.victim = cache.admitted, cache.evicted, cache.victim

    def observe(self, view: LayerView) -> None:
        self.admits = view.phase == self.phase
        if self.admits:
            self.cache.observe(view)


class ReadForecast:
    """The ``size`` experts of the next layer with the most workload in the forecast of this ``kind``, as far as neither
    the host nor the GPU holds them."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        forecast = next_forecast(view, forecasts, self.kind)
        if forecast is None or view.host is None:
            return ()
        layer, here, held = forecast.layer, view.residency.resident[forecast.layer], view.host.held
        likely = [ExpertId(layer, expert) for expert in forecast.active[: self.size] if expert not in here]
        return [key for key in likely if key not in held]


class AfterReads:
    """Another assigner for what is on the GPU or held by the host; each expert that is to be read first goes to the
    processor that ends it sooner, one after the other as the disk reads them, largest workload first."""

    def __init__(self, assigner: Assigner) -> None:
        self.assigner = assigner

    def assign(self, view: LayerView) -> Assignment:
        late = self._late(view)
        if not late:
            return self.assigner.assign(view)
        rest = view.routing.without(late)
        first = self.assigner.assign(view._replace(routing=rest)) if rest.active else Assignment((), (), (), 0)
        loads = self._loads(view, first, late)
        gpu = (*first.gpu, *loads)
        cpu = (*first.cpu, *(expert for expert in late if expert not in loads))
        return first._replace(gpu=gpu, cpu=cpu, loads=(*first.loads, *loads))

    def _late(self, view: LayerView) -> list[int]:
        """Active experts that neither the GPU nor the host holds, by descending workload."""
        host, layer, ready = view.host, view.layer, view.ready_ns
        if host is None:
            return []
        pairs = sorted(zip(view.routing.active, view.routing.tokens, strict=True), key=lambda pair: -pair[1])
        return [e for e, _ in pairs if ready[e] == INFINITE_NS and ExpertId(layer, e) not in host.held]

    def _loads(self, view: LayerView, first: Assignment, late: Sequence[int]) -> tuple[int, ...]:
        """Experts of ``late`` that the GPU ends sooner."""
        costs, workload = view.costs[view.layer], view.routing.workload()
        assert view.host is not None
        disk_ns, link_ns = view.host.backlog_ns, view.h2d_backlog_ns + len(first.loads) * costs.copy_ns
        gpu_ns = max(sum(costs.gpu_ns[workload[e]] for e in first.gpu), link_ns)
        cpu_ns = sum(costs.cpu_ns[workload[e]] for e in first.cpu)
        loads = []
        for expert in late:
            disk_ns += costs.read_ns
            copied_ns = max(link_ns, disk_ns) + costs.copy_ns
            on_gpu_ns = max(gpu_ns, copied_ns) + costs.first_gpu_ns + costs.gpu_ns[workload[expert]]
            on_cpu_ns = max(cpu_ns, disk_ns) + costs.cpu_ns[workload[expert]]
            if on_gpu_ns < on_cpu_ns:
                loads.append(expert)
                link_ns, gpu_ns = copied_ns, on_gpu_ns
            else:
                cpu_ns = on_cpu_ns
        return tuple(loads)


class PinnedShare:
    """Another cache for all but a ``share`` of the members that are there at first, the best, which never leave."""

    admits = True

    def __init__(self, share: float, cache: HostCache) -> None:
        self.share, self.cache = share, cache
        self._first: dict[int, list[ExpertId]] = {}  # by group, best last, until the first layer
        self._pinned: set[ExpertId] | None = None

    def observe(self, view: LayerView) -> None:
        self._begin()
        self.cache.observe(view)

    def admitted(self, key: ExpertId, group: int) -> None:
        if self._pinned is None:
            self._first.setdefault(group, []).append(key)
        else:
            self.cache.admitted(key, group)

    def evicted(self, key: ExpertId, group: int) -> None:
        self.cache.evicted(key, group)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        self._begin()
        return self.cache.victim(incoming, group, blocked)

    def _begin(self) -> None:
        """Pin the best of each group; the others are the cache's."""
        if self._pinned is None:
            self._pinned = set()
            for group, keys in self._first.items():
                others = len(keys) - int(self.share * len(keys))
                self._pinned.update(keys[others:])
                for key in keys[:others]:
                    self.cache.admitted(key, group)
