"""What every registered policy must be given, and that those which look ahead use what they are given."""

from __future__ import annotations

import pytest

from policies.mechanism.views import Assignment, Forecast, ResidencyView
from policies.parts.future import Future
from policies.protocols import Composition, Needs
from policies.registry import SYSTEMS, BuildContext, added, compose
from policies.system import System
from tests.kit.views import costs, scored_view
from trilane.testing.worlds import toy_calibration

GATE, QUASI, ESTIMATED = (("gate", 1),), (("quasi_hidden", 1),), (("estimator", 1),)
DAOP = Needs(tokens=True, forecasts=GATE, forecast_phases=("decode",), calibration=True, changes_routing=True)
NEEDS = {
    "layer-wise naive-cpu llama.cpp llama.cpp@impl llama.cpp@cache ktransformers@layer-wise random-prefetch": Needs(),
    "llama-cache-lru llama-cache-lru@impl llama-cache-heat llama-cache-pool": Needs(),
    "llama-cache-static": Needs(calibration=True),
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
    "adapmoe": Needs(forecasts=GATE, forecast_phases=("decode",), calibration=True, gpu_only=True),
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
    "best-exact": Needs(scores=True, forecasts=QUASI, calibration=True),
    "best-approx": Needs(scores=True, tokens=True, forecasts=QUASI, calibration=True, changes_routing=True),
    "mix": Needs(forecasts=GATE),
    "oracle": Needs(forecasts=(("oracle", 1),), future=True),
}
COST = costs((5,) * 9, (900,) * 9, copy_ns=100)
BY_POLICY = {name: needs for names, needs in NEEDS.items() for name in names.split()}
OURS = [entry for name, entry in SYSTEMS.items() if not added(name)]


@pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)
def test_what_a_policy_must_be_given(entry: System) -> None:
    assert entry.needs == BY_POLICY[entry.name]


def built(entry: System) -> Composition:
    costs = [COST] * 2
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
    here = scored_view([[0.1, 0.2, 0.3, 0.4]], 2, cost=COST)
    here = here._replace(residency=ResidencyView([(), (0, 1)], [(), ()]))
    policy.cache.observe(here)
    forecasts = [
        Forecast(1, kind, (2, 3), (1, 1), [(3, 2, 1, 0)], [(0.4, 0.3, 0.2, 0.1)])
        for kind, ahead in entry.needs.forecasts if ahead == 1
    ]
    ranked = policy.prefetcher.rank(here, forecasts, Assignment((3, 2), (), (), 10_000)) if policy.prefetcher else ()
    committed = policy.router.commit(here, forecasts)
    named = {key.expert for key in ranked} | set(committed.routing.active if committed else ())
    assert named & {2, 3}
