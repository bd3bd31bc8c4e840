"""DALI: greedy and beam assignment, window cache, and what the paper compares it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import ExpertId, LayerView, Phase, ResidencyView, Swap
from policies.papers.dali.controls import RandomPrefetcher
from policies.papers.dali.parts import BeamAssigner, GreedyAssigner, WindowCache
from policies.papers.hybrimoe.mrs import MrsCache
from policies.parts.objective import durations, makespan
from policies.parts.placements import PopularityPlacement
from policies.parts.prefetchers import TopPrefetcher
from policies.registry import BuildContext, ChoiceError, compose
from tests.kit.views import NO_PLAN, costs, view, views
from trilane.testing.worlds import toy_calibration

COST = costs(gpu_ns=(10,) * 9, cpu_ns=tuple(range(30, 300, 30)), copy_ns=100)  # copy + GPU 110: CPU up to 3 tokens


def listing(t_gpu: Sequence[int], t_cpu: Sequence[int], first_cpu_ns: int) -> list[bool]:
    """Algorithm 1 line by line, with T_cpu starting at the first expert's extra time."""
    on_gpu = [False] * len(t_gpu)
    total_gpu, total_cpu = 0, first_cpu_ns
    for idx in sorted(range(len(t_gpu)), key=lambda i: (-abs(t_gpu[i] - t_cpu[i]), i)):
        gpu_time, cpu_time = t_gpu[idx], t_cpu[idx]
        if total_gpu + gpu_time <= total_cpu + cpu_time:
            on_gpu[idx] = True
            total_gpu += gpu_time
        else:
            total_cpu += cpu_time
    return on_gpu


@given(views(most=30))
def test_greedy_is_algorithm_1(layer: LayerView) -> None:
    t_gpu, t_cpu = durations(layer)
    expected = listing(t_gpu, t_cpu, layer.costs[0].first_cpu_ns)
    got = GreedyAssigner().assign(layer)
    assert [e in got.gpu for e in layer.routing.active] == expected


def test_greedy_by_hand() -> None:
    # t_gpu 10, 100, 100, 100; t_cpu 30, 150, 60, 240; so 3 (100 <= 240), 1 (200 > 150), 2 (200 <= 210), 0 (210 > 180)
    layer = view({0: 1, 1: 5, 2: 2, 3: 8}, COST, ready={0: 0})
    got = GreedyAssigner().assign(layer)
    assert (got.gpu, got.cpu, got.loads, got.makespan_ns) == ((3, 2), (1, 0), (3, 2), 200)


def test_greedy_gives_ties_to_the_gpu() -> None:
    assert GreedyAssigner().assign(view({6: 1}, costs((50,), (50,)))).gpu == (6,)


@given(views(most=10))
def test_a_beam_wide_enough_finds_the_optimum(layer: LayerView) -> None:
    gpu_ns, cpu_ns = durations(layer)
    count, first = len(gpu_ns), layer.costs[0].first_cpu_ns
    choices = ([bool(bits >> i & 1) for i in range(count)] for bits in range(1 << count))
    best = min(makespan(gpu_ns, cpu_ns, choice, first) for choice in choices)
    loose = max(first - sum(gpu_ns), 0)  # the beam counts the first expert's extra time from the start
    assert best <= BeamAssigner(width=1 << count).assign(layer).makespan_ns <= best + loose


class FigureEleven:
    """One layer in the setting of Fig. 11: 8 experts, 4 slots, w = 4, u = 2. The workloads are ours."""

    WINDOW = ({0: 2, 4: 3, 5: 1}, {1: 2, 4: 4}, {0: 1, 5: 4, 6: 1}, {1: 1, 3: 2, 5: 2})
    # scores after the window: 0: 3, 1: 3, 2: 0, 3: 2 | 4: 7, 5: 7, 6: 1, 7: 0

    def __init__(self, **parameters: object) -> None:
        self.resident = {0, 1, 2, 3}
        self.cache = WindowCache(1, 8, 4, 2, **parameters)  # type: ignore[arg-type]
        for expert in self.resident:
            self.cache.admitted(ExpertId(0, expert), 0)

    def step(self, workload: dict[int, int]) -> list[tuple[int, int]]:
        """One token of every sequence; the swaps (in, out) are carried out."""
        layer = view(workload, COST, resident=[sorted(self.resident)])
        self.cache.observe(layer)
        assert not self.cache.swaps(layer, "routed")
        swaps = self.cache.swaps(layer, "layer_end")
        for incoming, outgoing in swaps:
            self.cache.evicted(outgoing, 0)
            self.cache.admitted(incoming, 0)
            self.resident ^= {incoming.expert, outgoing.expert}
        return [(swap.incoming.expert, swap.outgoing.expert) for swap in swaps]


def test_window_cache_in_the_setting_of_figure_11() -> None:
    layer = FigureEleven()
    assert [layer.step(workload) for workload in layer.WINDOW] == [[], [], [], [(4, 2), (5, 3)]]
    assert layer.resident == {0, 1, 4, 5}
    # scores start again from zero: of the second window's 0: 4, 1: 4, 4: 0, 5: 0 and 2: 4, 3: 0 nothing else counts
    assert [layer.step({0: 1, 1: 1, 2: 1}) for _ in range(4)] == [[], [], [], [(2, 4), (3, 5)]]


def test_window_cache_with_a_guard_swaps_only_for_busier_experts() -> None:
    layer = FigureEleven(guard=True)
    assert [layer.step(workload) for workload in layer.WINDOW][-1] == [(4, 2), (5, 3)]
    assert [layer.step({0: 1, 1: 1, 2: 1}) for _ in range(4)][-1] == [(2, 4)]


def test_window_cache_early_swaps_after_the_first_token_as_the_listing_does() -> None:
    layer = FigureEleven(early=True)
    assert layer.step(layer.WINDOW[0]) == [(4, 1), (5, 2)]
    assert [layer.step(workload) for workload in layer.WINDOW][:3] == [[], [], []]


def test_window_cache_evicting_the_busiest_takes_line_11_at_its_word() -> None:
    layer = FigureEleven(evict="busiest")
    assert [layer.step(workload) for workload in layer.WINDOW][-1] == [(4, 0), (5, 1)]


@pytest.mark.parametrize(("stagger", "due"), [(False, [4, 4, 4]), (True, [4, 3, 2])])
def test_window_cache_staggers_its_layers(stagger: bool, due: list[int]) -> None:
    cache = WindowCache(3, 4, 4, 1, stagger=stagger)
    first: dict[int, int] = {}
    for step in range(1, 5):
        for number in range(3):
            layer = view({0: 1}, COST, layer=number, resident=[[1]] * 3)
            cache.observe(layer)
            if cache.swaps(layer, "layer_end"):
                first.setdefault(number, step)
    assert [first[number] for number in range(3)] == due


def updates(cache: WindowCache, phase: Phase, workload: dict[int, int]) -> list[Swap]:
    """Of one step, or chunk, of one layer in which 0 is resident."""
    layer = view(workload, COST, phase=phase, resident=[[0]])
    cache.observe(layer)
    return list(cache.swaps(layer, "layer_end"))


@pytest.mark.parametrize("prompt", [[{1: 2, 2: 5}], [{1: 2}, {2: 3}, {2: 2}]])
def test_window_cache_counts_a_prefill_as_one_step_in_however_many_chunks(prompt: list[dict[int, int]]) -> None:
    cache = WindowCache(1, 4, 3, 1)
    cache.admitted(ExpertId(0, 0), 0)
    assert [updates(cache, "prefill", chunk) for chunk in prompt] == [[]] * len(prompt)
    assert updates(cache, "decode", {1: 1}) == []
    assert updates(cache, "decode", {1: 1}) == [Swap(ExpertId(0, 2), ExpertId(0, 0))], "2 has 5 tokens, 1 has 4"


def test_window_cache_updates_after_the_first_chunk_if_the_prefill_is_due() -> None:
    cache = WindowCache(1, 4, 1, 1)
    cache.admitted(ExpertId(0, 0), 0)
    asked = [updates(cache, phase, {2: 1}) for phase in ("prefill", "prefill", "decode", "decode", "prefill")]
    assert [len(swaps) for swaps in asked] == [1, 0, 1, 1, 1], "the last is another prefill"


def test_window_cache_admits_loads_in_the_slot_of_the_idlest_if_it_may() -> None:
    keys = [ExpertId(0, expert) for expert in range(4)]
    for admits, victims in ((False, [None, None, None]), (True, [keys[2], keys[0], None])):
        cache = WindowCache(1, 4, 8, 1, admits=admits)
        for key in keys[:3]:
            cache.admitted(key, 0)
        for workload in ({1: 2}, {0: 1}, {2: 1}, {0: 1, 2: 1}, {2: 1}):
            cache.observe(view(workload, COST))
        # tokens: 2 of expert 0 (used in step 4), 2 of expert 1 (step 1), 3 of expert 2
        blocked: list[tuple[ExpertId, ...]] = [(keys[0], keys[1]), (keys[1],), tuple(keys)]
        assert [cache.victim(keys[3], 0, each) for each in blocked] == victims
        assert cache.admits is admits
        assert cache.victim(keys[3], 0, ()) == (keys[1] if admits else None)  # the least recent of two equal ones


def test_window_cache_does_not_bring_what_is_on_its_way() -> None:
    cache = WindowCache(1, 4, 1, 1)
    cache.admitted(ExpertId(0, 2), 0)  # promised, not arrived: neither absent nor resident
    layer = view({2: 5, 3: 1}, COST, resident=[[0]])
    cache.observe(layer)
    assert cache.swaps(layer, "layer_end") == [Swap(ExpertId(0, 3), ExpertId(0, 0))]
    assert not cache.admits
    assert cache.victim(ExpertId(0, 3), 0, ()) is None


EXPERTS, LAYERS = 8, 3
CONTROL_COST = costs((10,), (30,))


def here(layer: int, resident: Collection[int], staged: Collection[int] = ()) -> LayerView:
    """``layer`` at work, with these experts of the next one on the GPU."""
    of_next = [[some if place == layer + 1 else () for place in range(LAYERS)] for some in (resident, staged)]
    return view({0: 1}, CONTROL_COST, layer=layer)._replace(residency=ResidencyView(*of_next))


def drawn(prefetcher: RandomPrefetcher, layer: LayerView) -> list[ExpertId]:
    return list(prefetcher.rank(layer, (), NO_PLAN))


some = st.sets(st.integers(0, EXPERTS - 1))


@given(some, some, st.integers(1, 9), st.integers(0, 99))
def test_draws_so_many_absent_experts_of_the_next_layer_or_all(
    resident: set[int], staged: set[int], size: int, seed: int
) -> None:
    absent = set(range(EXPERTS)) - resident - staged
    chosen = drawn(RandomPrefetcher(EXPERTS, size, seed), here(1, resident, staged))
    assert len(chosen) == len(set(chosen)) == min(size, len(absent))
    assert set(chosen) <= {ExpertId(2, expert) for expert in absent}


def test_is_a_function_of_its_seed() -> None:
    def course(seed: int) -> list[list[ExpertId]]:
        prefetcher = RandomPrefetcher(EXPERTS, 2, seed)
        return [drawn(prefetcher, here(layer, {1, 4})) for _ in range(20) for layer in range(2)]

    assert course(3) == course(3)
    assert course(3) != course(4)


def test_every_absent_expert_has_the_same_chance() -> None:
    prefetcher = RandomPrefetcher(EXPERTS, 2, seed=1)
    counts = Counter(id.expert for _ in range(3000) for id in drawn(prefetcher, here(0, {1, 4})))
    assert set(counts) == {0, 2, 3, 5, 6, 7}
    assert all(900 <= count <= 1100 for count in counts.values())  # 1000 expected, standard deviation 26


@pytest.mark.parametrize(("experts", "size"), [(8, 1), (64, 4)])
def test_takes_its_size_from_dali(experts: int, size: int) -> None:
    built = compose("random-prefetch", context=BuildContext("m", experts, LAYERS, seed=7))
    assert (built.parameters["prefetch"], built.prefetch_slots) == (size, 2 * size)
    assert built.needs.forecasts == ()
    assert built.prefetcher is not None
    assert compose("random-prefetch", {"prefetch": 2}, context=BuildContext("m", 8, 2)).prefetch_slots == 4


def test_the_beam_differs_from_dali_in_its_assigner_alone() -> None:
    context = BuildContext("m", 64, LAYERS, seed=7)
    beam, greedy = compose("dali-beam", {"beam_width": 3}, context=context), compose("dali", context=context)
    assert isinstance(beam.assigner, BeamAssigner)
    assert beam.assigner.width == 3
    assert beam.decision_cost == "dali-beam"
    shared = {name: value for name, value in greedy.parameters.items() if name not in ("assigner", "solver")}
    assert beam.parameters == {**shared, "beam_width": 3}


@pytest.mark.parametrize(("name", "foreign"), [
    ("dali-ilp", "assigner"), ("dali-ilp", "beam_width"), ("dali-beam", "assigner"), ("dali-beam", "solver"),
])
def test_a_dali_whose_assigner_is_fixed_takes_no_other(name: str, foreign: str) -> None:
    with pytest.raises(ChoiceError, match=f"policy '{name}': there is no key '{foreign}'"):
        compose(name, {foreign: "greedy"}, context=BuildContext("m", 8, LAYERS))


@pytest.mark.parametrize("assigner", ["beam", "exact"])
def test_dali_with_another_assigner_decides_as_the_one_named_after_it(assigner: str) -> None:
    context = BuildContext("m", 8, LAYERS)
    twin = compose({"beam": "dali-beam", "exact": "dali-ilp"}[assigner], context=context)
    built = compose("dali", {"assigner": assigner}, context=context)
    assert type(built.assigner) is type(twin.assigner)
    assert (built.name, built.decision_cost, built.parameters["assigner"]) == ("dali", twin.name, assigner)


def test_dali_does_not_take_forecasts_that_are_the_future() -> None:
    with pytest.raises(ChoiceError, match="forecast: expected 'residual', 'gate' or 'statistical', got 'oracle'"):
        compose("dali", {"forecast": "oracle"}, context=BuildContext("m", 8, LAYERS))


def context(**fields: object) -> BuildContext:
    return BuildContext("toy", 8, 2, top_k=2, calibration=toy_calibration(2, 8, 2), **fields)  # type: ignore[arg-type]


def test_composed_of_popular_residents_gate_prefetches_and_a_score_cache() -> None:
    built = compose("static-threshold", context=context())
    assert isinstance(built.placement, PopularityPlacement)
    assert isinstance(built.prefetcher, TopPrefetcher)
    assert (built.prefetcher.kind, built.prefetcher.size, built.prefetcher.into) == ("gate", 1, "cache")
    assert isinstance(built.cache, MrsCache)
    assert (built.cache.keep, built.cache.alpha) == (4, 0.3)
    assert built.needs.scores
    assert compose("static-threshold", {"prefetch": 0}, context=context()).needs.forecasts == ()


@pytest.mark.parametrize(("costs", "given", "expected"), [
    ((), {}, None),
    ((COST, COST), {}, 3),
    ((COST, COST._replace(copy_ns=190)), {}, [3, 6]),
    ((COST,), {"theta": 9}, 9),
])
def test_tells_the_threshold_it_found(costs: object, given: dict[str, object], expected: object) -> None:
    assert compose("static-threshold", given, context=context(costs=costs)).parameters["theta"] == expected
