"""Laws about whole runs, of one or several of which spans are not enough: 1, 6 to 9 and 12."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd

from policies.mechanism.views import Routing
from policies.registry import SYSTEMS, System, added
from sim.costs.cost_table import CostTable
from sim.runs.bounds import LowerBound
from sim.runs.demand import StepDemand
from sim.runs.hits import layer_frame
from sim.runs.metrics import metrics_of
from traces.trace import Trace
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import fixed_world, scaled
from trilane.testing.work_conservation import law_5_background_copies
from trilane.testing.worlds import PlayedWorld, World, digest, play


def check_run(world: World, played: PlayedWorld) -> None:
    """Laws 1 to 5 and 12."""
    law_1_routing(played)
    law_1_deferred(played)
    check_all(played.log, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
    law_5_background_copies(played.log, played.session)
    law_12_hits(played)


def law_1_routing(played: PlayedWorld) -> None:
    """The routing in force is the router's own, or one that a policy may put in its place: of the same tokens."""
    needs, experts = played.session.policy.needs, len(played.session.residency.ids[0])
    for step in played.demand:
        for layer, true in enumerate(step.routings):
            routing = played.session.plans[step.index, layer].routing
            if needs.changes_routing:
                _check_routing(routing, step.tokens, experts, f"law 1: step {step.index}, layer {layer}")
            else:
                assert routing == true, f"law 1: step {step.index}, layer {layer}: the routing is changed, undeclared"


def law_1_deferred(played: PlayedWorld) -> None:
    """The experts that plans defer are those that are computed as such."""
    for place, plan in played.session.plans.items():
        spans = sorted(span.expert for span in played.log.of(place, "deferred"))
        assert spans == sorted(plan.deferred), f"law 1: step, layer {place}: {spans} are deferred, not {plan.deferred}"


def _check_routing(routing: Routing, tokens: int, experts: int, where: str) -> None:
    ids, weights = routing.token_ids, routing.token_weights
    assert len(ids) == len(weights) == tokens, f"{where}: {tokens} tokens, the routing in force has {len(ids)}"
    for chosen, shares in zip(ids, weights, strict=True):
        valid = len(set(chosen)) == len(chosen) == len(shares) and all(0 <= e < experts for e in chosen)
        assert valid, f"{where}: a token has experts {chosen} with weights {shares}"
    counted = sorted(Counter(e for chosen in ids for e in chosen).items())
    workload = list(zip(routing.active, routing.tokens, strict=True))
    assert workload == counted, f"{where}: the workload is {workload}, the tokens' experts are {counted}"


def law_12_hits(played: PlayedWorld) -> None:
    """Hits counted from spans are those that the session saw, but for copies that end in the very ns in which the plan
    begins: hits on paper, in the run perhaps late."""
    hits: dict[Any, Any] = {(row.step, row.layer): row.hits for row in layer_frame(played.spans).itertuples()}
    log = played.log
    arrivals = {s.end_ns for s in log.lanes["h2d"] if s.kind in ("demand", "swap", "prefetch")}
    for place, plan in played.session.plans.items():
        more = len(plan.precomputed) + (log.routed(place) in arrivals)  # the session plans no precomputed one
        assert 0 <= hits[place] - len(plan.resident) <= more, f"law 12: step, layer {place}: hits {hits[place]}"


# --- law 6 ------------------------------------------------------------------------------------------------------------


def law_6_determinism(system: System) -> None:
    """A fixed world gives byte-identical spans here and in two other processes, whatever their hash seed."""
    ours = digest(play(fixed_world(system)))
    assert digest(play(fixed_world(system))) == ours, "law 6: a second run in the same process is another one"
    bundled = SYSTEMS.get(system.name) is system and not added(system.name)
    module = "policies.registry" if bundled else home_of(system)
    names = tuple(name for name in SYSTEMS if not added(name)) if bundled else (system.name,)
    for hash_seed in ("1", "2"):
        theirs = digests_of_a_process(hash_seed, module, names)[system.name]
        assert theirs == ours, f"law 6: another process, of hash seed {hash_seed}, has other spans"


def home_of(system: System) -> str:
    """The module in which another process finds the system: that of its class, or one that has it as a variable."""
    home = system.parameters.__module__
    if SYSTEMS.get(system.name) is system and home != "__main__":
        return home
    names = [home, *(name for name in sys.modules if name not in (home, "__main__"))]
    for name in names:
        variables = getattr(sys.modules.get(name), "__dict__", {})
        if any(value is system for value in tuple(variables.values())):
            return name
    raise AssertionError(
        f"law 6: expected {system.name!r} in a module that another process can import, found it in none; define and "
        "register its class at the top level of a file on sys.path"
    )


@lru_cache
def digests_of_a_process(hash_seed: str, module: str, names: tuple[str, ...]) -> dict[str, str]:
    """``digests(module, names)`` in another process."""
    code = f"import json; from {__name__} import digests; print(json.dumps(digests({module!r}, {names!r})))"
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"law 6: another process cannot play {', '.join(names)} of {module}: {answer.stderr}"
    return dict(json.loads(answer.stdout))


def digests(module: str, names: Sequence[str]) -> dict[str, str]:
    """A hash of all spans of a fixed world, for systems of these names that a module registers or has as variables."""
    known = {value.name: value for value in vars(import_module(module)).values() if isinstance(value, System)}
    known = {**SYSTEMS, **known}
    return {name: digest(play(fixed_world(known[name]))) for name in names}


# --- laws 7 to 9 ------------------------------------------------------------------------------------------------------


def law_7_no_foresight(world: World, seed: int) -> None:
    """Another future from some decode step on changes no decision before it."""
    cut = 1 + seed % 2
    other = replace(world, trace=other_future(world.trace, cut, seed))
    one, two = play(world), play(other)
    steps = sum(step.phase == "prefill" for step in one.demand) + cut - 1
    assert _decisions(one, steps) == _decisions(two, steps), "law 7: what comes later changed a decision"
    ends = one.spans.end_ns[(one.spans.step == steps - 1) & (one.spans.kind == "wait")].max() if steps else 0
    spans = [played.spans[played.spans.end_ns <= ends] for played in (one, two)]
    assert spans[0].to_csv(index=False) == spans[1].to_csv(index=False)


def other_future(trace: Trace, cut: int, seed: int) -> Trace:
    """``trace``, but from decode token ``cut`` of every sequence on the experts have changed places."""
    decode = trace.phase == 1
    rank = np.array([np.sum(decode[:row] & (trace.sequence[:row] == trace.sequence[row])) for row in range(len(trace))])
    later = decode & (rank >= cut - 1)
    places = np.random.default_rng(seed).permutation(trace.shape.experts).astype(np.int16)
    tensors = {name: array.copy() for name, array in trace.tensors().items()}
    for name, array in tensors.items():
        if name.endswith("ids"):
            array[later] = np.where(array[later] >= 0, places[array[later]], -1)
    if "scores" in tensors:
        assert trace.scores is not None
        tensors["scores"][np.ix_(later, np.arange(trace.shape.moe_layers), places)] = trace.scores[later]
    return Trace.from_tensors(trace.shape, tensors, trace.provenance)


def _decisions(played: PlayedWorld, steps: int) -> list[Any]:
    plans, foresights = played.session.plans, played.session.foresights
    return [(place, plan, foresights.get(place)) for place, plan in plans.items() if place[0] < steps]


def law_8_bound(world: World, bound_of: Callable[[list[StepDemand], CostTable, int], LowerBound]) -> None:
    """Neither the first token nor the mean of the others comes before the bound."""
    played = play(world)
    bound, metrics = bound_of(played.demand, world.costs, played.budget_bytes), metrics_of(played.spans, world.batch)
    assert bound.ttft_ns is not None
    assert metrics.ttft_ms is not None
    assert bound.ttft_ns <= round(metrics.ttft_ms * 1e6), "law 8: the first token beats its bound"
    if bound.tpot_ns is not None:
        assert bound.tpot_ns <= (metrics.tpot_ms or 0) * 1e6 + 1e-6, "law 8: decoding beats its bound"


def law_9_scaling(world: World, c: int) -> None:
    """All costs times ``c``: all times times ``c``."""
    one, times_c = play(world), play(replace(world, costs=scaled(world.costs, c)))
    expected = one.spans.copy()
    for column in ("ready_ns", "start_ns", "end_ns"):
        expected[column] *= c
    pd.testing.assert_frame_equal(expected, times_c.spans)
