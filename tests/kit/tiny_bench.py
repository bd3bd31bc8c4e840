"""A tiny model on host lanes: real threads, real copies, experts of 32 x 16, a trace cut from a bundled one."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from policies.mechanism.views import ExpertId, Plan, Routing
from realrun.execution.call_log import LoggedSession
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import Finish
from realrun.experts.store import ExpertStore
from realrun.machine.host_lanes import HostLanes, HostLaneSettings
from realrun.replay.replay import Measurement, ReplayBench, room_for
from sim.costs.engine_costs import costs_on
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario

TRACE = "mini-moe:3"  # three layers of 16 experts, top 2, with every kind of forecast
SHARES = (0.0, 1 / 48, 0.3, 1.0)  # of the 48 experts: no cache slot, one, some, all


def cores() -> list[int]:
    """Cores that this process may use; one may have to do for all lanes."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def tiny_lanes(**changes: Any) -> HostLaneSettings:
    """Lanes on the cores that there are; the link takes no time that a copy would not."""
    first, *_, last = [*cores(), *cores()]
    lanes = HostLaneSettings(gpu_core=first, cpu_cores=(last,), link_bytes_per_s=1e12, link_latency_ns=0)
    return replace(lanes, **changes)


class OverTheLink(HostLanes):
    """Host lanes on which the CPU's results queue behind the copies of experts."""

    result_path = "h2d"


@contextmanager
def machine(kind: type[HostLanes] = HostLanes, **changes: Any) -> Iterator[HostLanes]:
    """A machine that is closed at the end: its threads must have nothing left that they wait for."""
    lanes = kind(tiny_lanes(**changes))
    try:
        yield lanes
    finally:
        lanes.close()


@lru_cache
def tiny_setting(
    cached_share: float = 0.3, batch: int = 1, policy: str = "on-demand", prompt_tokens: int = 5, generated: int = 4
) -> Prepared:
    """A prompt and some generated tokens of a bundled trace, on a model that is made small, in float32. Forecasts of
    later tokens, which no bundled trace has, are noisy."""
    setting = prepare(
        Scenario(
            trace=TRACE, model=None, policy=policy, cached_share=cached_share, batch=batch,
            prompt_tokens=prompt_tokens, generated_tokens=generated, noisy_forecast_recall=(0.9, 0.8),
        )
    )
    shape = replace(
        setting.shape, hidden=32, expert_width=16, heads=2, kv_heads=1, head_dim=16, kv_width=32,
        attention_params=32 * 32 * 3, vocab=64, weight_bits=32.0, dense_bits=32.0,
    )
    tokens = max(len(step.rows) for step in setting.steps)
    return replace(setting, shape=shape, costs=costs_on(setting.hardware, shape, tokens))


def prepared(setting: Prepared, policy: str, parameters: Mapping[str, object] | None = None) -> Prepared:
    """One run to come."""
    return setting.with_policy(policy, parameters)


@dataclass(frozen=True)
class Played:
    """One layer as it ran: what it was given [N, H], and its experts' weighted results [N, k, H]."""

    step: int
    plan: Plan
    true: Routing
    ids: Tensor  # [N, k] and
    weights: Tensor  # of the model's own router
    hidden: Tensor
    parts: Tensor
    first: int = 0  # layer of the model that is the GPU's first


class WatchedBench(ReplayBench):
    """Remembers what went into every layer and what came out; ``meddle`` may spoil an executor before its run."""

    meddle: Callable[[Executor], None] = staticmethod(lambda _: None)

    def _executor(self, run: Prepared, session: LoggedSession, number: int) -> Executor:
        executor = super()._executor(run, session, number)
        if number == 0:
            self.played: list[Played] = []
        self.executor = executor
        self._watch(executor, run, run.cards[number].block.first)
        self.meddle(executor)
        return executor

    def _watch(self, executor: Executor, setting: Prepared, first: int) -> None:
        route, combine = executor.route, executor.layers.combine
        now: dict[str, Any] = {}

        def watched_route(given: Any, true: Any, asked: Any, *rest: Any) -> Plan:
            now.update(given=given, asked=asked, plan=route(given, true, asked, *rest))
            return now["plan"]

        def watched_combine(finish: Finish, keep: Callable[[Tensor], None]) -> Any:
            given, asked, plan = now["given"], now["asked"], now["plan"]
            rows, trace = setting.steps[given.step].rows, setting.trace
            ids, weights = (torch.from_numpy(array[rows][:, first + given.layer].copy()) for array in
                            (trace.topk_ids, trace.topk_weights))

            def watched(parts: Tensor) -> Tensor:
                hidden = asked.hidden().clone()
                played = Played(given.step, plan, given.routing, ids, weights, hidden, parts.clone(), first)
                self.played.append(played)
                return finish(parts)

            return combine(watched, keep)

        executor.route, executor.layers.combine = watched_route, watched_combine  # type: ignore[method-assign]


def bench_for(machine: HostLanes, runs: Sequence[Prepared], kind: type[WatchedBench] = WatchedBench) -> WatchedBench:
    """Room for all of these runs. Every expert has weights like no other: whoever reads the wrong ones is seen."""
    bench = kind(machine, runs[0].shape, room_for(runs))
    fill(bench.store, runs[0].shape.experts)
    return bench


class Instead:
    """Something else in all but a few attributes: a machine whose link is spoilt, say."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        self._inner = inner
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def fill(store: ExpertStore, experts: int) -> None:
    """Weights that differ from expert to expert."""
    random = torch.Generator().manual_seed(1)
    for layer, layout in enumerate(store.layouts):
        for expert in range(experts):
            for matrix in layout.views(store.buffer(layer, expert)).values():
                matrix.normal_(0.0, matrix.shape[-1] ** -0.5, generator=random)


def run(
    bench: WatchedBench, setting: Prepared, policy: str, parameters: Mapping[str, object] | None = None
) -> Measurement:
    """One measured run."""
    return bench.measure(setting.with_policy(policy, parameters))


# --- what the outputs must be -----------------------------------------------------------------------------------------


def check_outputs(bench: WatchedBench) -> None:
    """Every layer's experts gave what plain arithmetic gives for the routing in force."""
    before: Played | None = None
    assert bench.played
    for played in (replace(each, hidden=each.hidden.cpu(), parts=each.parts.cpu()) for each in bench.played):
        stale = before.hidden if before is not None and played.plan.precomputed else played.hidden
        expected = expected_output(bench.store, played, stale)
        if before is not None and before.step == played.step:
            expected += output_of(bench.store, before, before.plan.deferred, before.hidden)
        where = f"step {played.step}, layer {played.first + played.plan.layer}: {played.plan}"
        torch.testing.assert_close(played.parts.sum(1), expected, rtol=1e-4, atol=1e-5, msg=lambda m, w=where: w + m)
        before = played


def expected_output(store: ExpertStore, played: Played, stale: Tensor) -> Tensor:
    """Precomputed experts see the ``stale`` activations of the layer before, and deferred ones are left out."""
    plan = played.plan
    own = set(plan.routing.active) - {*plan.precomputed, *plan.deferred}
    return output_of(store, played, own, played.hidden) + output_of(store, played, plan.precomputed, stale)


def output_of(store: ExpertStore, played: Played, experts: Collection[int], hidden: Tensor) -> Tensor:
    """Output of some of a layer's experts for ``hidden`` [N, H]: token by token, choice by choice."""
    output = torch.zeros_like(hidden)
    for token, choices in enumerate(choices_of(played)):
        for expert, weight in choices:
            if expert in experts:
                id = ExpertId(played.first + played.plan.layer, expert)
                output[token] += weight * by_hand(store, id, hidden[token])
    return output


def choices_of(played: Played) -> list[list[tuple[int, float]]]:
    """Experts and weights of every token: those of the router, or those that the policy put in their place."""
    routing = played.plan.routing
    if routing is played.true:
        pairs = zip(played.ids.tolist(), played.weights.tolist(), strict=True)
    else:
        pairs = zip(routing.token_ids, routing.token_weights, strict=True)  # type: ignore[assignment]
    return [list(zip(ids, weights, strict=True)) for ids, weights in pairs]


def by_hand(store: ExpertStore, id: ExpertId, hidden: Tensor) -> Tensor:
    """One expert on one token [H], with the weights of the store."""
    views = store.layouts[id.layer].views(store.buffer(*id))
    gate, up = (views["gate_up_proj"] @ hidden).chunk(2)
    return views["down_proj"] @ (functional.silu(gate) * up)
