"""The laws of docs/design.md on measured spans, and what comes out of every layer, for every policy.

Laws 1 to 4 and 12 hold for a real machine as they do for the engine. These checks do not, and why:

- law 5 (work conservation): handing work over takes time, so a lane is idle between a copy and its expert;
- law 3 between write-backs and the rest of ``d2h``: they have a lane of their own on a real machine;
- hits counted from spans may be one more a layer than the session's: a copy that has ended when the plan begins, but
  which the session has not been told of. Without prefetches and swaps there is none, and they are equal;
- laws 6 to 9 compare runs ns by ns, or with a bound of another machine's costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.mechanism.views import Commitment, Forecast, LayerView, Plan, Routing
from policies.parts.routers import TrueRouter, routing_of_tokens
from policies.registry import SYSTEMS, policy_names
from realrun.execution.executor import Executor
from realrun.machine.host_lanes import HostLanes
from realrun.replay.replay import Measurement
from sim.runs.hits import layer_frame
from sim.runs.prepare import Prepared
from sim.runs.spans import Span
from sim.runs.vocabulary import COPIES
from tests.invariants.free_compositions import free_composition
from tests.kit.depth import thinned
from tests.kit.tiny_bench import (
    SHARES,
    Instead,
    OverTheLink,
    WatchedBench,
    bench_for,
    check_outputs,
    machine,
    prepared,
    run,
    tiny_setting,
)
from trilane.testing.laws import (
    law_1_conservation,
    law_2_causality,
    law_3_exclusivity,
    law_4_capacity,
    law_12_accounting,
)
from trilane.testing.log import log_of

pytestmark = pytest.mark.timeout(120)
PLAYABLE = [name for name in policy_names() if SYSTEMS[name].needs.narrow_share is None]  # one copy of each expert


def all_runs() -> list[Prepared]:
    """The runs with the largest demands of memory in these tests."""
    for_two = [name for name in PLAYABLE if SYSTEMS[name].needs.max_batch != 1]
    return [prepared(tiny_setting(share), name) for share in SHARES for name in PLAYABLE] + [
        prepared(tiny_setting(share, 2), name) for share in SHARES for name in for_two
    ]


@pytest.fixture(scope="module")
def bench() -> Iterator[WatchedBench]:
    with machine() as lanes:
        yield bench_for(lanes, all_runs())


@pytest.fixture(scope="module")
def over_the_link() -> Iterator[WatchedBench]:
    with machine(OverTheLink) as lanes:
        yield bench_for(lanes, all_runs())


def check_laws(measured: Measurement, batch: int) -> None:
    """All that measured spans are held to."""
    spans, session, memory = list(log_of(measured.run.spans).spans), measured.session, measured.run.memory
    on_their_own = [span for span in spans if span.kind == "writeback"]
    others = [span for span in spans if span.kind != "writeback"]
    law_3_exclusivity(others)
    law_3_exclusivity(on_their_own)
    law_1_conservation(spans, {place: plan.routing.workload() for place, plan in session.plans().items()})
    law_2_causality(others)
    law_4_capacity(spans, memory["cache_bytes"] + memory["staging_bytes"])
    law_12_accounting(others, batch)
    law_12_hits(spans, measured)
    assert all(0 <= span.ready_ns <= span.start_ns <= span.end_ns for span in spans)


def law_12_hits(spans: list[Span], measured: Measurement) -> None:
    """Hits and copies counted from spans are those of the session, up to what it could not know yet."""
    session = measured.session
    copied = [(s.layer, s.expert, s.kind, s.bytes) for s in spans if s.kind in COPIES]
    assert copied == [(*copy.key, copy.kind, copy.expert_bytes) for copy in session.copies()]
    late = any(copy.kind != "demand" for copy in session.copies())
    hits = {(row.step, row.layer): row.hits for row in layer_frame(measured.run.spans).itertuples()}
    for place, plan in session.plans().items():
        more = hits[place] - len(plan.resident)
        assert 0 <= more <= len(plan.precomputed) + late, f"law 12: step, layer {place}: {more} hits too many"


# --- every policy -----------------------------------------------------------------------------------------------------


@thinned(7)
@pytest.mark.parametrize("share", SHARES, ids=["no slot", "one slot", "some slots", "all slots"])
@pytest.mark.parametrize("policy", PLAYABLE)
def test_the_experts_of_every_layer_give_what_they_must_and_the_laws_hold(
    bench: WatchedBench, policy: str, share: float
) -> None:
    measured = run(bench, tiny_setting(share), policy)
    check_outputs(bench)
    check_laws(measured, batch=1)


@pytest.mark.parametrize(
    "policy", ["on-demand", "naive-cpu", "dali", "hybrimoe", "daop", "smoe", "oracle", "kt-deferral"]
)
def test_the_same_holds_for_batches(bench: WatchedBench, policy: str) -> None:
    measured = run(bench, tiny_setting(0.3, batch=2), policy)
    check_outputs(bench)
    check_laws(measured, batch=2)


@pytest.mark.parametrize("policy", ["naive-cpu", "fiddler", "daop", "dali", "kt-deferral"])
def test_results_of_the_cpu_may_queue_on_the_link(over_the_link: WatchedBench, policy: str) -> None:
    measured = run(over_the_link, tiny_setting(0.3), policy)
    check_outputs(over_the_link)
    check_laws(measured, batch=1)
    results = measured.run.spans[measured.run.spans.kind == "result"]
    plans = measured.session.plans()
    late = {(step, layer + 1) for (step, layer), plan in plans.items() if plan.deferred}
    with_cpu = sum(bool(plan.immediate or plan.precomputed) or at in late for at, plan in plans.items())
    assert len(results) == with_cpu > 0


def test_both_ways_of_the_results_give_the_same(bench: WatchedBench, over_the_link: WatchedBench) -> None:
    outputs = []
    for each in (bench, over_the_link):
        run(each, tiny_setting(0.3), "naive-cpu")
        outputs.append(torch.cat([played.parts.flatten() for played in each.played]))
    assert torch.equal(*outputs)


# --- policies that nobody would write ---------------------------------------------------------------------------------


class FreeTokenRouter:
    """Sends tokens anywhere, some to one expert only; commits the next layer, and has some of it computed ahead."""

    looks_ahead = True

    def __init__(self, seed: int, experts: int, top_k: int) -> None:
        self.rng, self.experts, self.top_k = random.Random(seed), experts, top_k

    def route(self, view: LayerView) -> Routing:
        return self._any(view) if self.rng.random() < 0.3 else view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        if self.rng.random() < 0.3:
            return None
        routing, there = self._any(view), view.residency.resident[view.layer + 1]
        absent = [expert for expert in routing.active if expert not in there]
        return Commitment(routing, tuple(self.rng.sample(absent, self.rng.randint(0, len(absent)))))

    def _any(self, view: LayerView) -> Routing:
        sizes = [self.rng.randint(1, self.top_k) for _ in view.routing.token_ids]
        ids = [self.rng.sample(range(self.experts), size) for size in sizes]
        return routing_of_tokens(ids, [[self.rng.random() for _ in range(size)] for size in sizes])


@pytest.fixture
def free() -> Callable[[int], tuple[WatchedBench, Measurement]]:
    """Measures compositions whose parts answer at random, on a link that is quick or slow."""

    def measure(seed: int) -> tuple[WatchedBench, Measurement]:
        rng = random.Random(seed)
        setting = tiny_setting(rng.choice((0.0, 1 / 48, 0.1, 0.3, 0.6)), batch=2)
        shape, kind = setting.shape, rng.choice((HostLanes, OverTheLink))
        routers = rng.choice((True, False))

        def composed() -> Prepared:
            it = free_composition(random.Random(seed), seed, shape.experts)
            router = FreeTokenRouter(seed, shape.experts, shape.top_k) if routers else TrueRouter()
            needs = replace(it.needs, tokens=True, changes_routing=routers or it.needs.changes_routing)
            return setting.with_composition(replace(it, router=router, needs=needs))

        with machine(kind, link_latency_ns=rng.choice((0, 200_000))) as lanes:
            bench = bench_for(lanes, [composed()])
            return bench, bench.measure(composed())

    return measure


@thinned(4)
@pytest.mark.parametrize("seed", range(40))
def test_compositions_that_nobody_would_write_give_what_they_must(
    free: Callable[[int], tuple[WatchedBench, Measurement]], seed: int
) -> None:
    bench, measured = free(seed)
    check_outputs(bench)
    check_laws(measured, batch=2)


# --- policies with ways of their own ----------------------------------------------------------------------------------


def plans_of(bench: WatchedBench, policy: str, **parameters: object) -> Mapping[tuple[int, int], Plan]:
    return run(bench, tiny_setting(0.3), policy, parameters).session.plans()


@pytest.mark.parametrize("policy", ["daop", "daop@impl"])
def test_daop_computes_ahead_with_activations_of_the_layer_before(bench: WatchedBench, policy: str) -> None:
    assert any(plan.precomputed for plan in plans_of(bench, policy, first_predicted_block=2).values())
    assert any(played.plan.routing is not played.true for played in bench.played)
    check_outputs(bench)


def test_deferred_experts_join_the_next_layer_and_no_other(bench: WatchedBench) -> None:
    plans = plans_of(bench, "kt-deferral", deferred=1)
    assert any(plan.deferred for plan in plans.values())
    check_outputs(bench)
    bench.played[:] = [replace(played, plan=played.plan._replace(deferred=())) for played in bench.played]
    with pytest.raises(AssertionError, match="not close"):  # as if nothing were deferred
        check_outputs(bench)


def test_adapmoe_drops_experts_of_some_tokens(bench: WatchedBench) -> None:
    plans_of(bench, "adapmoe", drop_below=0.45)
    check_outputs(bench)
    chosen = [len(ids) for played in bench.played for ids in played.plan.routing.token_ids]
    assert set(chosen) == {1, 2}


def test_smoe_substitutes_experts_here(bench: WatchedBench) -> None:
    plans_of(bench, "smoe")
    assert any(played.plan.routing.active != played.true.active for played in bench.played)


def test_a_committed_layer_asks_no_gate(bench: WatchedBench) -> None:
    measured = run(bench, tiny_setting(0.3), "quasi-pf")
    log = log_of(measured.run.spans)
    committed = [layer for layer in log.routed_layers() if log.committed(layer)]
    assert committed
    assert all(not log.of(layer, "gate") for layer in committed)


def test_victims_are_written_back_and_the_store_stays_as_it_is(bench: WatchedBench) -> None:
    weights = [bench.store.buffer(layer, e).clone() for layer in range(3) for e in range(16)]
    measured = run(bench, tiny_setting(0.3), "mixtral-offloading@impl")
    log = log_of(measured.run.spans)
    written = [(s.layer, s.expert) for s in log.lanes["d2h"] if s.kind == "writeback"]
    assert written == [back for copy in measured.session.copies() for back in measured.session.written_back(copy)] != []
    after = [bench.store.buffer(layer, e) for layer in range(3) for e in range(16)]
    assert all(map(torch.equal, weights, after))


# --- what the checks can see ------------------------------------------------------------------------------------------


def lose_a_copy(executor: Executor) -> None:
    """The link brings nothing."""
    executor.copying._machine = Instead(executor.machine, copy_in=lambda *_: executor.machine.link.submit(lambda: None))


def keep_a_stale_slot(executor: Executor) -> None:
    """A kernel reads the slot of whoever was copied first."""
    slots, first = executor._slots, []

    def stale(id: Any) -> torch.Tensor:
        first.append(buffer := type(slots).buffer(slots, id))
        return first[0] if executor.recorder.step > 0 else buffer

    slots.buffer = stale  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [lose_a_copy, keep_a_stale_slot])
def test_a_wrong_expert_would_be_seen(bench: WatchedBench, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "meddle", spoil)
    run(bench, tiny_setting(0.3), "on-demand")
    with pytest.raises(AssertionError, match="not close"):
        check_outputs(bench)


def test_hits_that_a_session_did_not_see_would_be_seen(bench: WatchedBench) -> None:
    measured = run(bench, tiny_setting(0.3), "on-demand")
    spans = list(log_of(measured.run.spans).spans)
    copies = [span for span in spans if span.kind in COPIES]
    with pytest.raises(AssertionError):
        law_12_hits([span for span in spans if span is not copies[0]], measured)


def test_every_kind_of_policy_is_here() -> None:
    """Some that change the routing, some that must stay on the GPU, one that knows the future."""
    needs = [SYSTEMS[name].needs for name in policy_names()]
    for what in ("changes_routing", "gpu_only", "future"):
        assert any(getattr(each, what) for each in needs)
