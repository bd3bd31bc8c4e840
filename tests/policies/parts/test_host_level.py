"""Parts for the host's memory above a disk: what stays, what is read ahead, where experts go that are not read yet."""

from __future__ import annotations

from policies.mechanism.views import Assignment, ExpertId, Forecast, HostView, LayerView, ResidencyView
from policies.parts.assigners import CostRule, LoadAll, ResidentOrCpu
from policies.parts.caches import LruCache
from policies.parts.host_level import AfterReads, OnlyIn, PinnedShare, ReadForecast
from tests.kit.views import costs, view

COST = costs((5, 5), (20, 40), copy_ns=30)._replace(read_ns=50)


def keys(*experts: int, layer: int = 0) -> list[ExpertId]:
    return [ExpertId(layer, expert) for expert in experts]


def looking(resident: tuple[int, ...] = (), held: tuple[int, ...] = (), **fields: object) -> LayerView:
    """Experts 0 to 3 are active with one token each; the host holds some of layer 0, its disk has 10 ns to go."""
    made = view({0: 1, 1: 1, 2: 1, 3: 1}, cost=COST, ready=dict.fromkeys(resident, 0))
    residency = ResidencyView([set(resident), {2}], [set(), set()])
    return made._replace(residency=residency, host=HostView(set(keys(*held)), 10), **fields)  # type: ignore[arg-type]


def test_a_memory_that_decode_fills_admits_nothing_of_a_prompt() -> None:
    cache = OnlyIn("decode", LruCache())
    cache.observe(looking(phase="prefill"))
    assert not cache.admits
    cache.observe(looking(phase="decode"))
    assert cache.admits


def test_pinned_members_never_leave() -> None:
    cache = PinnedShare(0.5, LruCache())
    for key in keys(2, 4, 1, 3):  # best last
        cache.admitted(key, 0)
    cache.observe(looking())
    assert cache.victim(ExpertId(0, 5), 0, ()) == ExpertId(0, 4)  # 2 was used by the layer just now
    assert cache.victim(ExpertId(0, 5), 0, keys(2, 4)) is None


def test_forecast_experts_that_nobody_holds_are_read_ahead() -> None:
    forecast = Forecast(1, "gate", (0, 2, 1, 3), (4, 3, 2, 1))
    looked = looking()._replace(host=HostView(set(keys(1, layer=1)), 0))
    ranked = ReadForecast(3, "gate").rank(looked, [forecast], Assignment((), (), (), 0))
    assert ranked == keys(0, layer=1)  # the GPU holds 2, the host 1


def test_experts_that_are_read_go_where_they_end_sooner() -> None:
    """Read until 60 and 110. 0 ends at 80 on the CPU, at 95 on the GPU; 1 ends at 130, or at 145."""
    made = AfterReads(LoadAll()).assign(looking(resident=(2,), held=(3,)))
    assert made.loads == (3,)
    assert made.gpu == (2, 3)
    assert made.cpu == (0, 1)


def test_a_slow_cpu_leaves_them_to_the_gpu() -> None:
    slow = COST._replace(cpu_ns=(0, 100, 200))
    made = AfterReads(ResidentOrCpu()).assign(looking(held=(2, 3))._replace(costs=[slow]))
    assert made.loads == made.gpu == (0, 1)
    assert made.cpu == (2, 3)


def test_without_a_disk_it_is_the_assigner_itself() -> None:
    looked = looking()._replace(host=None)
    assert AfterReads(CostRule()).assign(looked) == CostRule().assign(looked)
