"""Systems by name: what there is, what is refused and how, and that each composes into a policy that runs."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.baselines.oracle import Oracle
from policies.mechanism.session import Session
from policies.mechanism.views import (
    Assignment,
    ExpertCosts,
    Forecast,
    HostView,
    LayerInput,
    NarrowCopies,
    PolicyError,
    ResidencyView,
    Routing,
)
from policies.papers.dali.system import Dali
from policies.papers.fiddler import Fiddler
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.future import Future
from policies.parts.placements import PoolPlacement
from policies.protocols import Budget, Composition, Needs
from policies.registry import SYSTEMS, BuildContext, ChoiceError, added, compose, policy_names, register, system
from policies.system import System
from tests.kit.views import costs, scored_view
from trilane.testing.worlds import toy_calibration

ROOT = Path(__file__).parents[2]
LAYERS, EXPERTS, STEPS = 3, 8, 6
COST = ExpertCosts((0, 10), (0, 40), 5, 70, 1)
Events = list[tuple[int, int, tuple[int, ...]]]


def events() -> Events:
    draw = random.Random(1)
    return [(s, layer, tuple(sorted(draw.sample(range(EXPERTS), 2)))) for s in range(STEPS) for layer in range(LAYERS)]


def context(**fields: object) -> BuildContext:
    given = {
        "calibration": toy_calibration(LAYERS, EXPERTS, 2), "top_k": 2, "future": Future(events()),
        "costs": [COST] * LAYERS, **fields,
    }
    return BuildContext("toy", EXPERTS, LAYERS, **given)  # type: ignore[arg-type]


def test_names() -> None:
    assert policy_names() == tuple(SYSTEMS)
    assert set(policy_names()) >= {"on-demand", "layer-wise", "fiddler", "dali", "dali-ilp", "oracle"}
    assert all(system(name).name == name for name in policy_names())


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_says_what_it_is_and_builds_what_it_says(name: str) -> None:
    entry, built = system(name), compose(name, context=context())
    assert 0 < len(entry.summary) <= 80
    assert entry.source
    assert built.name == name
    assert replace(built.needs, forecast_layers={}) == entry.needs  # which layers depends on the model
    table = {parameter: default for parameter, _, default in entry.parameter_table()}
    assert set(built.parameters) == set(table)
    told = " ".join(str(kind.__doc__) for kind in entry.parameters.__mro__)
    assert [parameter for parameter in table if parameter not in told] == []


@pytest.mark.parametrize(("name", "message"), [
    ("dahli", "there is no policy 'dahli'; did you mean 'dali'? `trilane policies` lists them all"),
    ("On_Demand", "did you mean 'on-demand'"),
    ("xyzzy", "there is no policy 'xyzzy'; `trilane policies` lists them all"),
])
def test_an_unknown_policy_lists_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(ChoiceError) as caught:
        compose(name, context=context())
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "parameters", "message"), [
    ("on-demand", {"slots": 3}, "there is no key 'slots'; choose from pool, demand_slots"),
    ("layer-wise", {"n": 3}, "'layer-wise': there is no key 'n'; choose from none"),
    ("dali", {"window": "4"}, "window: expected a whole number >= 1 or null, got '4'"),
    ("dali", {"window": True}, "expected a whole number >= 1 or null, got True"),
    ("dali", {"window": 0}, "window: expected a whole number >= 1"),
    ("dali", {"evict": "all"}, "expected 'idlest' or 'busiest', got 'all'"),
    ("dali-ilp", {"solver": "gurobi"}, "expected 'own' or 'highs', got 'gurobi'"),
    ("fiddler", {"uniform": 1}, "expected true or false, got 1"),
])
def test_a_wrong_parameter_says_what_is_right(name: str, parameters: Mapping[str, object], message: str) -> None:
    with pytest.raises(ChoiceError) as caught:
        compose(name, parameters, context=context())
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "parameter"), [
    ("static-threshold", "alpha"), ("hybrimoe", "alpha"), ("hybrimoe", "discount"), ("hybrimoe@impl", "alpha"),
    ("smoe", "alpha"), ("daop", "swap_share"), ("hybrid-pf", "threshold"), ("hybrid-pf@exact", "threshold"),
])
def test_shares_are_shares(name: str, parameter: str) -> None:
    for value in (0.0, 1.0):
        system(name).parse({parameter: value})
    for value in (-0.1, 1.5):
        with pytest.raises(ChoiceError, match=f"{parameter}: expected a number from 0 to 1, got {value}"):
            system(name).parse({parameter: value})


@pytest.mark.parametrize(("name", "missing", "message"), [
    ("fiddler", {"calibration": None}, "needs calibration: a trace of the same model on prompts other than those"),
    ("oracle", {"future": None}, "needs the future of the run: give it a complete trace"),
])
def test_what_is_needed_must_be_there(name: str, missing: Mapping[str, object], message: str) -> None:
    with pytest.raises(ChoiceError, match=message):
        compose(name, context=context(**missing))


@pytest.mark.parametrize(("experts", "sizes"), [(8, (4, 1, 1)), (16, (4, 1, 1)), (64, (4, 8, 4)), (128, (4, 8, 4))])
def test_dali_takes_its_sizes_from_the_model(experts: int, sizes: tuple[int, int, int]) -> None:
    built = compose("dali", context=BuildContext("m", experts, 4))
    assert tuple(built.parameters[name] for name in ("window", "update", "prefetch")) == sizes
    assert (built.prefetch_slots, built.parameters["prefetch_slots"]) == (2 * sizes[2],) * 2


def test_a_system_that_peeks_without_saying_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peeking(Oracle):
        needs = replace(Oracle.needs, future=False)

    monkeypatch.setitem(SYSTEMS, "oracle", replace(SYSTEMS["oracle"], parameters=Peeking))
    with pytest.raises(PolicyError, match=r"'oracle' needs forecasts of the kind 'oracle': declare Needs\(future"):
        compose("oracle", context=context())


def test_dali_without_prefetches_needs_no_forecast() -> None:
    built = compose("dali", {"prefetch": 0, "forecast": "gate"}, context=context())
    assert (built.prefetcher, built.prefetch_slots, built.needs.forecasts) == (None, 0, ())
    assert compose("dali", {"forecast": "gate"}, context=context()).needs.forecasts == (("gate", 1),)


def test_parameters_choose_parts() -> None:
    assert isinstance(compose("dali", {"assigner": "exact"}, context=context()).assigner, ExactAssigner)
    assert isinstance(compose("on-demand", {"pool": True}, context=context()).placement, PoolPlacement)


def run(policy: Composition) -> list[object]:
    """Every plan of a run on a machine whose copies take no time."""
    popularity = np.arange(LAYERS * EXPERTS, dtype=float).reshape(LAYERS, EXPERTS)
    copies = None if policy.needs.narrow_share is None else NarrowCopies(EXPERTS, COST)
    session = Session(policy, Budget(EXPERTS, (1,) * LAYERS, 12, popularity), [COST._replace(narrow=copies)] * LAYERS)
    trace, plans = events(), []
    for place, (step, layer, active) in enumerate(trace):
        if layer == 0:
            session.begin_step(step)
        routing = Routing(active, (1, 1), [active], [(0.5, 0.5)])
        scores = [[0.4 if expert in active else 0.2 / (EXPERTS - 2) for expert in range(EXPERTS)]]
        plans.append(session.plan_layer(LayerInput(step, layer, "decode", routing, scores, (0,))))
        copy_all(session, layer)
        if session.looks_ahead and layer + 1 < LAYERS:
            session.foresee([forecast_of(trace[place + 1][2], layer + 1, kind) for kind, _ in policy.needs.forecasts])
            copy_all(session, layer)
        session.end_layer()
        if layer == LAYERS - 1:
            session.end_step()
    return list(plans)


def forecast_of(active: tuple[int, ...], layer: int, kind: str) -> Forecast:
    """A forecast that is right."""
    ranked = (*active, *(expert for expert in range(EXPERTS) if expert not in active))
    return Forecast(layer, kind, active, (1, 1), [ranked], [[0.4, 0.4] + [0.2 / (EXPERTS - 2)] * (EXPERTS - 2)])


def copy_all(session: Session, layer: int) -> None:
    """Whatever the session wants copied arrives at once, and whatever is staged for the layer is used at once."""
    while (copy := session.next_copy()) is not None:
        session.copied(copy)
        for expert in list(session.staged(layer)):
            session.computed(session.residency.ids[layer][expert])


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_runs_and_repeats_itself(name: str) -> None:
    first, second = (run(compose(name, context=context())) for _ in range(2))
    assert first == second
    assert len(first) == STEPS * LAYERS


def test_a_program_registers_its_own_and_never_in_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "mine", SYSTEMS["dali"])  # to be taken back afterwards
    del SYSTEMS["mine"]
    assert not added("mine")
    for _ in range(2):  # a cell of a notebook that is run again

        @register("mine", "greedy, and mine")
        class Mine(Dali):
            """DALI with another default."""

        assert system("mine") == System("mine", "greedy, and mine", "ours", Mine)
    assert added("mine")
    assert not added("dali")
    ours = system("dali")
    for name in ("mine", "dali"):
        with pytest.raises(ChoiceError, match=f"there is a policy '{name}' already; give yours another name"):
            register(name, "another")(Fiddler)
    assert system("dali") is ours


@pytest.mark.parametrize(("part", "given", "told"), [
    ("cache", 42, "cache: expected an object with observe, admitted, evicted, order, victim, swaps, admits, got 42; "),
    ("assigner", ExactAssigner, "assigner: expected an object with assign, got the class ExactAssigner; "),
    ("router", None, "router: expected an object with route, commit, looks_ahead, got None; "),
    ("placement", Fiddler(), "placement: expected an object with place, got "),
])
def test_a_part_that_is_none_is_refused(part: str, given: object, told: str) -> None:
    class Mine(Fiddler):
        def compose(self, context: BuildContext) -> Composition:
            changed: Any = {part: given}
            return replace(super().compose(context), **changed)

    with pytest.raises(PolicyError, match=f"^policy 'mine': {told}"):
        System("mine", "", "", Mine).build(Mine(), context())


def test_compose_must_return_a_composition() -> None:
    class Mine(Fiddler):
        def compose(self, context: BuildContext) -> Any:
            return None

    with pytest.raises(PolicyError, match="policy 'mine': compose: expected to return a Composition, got None"):
        System("mine", "", "", Mine).build(Mine(), context())


def test_what_a_policy_leaves_out_is_filled_in() -> None:
    """Name, parameters and declared needs; what it gives itself stays."""

    class Mine(Fiddler):
        def compose(self, context: BuildContext) -> Composition:
            return replace(super().compose(context), parameters={"demand_slots": context.top_k})

    built = System("mine", "", "", Mine).build(Mine(uniform=True), context())
    assert (built.name, built.parameters) == ("mine", {"uniform": True, "demand_slots": 2})
    assert built.needs == Mine.needs == Needs(calibration=True)


def test_the_order_of_imports_does_not_change_the_order_of_policies() -> None:
    code = "import policies.papers.daop; from policies.registry import policy_names; print(*policy_names())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert tuple(done.stdout.split()) == policy_names()


# --- what every registered policy must be given, and that those which look ahead use what they are given --------------


GATE, QUASI, ESTIMATED = (("gate", 1),), (("quasi_hidden", 1),), (("estimator", 1),)
DAOP = Needs(tokens=True, forecasts=GATE, forecast_phases=("decode",), calibration=True, changes_routing=True)
NEEDS = {
    "layer-wise naive-cpu llama.cpp llama.cpp@impl llama.cpp@cache ktransformers@layer-wise random-prefetch": Needs(),
    "llama-cache-lru llama-cache-lru@impl llama-cache-heat llama-cache-pool": Needs(),
    "llama-cache-static": Needs(calibration=True),
    "strata": Needs(calibration=True),
    "strata@tail-skip": Needs(tokens=True, calibration=True, changes_routing=True, max_batch=1),
    "kt-deferral": Needs(tokens=True, calibration=True, changes_routing=True),
    "cache-prior": Needs(scores=True, tokens=True, gpu_only=True, changes_routing=True),
    "buddy": Needs(tokens=True, forecasts=GATE, calibration=True, gpu_only=True, changes_routing=True),
    "hobbit": Needs(
        tokens=True, forecasts=(("gate", 1), ("gate", 2), ("gate", 3)), forecast_phases=("decode",), gpu_only=True,
        changes_routing=True, narrow_share=0.25,
    ),
    "least-stale": Needs(forecasts=GATE, gpu_only=True),
    "seqmoe": Needs(forecasts=(("token", 1), ("token", 2)), gpu_only=True),
    "pre-gated": Needs(forecasts=(("oracle", 1),), future=True, gpu_only=True),
    "on-demand deepspeed mixtral-offloading@impl moe-infinity@impl": Needs(gpu_only=True),
    "ktransformers moe-lightning fiddler fiddler@impl": Needs(calibration=True),
    "mixtral-offloading": Needs(forecasts=GATE, forecast_phases=("decode",), uniform_sizes=True, gpu_only=True),
    "moe-infinity edgemoe": Needs(tokens=True, calibration=True, gpu_only=True),
    "moe-lightning@impl": Needs(calibration=True, gpu_only=True),
    "adapmoe": Needs(
        forecasts=GATE, forecast_phases=("decode",), calibration=True, calibrated_tokens=True, gpu_only=True
    ),
    "dali dali-ilp dali-beam": Needs(forecasts=(("residual", 1),)),
    "hybrimoe": Needs(scores=True, forecasts=(("gate", 1), ("gate", 2), ("gate", 3))),
    "hybrimoe@impl": Needs(scores=True),
    "prescope": Needs(forecasts=(("gate", 1), ("gate", 2))),
    "static-threshold": Needs(scores=True, forecasts=GATE, calibration=True),
    "smoe": Needs(scores=True, tokens=True, forecasts=(("partial", 1),), changes_routing=True),
    "daop daop@impl": DAOP,
    "router-pf": Needs(tokens=True, forecasts=GATE, gpu_only=True, changes_routing=True),
    "router-pf@exact": Needs(forecasts=GATE, gpu_only=True),
    "quasi-pf": Needs(tokens=True, forecasts=QUASI, gpu_only=True, changes_routing=True),
    "quasi-pf@exact": Needs(forecasts=QUASI, gpu_only=True),
    "quasi-pf@impl": Needs(
        tokens=True, forecasts=QUASI, forecast_phases=("decode",), gpu_only=True, changes_routing=True
    ),
    "est-pf": Needs(tokens=True, forecasts=ESTIMATED, gpu_only=True, changes_routing=True),
    "est-pf@exact": Needs(forecasts=ESTIMATED, gpu_only=True),
    "hybrid-pf": Needs(tokens=True, forecasts=QUASI + ESTIMATED, calibration=True, gpu_only=True, changes_routing=True),
    "hybrid-pf@exact": Needs(forecasts=QUASI + ESTIMATED, calibration=True, gpu_only=True),
    "moe-stream ds4": Needs(gpu_only=True),
    "pin-hot ik-prefetch": Needs(),
    "colibri": Needs(forecasts=GATE, calibration=True),
    "flashmoe": Needs(calibration=True, calibrated_tokens=True, gpu_only=True),
    "best-exact": Needs(scores=True, forecasts=QUASI, calibration=True),
    "best-approx": Needs(scores=True, tokens=True, forecasts=QUASI, calibration=True, changes_routing=True),
    "mix": Needs(forecasts=GATE),
    "oracle": Needs(forecasts=(("oracle", 1),), future=True),
}
NINE_TOKENS = costs((5,) * 9, (900,) * 9, copy_ns=100)
BY_POLICY = {name: needs for names, needs in NEEDS.items() for name in names.split()}
OURS = [entry for name, entry in SYSTEMS.items() if not added(name)]


@pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)
def test_what_a_policy_must_be_given(entry: System) -> None:
    assert entry.needs == BY_POLICY[entry.name]


def built(entry: System) -> Composition:
    costs = [NINE_TOKENS] * 2
    context = BuildContext(
        "toy", 4, 2, 2, costs=costs, calibration=toy_calibration(2, 4, 2), future=Future([(0, 0, (2, 3))])
    )
    return compose(entry.name, context=context)


@pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)
def test_prefetches_go_to_the_cache_or_have_staging_slots(entry: System) -> None:
    policy = built(entry)
    place = None if policy.prefetcher is None else policy.prefetcher.into
    assert place in ((None, "cache") if policy.prefetch_slots == 0 else ("cache", "staging"))


FORESEEING = [entry for entry in OURS if entry.needs.forecasts]


@pytest.mark.parametrize("entry", FORESEEING, ids=lambda entry: entry.name)
def test_a_forecast_that_is_asked_for_is_used(entry: System) -> None:
    """It names 2 and 3 of the next layer, which are absent: they are prefetched, or the layer is committed to them."""
    policy = built(entry)
    here = scored_view([[0.1, 0.2, 0.3, 0.4]], 2, cost=NINE_TOKENS)
    here = here._replace(residency=ResidencyView([(), (0, 1)], [(), ()]), host=HostView((), 0))
    policy.cache.observe(here)
    forecasts = [
        Forecast(1, kind, (2, 3), (1, 1), [(3, 2, 1, 0)], [(0.4, 0.3, 0.2, 0.1)])
        for kind, ahead in entry.needs.forecasts if ahead == 1
    ]
    prefetcher = policy.prefetcher or policy.host_prefetcher
    ranked = prefetcher.rank(here, forecasts, Assignment((3, 2), (), (), 10_000)) if prefetcher else ()
    committed = policy.router.commit(here, forecasts)
    named = {key.expert for key in ranked} | set(committed.routing.active if committed else ())
    assert named & {2, 3}
