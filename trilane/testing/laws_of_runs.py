"""Laws about whole runs, of one or several of which spans are not enough: 1, 6 to 9 and 12."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from policies.mechanism.views import Assignment, LayerView, Routing
from policies.registry import SYSTEMS, Policy, System, added
from policies.system import ChoiceError
from policies.testing.purity import check_answers, shared_state, snapshot, watched
from sim.costs.cost_table import CostTable
from sim.runs.bounds import LowerBound, lower_bound
from sim.runs.checks import check_needs
from sim.runs.demand import StepDemand
from sim.runs.hits import layer_frame
from sim.runs.metrics import metrics_of
from sim.runs.scenario import Scenario, ScenarioError
from traces.trace import Trace
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import ORDINARY, SIZES, Size, fixed_world, scaled, unsuited, with_drafts, worlds
from trilane.testing.work_conservation import law_5_background_copies
from trilane.testing.worlds import PlayedWorld, World, composition_of, digest, play, play_composition


def check_run(world: World, played: PlayedWorld) -> None:
    """Laws 1 to 5 and 12, and 13 where there is a disk."""
    law_1_routing(played)
    law_1_deferred(played)
    law_2_swaps(played)
    check_all(
        played.log, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs,
        played.host_bytes,
    )
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


def law_2_swaps(played: PlayedWorld) -> None:
    """No copy is under way when the first layer of a step is launched, if the policy waits for swaps. (A read from a
    disk may let one begin.)"""
    if not played.session.policy.awaits_swaps or played.session.host is not None:
        return
    for step in played.demand:
        launched_ns = played.log.launches((step.index, 0))[0].start_ns
        for copy in played.log.lanes["h2d"]:
            assert not copy.start_ns <= launched_ns < copy.end_ns, (
                f"law 2: step {step.index} is launched at {launched_ns} ns, while the link has {copy}"
            )


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


# --- laws of a policy -------------------------------------------------------------------------------------------------


few = settings(
    max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
SEEDS = st.integers(0, 2**32 - 1)


class PolicyLaws:
    """The laws that every policy obeys, as a class of pytest tests.

        from my_policy import Mine  # a class with the decorator ``trilane.register``
        from trilane.testing import PolicyLaws

        class TestMine(PolicyLaws):
            policy = Mine

    ``python -m pytest test_mine.py`` then plays the policy at all sizes and in random worlds, and holds it against laws
    1 to 9 and 12 (docs/design.md) and purity: views and answers stay unchanged, and instances share no state. Law 6
    plays it in another process too, which imports the module that defines the class. One test per law: a subclass sets
    ``policy``, a registered class, or is parametrized by ``entry``, rows of the registry.
    """

    policy: type[Policy]

    @pytest.fixture
    def entry(self) -> System:
        for entry in SYSTEMS.values():
            if entry.parameters is self.policy:
                return entry
        raise ChoiceError(f"{self.policy.__name__} is not registered: decorate it with trilane.register(NAME, SUMMARY)")

    # --- runs ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_laws_1_to_5_and_12_at_every_size(self, entry: System, size: Size) -> None:
        """Or the policy is refused, for the reason that it declares."""
        if reason := unsuited(entry, size):
            _refused(entry, size, reason)
            return
        world = size.world(entry)
        check_run(world, play(world))

    @few
    @given(data=st.data())
    def test_laws_1_to_5_and_12_in_random_worlds(self, entry: System, data: st.DataObject) -> None:
        world = data.draw(worlds([entry]))
        check_run(world, play(world))

    def test_laws_1_to_5_and_12_with_every_choice(self, entry: System) -> None:
        """Each parameter that is a choice, the other way round."""
        for choice in choices(entry):
            try:
                entry.parse(choice)
            except ChoiceError:
                continue  # it goes with other parameters only
            world = ORDINARY.world(entry, **choice)
            try:
                check_run(world, play(world))
            except Exception as error:
                error.add_note(f"policy {entry.name!r} with {choice}")
                raise

    def test_laws_1_to_5_8_and_12_with_drafts(self, entry: System) -> None:
        """Decode steps verify drafts of speculative decoding."""
        world = with_drafts(fixed_world(entry))
        check_run(world, play(world))
        if not entry.needs.changes_routing:
            law_8_bound(world, lower_bound)

    def test_law_6_determinism(self, entry: System) -> None:
        law_6_determinism(entry)

    @few
    @given(data=st.data(), seed=SEEDS)
    def test_law_7_no_foresight(self, entry: System, data: st.DataObject, seed: int) -> None:
        if entry.needs.future:
            pytest.skip("the policy declares that it uses the future")
        law_7_no_foresight(data.draw(worlds([entry], min_decode=2)), seed)

    @few
    @given(data=st.data())
    def test_law_8_no_run_beats_the_lower_bound(self, entry: System, data: st.DataObject) -> None:
        """It bounds runs of the router's own experts."""
        _skip_unbounded(entry)
        law_8_bound(data.draw(worlds([entry])), lower_bound)

    def test_law_8_no_run_beats_the_lower_bound_of_a_fixed_world(self, entry: System) -> None:
        """Here the bound is close; elsewhere a policy that leaves out some work may stay above it."""
        _skip_unbounded(entry)
        law_8_bound(fixed_world(entry), lower_bound)

    @few
    @given(data=st.data(), c=st.integers(2, 9))
    def test_law_9_scaling(self, entry: System, data: st.DataObject, c: int) -> None:
        law_9_scaling(data.draw(worlds([entry], contention=False)), c)

    def test_the_assigner_is_called_once_per_layer(self, entry: System) -> None:
        """By the session alone: an assigner may remember its decisions."""
        world = fixed_world(entry)
        policy = composition_of(world)
        assign, calls = policy.assigner.assign, list[tuple[int, int]]()

        def counted(view: LayerView) -> Assignment:
            calls.append((view.step, view.layer))
            return assign(view)

        policy.assigner.assign = counted  # type: ignore[method-assign]
        planned = list(play_composition(world, policy).session.plans)
        assert calls == planned, f"assign is called once per layer: {len(planned)} layers, {len(calls)} calls"

    # --- purity -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [ORDINARY, Size("a batch of one", sequences=1, prompt=6)], ids=str)
    def test_purity_views_and_answers_stay_as_they_are(self, entry: System, size: Size) -> None:
        world = size.world(entry)
        context = world.context
        before = snapshot(context)
        policy = watched(composition_of(world, context))
        spans = play_composition(world, policy).spans
        check_answers(policy)
        assert snapshot(context) == before, "purity: what the policy was built from has changed"
        assert spans.equals(play(world).spans), "purity: another run when it is watched"

    def test_purity_instances_share_nothing(self, entry: System) -> None:
        """Neither any state that can be found, nor any that shows: in between, another instance plays another world."""
        world = fixed_world(entry)
        context = world.context
        alone = digest(play(world))
        one, two = (composition_of(world, context) for _ in range(2))
        shared = shared_state(one, two, context)
        assert not shared, f"purity: two instances share {', '.join(shared)}"
        other = world if entry.needs.future else replace(world, trace=other_future(world.trace, 1, 0))
        play_composition(other, one)
        assert digest(play_composition(world, two)) == alone, "purity: an instance depends on the runs of another"


def choices(system: System) -> Iterator[dict[str, Any]]:
    """Every parameter that is a switch or a choice of names, with each value that is not its default."""
    hints = get_type_hints(system.parameters)
    for name, _, default in system.parameter_table():
        values = (True, False) if hints[name] is bool else ()
        if get_origin(hints[name]) is Literal:
            values = get_args(hints[name])
        yield from ({name: value} for value in values if value != default)


def _skip_unbounded(entry: System) -> None:
    if entry.needs.changes_routing:
        pytest.skip("the policy declares that it changes the routing, and the bound is of the router's own experts")


def _refused(system: System, size: Size, reason: str) -> None:
    """The simulator says why."""
    shape: Any = SimpleNamespace(name="toy", expert_bytes=size.expert_bytes)
    with pytest.raises(ScenarioError, match=reason):
        check_needs(system.name, system.needs, Scenario(batch=size.sequences), shape)
