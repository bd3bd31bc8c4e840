"""What a policy that changes the routing is reported to have changed: each cause by hand, and a slow recount."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.routing_error import CAUSES, TOTALS, RoutingErrors, totals_of
from policies.mechanism.views import Commitment, Forecast, LayerView, Plan, PolicyError, Routing
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import NoPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition, Needs
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import play, simulate

SHORT = Scenario(trace="mini-moe", model=None, prompt_tokens=3, generated_tokens=4, cached_share=0.5)
Ids = Sequence[Sequence[int]]
Counts = dict[str, float]


def routing(ids: Ids, weights: Sequence[Sequence[float]] = ()) -> Routing:
    """A routing from what each token has; equal weights unless told."""
    flat = [e for token in ids for e in token]
    active = tuple(sorted(set(flat)))
    equal = [[1 / len(token) for _ in token] for token in ids]
    return Routing(active, tuple(map(flat.count, active)), ids, weights or equal)


def planned(ids: Ids, precomputed: tuple[int, ...] = (), layer: int = 1, deferred: tuple[int, ...] = ()) -> Plan:
    """A plan of which only the routing in force matters here."""
    return Plan(layer, routing(ids), (), (), (), None, precomputed, (), (), (), (), 0, deferred=deferred)


def forecast_of(layer: int, ids: Ids) -> Forecast:
    """What was predicted for each token."""
    return Forecast(layer, "gate", (), (), ids)


def shares(true: Routing, plan: Plan, forecast: Ids | None = None) -> dict[str, float]:
    """The shares of one layer that are not 0; ``forecast``: what it was committed from."""
    seen = RoutingErrors()
    made = None if forecast is None else [forecast_of(plan.layer, forecast)]
    seen.observe(0, "decode", true, plan, made)
    (row,) = seen.frame().to_dict("records")
    return {str(name): value for name, value in row.items() if str(name).endswith("_share") and value}


# --- each cause by hand: one token routed to 4 (weight 0.5), 7 (0.3) and 2 (0.2) -------------------------------------

TOKEN = routing([[4, 7, 2]], [[0.5, 0.3, 0.2]])


def expected(**causes: tuple[int, float]) -> dict[str, object]:
    """(pairs, weight) by cause, of the one token with three pairs."""
    told: dict[str, float] = {"approximated_token_share": 1}
    for cause, (pairs, weight) in causes.items():
        told |= {f"{cause}_token_share": 1, f"{cause}_pair_share": pairs / 3, f"{cause}_weight_share": weight}
    told["approximated_weight_share"] = sum(weight for _, weight in causes.values())
    return {name: pytest.approx(value) for name, value in told.items() if value}


@pytest.mark.parametrize(("run", "precomputed", "forecast", "causes"), [
    ([4, 7, 2], (), None, None),
    ([2, 7, 4], (), None, None),  # order does not matter
    ([4, 7, 2], (), [[9, 8, 6]], None),  # committed, and right by luck
    ([4, 5, 2], (), None, {"substituted": (1, 0.3)}),
    ([5, 6, 2], (), None, {"substituted": (2, 0.8)}),
    ([4, 5, 2], (), [[4, 5, 2, 9]], {"speculated_wrongly": (1, 0.3)}),
    ([4, 5, 2], (), [[4, 9, 2, 5]], {"degraded": (1, 0.3)}),  # 5 stands fourth, so it was not speculated
    ([4, 5, 2], (), [], {"degraded": (1, 0.3)}),  # committed from nothing
    # 5 runs for 4 and is the forecast's, 6 runs for 7 and is not
    ([5, 6, 2], (), [[5, 2, 4]], {"speculated_wrongly": (1, 0.5), "degraded": (1, 0.3)}),
    ([4, 7], (), None, {"dropped": (1, 0.2)}),
    ([5], (), None, {"substituted": (1, 0.5), "dropped": (2, 0.5)}),
    ([], (), [[4, 7, 2]], {"dropped": (3, 1)}),
    ([4, 7, 2, 9], (), None, {"added": (1, 0)}),
    ([4, 7, 2], (7,), [[4, 7, 2]], {"stale": (1, 0.3)}),
    ([4, 7, 2], (9,), [[4, 7, 2]], None),  # another token's
    # 5 runs for 7 on old activations: what is lost is 7's weight, once; 2 is stale too
    ([4, 5, 2], (2, 5), [[4, 5, 2]], {"speculated_wrongly": (1, 0.3), "stale": (2, 0.2)}),
])
def test_every_cause(
    run: list[int], precomputed: tuple[int, ...], forecast: Ids | None, causes: dict[str, tuple[int, float]] | None
) -> None:
    told = shares(TOKEN, planned([run], precomputed), forecast)
    assert told == ({} if causes is None else expected(**causes))


@pytest.mark.parametrize(("run", "deferred", "causes"), [
    ([4, 7, 2], (2, 7), {"deferred": (2, 0.5)}),
    ([4, 7, 2], (9,), None),  # another token's
    ([4, 5, 2], (5,), {"substituted": (1, 0.3), "deferred": (1, 0)}),  # 7's weight is lost once
])
def test_experts_whose_results_join_later(
    run: list[int], deferred: tuple[int, ...], causes: dict[str, tuple[int, float]] | None
) -> None:
    told = shares(TOKEN, planned([run], deferred=deferred))
    assert told == ({} if causes is None else expected(**causes))


@pytest.mark.parametrize(("run", "causes"), [
    ([4, 17, 2], {"narrowed": (1, 0.3)}),  # of 10 experts, number 17 is the narrow copy of 7
    ([14, 17], {"narrowed": (2, 0.8), "dropped": (1, 0.2)}),
    ([4, 15, 2], {"substituted": (1, 0.3), "narrowed": (1, 0)}),  # 7's weight is lost once
])
def test_experts_that_run_with_narrow_copies(run: list[int], causes: dict[str, tuple[int, float]]) -> None:
    seen = RoutingErrors(experts=10)
    seen.observe(0, "decode", TOKEN, planned([run]), None)
    (row,) = seen.frame().to_dict("records")
    assert {name: value for name, value in row.items() if str(name).endswith("_share") and value} == expected(**causes)


def test_shares_are_of_all_tokens_of_the_layer() -> None:
    """Four tokens of two experts; one loses its second (weight 0.25 of 4), another drops it (0.5 of 4)."""
    true = routing([[0, 1], [0, 1], [2, 3], [2, 3]], [[0.75, 0.25], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    assert shares(true, planned([[0, 4], [0], [2, 3], [3, 2]])) == {
        "approximated_token_share": 0.5, "approximated_weight_share": 0.1875,
        "substituted_token_share": 0.25, "substituted_pair_share": 0.125, "substituted_weight_share": 0.0625,
        "dropped_token_share": 0.25, "dropped_pair_share": 0.125, "dropped_weight_share": 0.125,
    }


def test_phases_and_layers_stand_apart_and_the_totals_are_of_decode() -> None:
    seen = RoutingErrors()
    one = routing([[0, 1]], [[0.5, 0.5]])
    seen.observe(0, "decode", one, planned([[0, 2]], layer=1), None)  # half of a weight of 1
    seen.observe(0, "decode", routing([[0, 1]] * 3), planned([[0, 1]] * 3, layer=0), None)
    seen.observe(0, "prefill", one, planned([[3, 2]], layer=1), None)
    seen.observe(0, "decode", one, planned([[0, 1]], layer=1), None)
    frame = seen.frame()
    assert list(zip(frame.phase, frame.layer, frame.tokens, frame.pairs, frame.weight, strict=True)) == [
        ("prefill", 1, 1, 2, 1.0), ("decode", 0, 3, 6, 3.0), ("decode", 1, 2, 4, 2.0),
    ]
    assert frame.approximated_weight_share.tolist() == [1.0, 0.0, 0.25]
    told = totals_of(frame)
    assert tuple(told) == TOTALS
    assert {name: value for name, value in told.items() if value} == {
        "approximated_token_share": 0.2, "approximated_weight_share": 0.1, "substituted_weight_share": 0.1
    }


@pytest.mark.parametrize("frame", [None, RoutingErrors().frame()])
def test_without_changes_there_is_nothing_to_tell(frame: object) -> None:
    assert set(totals_of(frame).values()) == {None}  # type: ignore[arg-type]


def test_a_routing_that_does_not_say_whose_experts_they_are_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"layer 1, decode: .* the experts of each of 1 tokens .* got those of 0"):
        RoutingErrors().observe(0, "decode", TOKEN, planned([]), None)


# --- a recount --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_a_slow_recount_of_random_routings_agrees(seed: int) -> None:
    rng = random.Random(seed)
    experts, k, layers = rng.randint(2, 7), rng.randint(1, 2), 2
    seen, log = RoutingErrors(), []
    for _ in range(rng.randint(1, 6)):
        tokens, phase, layer = rng.randint(1, 4), rng.choice(("prefill", "decode")), rng.randrange(layers)
        draw = [[rng.sample(range(experts), min(experts, n)) for _ in range(tokens)] for n in (k, k, 2 * k, 2 * k)]
        run = [token[: rng.randint(0, k)] if rng.random() < 0.2 else token for token in draw[1]]
        weights = [sorted((rng.random() for _ in token), reverse=True) for token in draw[0]]
        forecast = draw[2] if rng.random() < 0.6 else None
        early = tuple(e for e in range(experts) if rng.random() < 0.3) if forecast else ()
        late = tuple(e for e in range(experts) if e not in early and rng.random() < 0.2)
        made = None if forecast is None else [forecast_of(layer, forecast), forecast_of(layer + 1, draw[3])]
        seen.observe(0, phase, routing(draw[0], weights), planned(run, early, layer, late), made)
        per_token = zip(draw[0], weights, run, forecast or [None] * tokens, strict=True)
        log += [(phase, layer, *each, early, late) for each in per_token]
    for row in seen.frame().to_dict("records"):
        mine = [token[2:] for token in log if token[:2] == (row["phase"], row["layer"])]
        for name, value in recount(mine).items():
            assert row[name] == pytest.approx(value), name


Early = Late = tuple[int, ...]


def recount(tokens: Sequence[tuple[list[int], list[float], list[int], list[int] | None, Early, Late]]) -> Counts:
    """Expert by expert: what became of the pair with the n-th largest lost weight is told by the n-th stand-in."""
    whole = sum(sum(weights) for _, weights, *_ in tokens)
    pairs = sum(len(true) for true, *_ in tokens)
    found: dict[str, list[tuple[int, float]]] = {cause: [] for cause in CAUSES}  # (token, weight) of each pair
    for token, (true, weights, run, forecast, early, late) in enumerate(tokens):
        stand_ins = [expert for expert in run if not true.count(expert)]
        weight_of = dict(zip(true, weights, strict=True))
        found["deferred"] += [(token, weight_of.get(expert, 0)) for expert in run if expert in late]
        for expert, weight in zip(true, weights, strict=True):
            if run.count(expert):
                if expert in early:
                    found["stale"].append((token, weight))
                continue
            if not stand_ins:
                found["dropped"].append((token, weight))
                continue
            stand_in = stand_ins.pop(0)
            if stand_in in early:
                found["stale"].append((token, 0))
            if forecast is None:
                found["substituted"].append((token, weight))
            elif forecast.index(stand_in) < len(true) if stand_in in forecast else False:
                found["speculated_wrongly"].append((token, weight))
            else:
                found["degraded"].append((token, weight))
        found["added"] += [(token, 0) for _ in stand_ins]
        found["stale"] += [(token, 0) for stand_in in stand_ins if stand_in in early]
    told = {"approximated_token_share": len({t for some in found.values() for t, _ in some}) / len(tokens)}
    told["approximated_weight_share"] = sum(w for some in found.values() for _, w in some) / whole
    for cause, some in found.items():
        told[f"{cause}_token_share"] = len({token for token, _ in some}) / len(tokens)
        told[f"{cause}_pair_share"] = len(some) / pairs
        told[f"{cause}_weight_share"] = sum(weight for _, weight in some) / whole
    return told


# --- in a run ---------------------------------------------------------------------------------------------------------


class LastLeftOut(TrueRouter):
    """Leaves out each token's last expert when a layer is reached.

    In decode, the layer before may commit the first so many of the forecast instead, one of them computed ahead.
    """

    def __init__(self, commits: int = 0) -> None:
        self.commits = commits

    def route(self, view: LayerView) -> Routing:
        true = view.routing
        return routing([ids[:-1] for ids in true.token_ids], [w[:-1] for w in true.token_weights])

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        if not self.commits or view.phase == "prefill":
            return None
        chosen = routing([ids[: self.commits] for ids in forecasts[0].token_ids])
        return Commitment(chosen, chosen.active[:1])


def changing(router: TrueRouter, needs: Needs) -> Composition:
    return Composition(
        name="changing", placement=NoPlacement(), router=router, assigner=LoadAll(), cache=LruCache(), needs=needs
    )


def test_a_run_that_drops_tells_so_layer_by_layer() -> None:
    setting = prepare(SHORT)
    run = play(setting.with_composition(changing(LastLeftOut(), Needs(tokens=True, changes_routing=True))))
    frame, k = run.routing_errors, setting.shape.top_k
    assert frame is not None
    layers = list(range(setting.shape.moe_layers))
    assert list(zip(frame.phase, frame.layer, frame.tokens, strict=True)) == [
        *(("prefill", layer, 3) for layer in layers), *(("decode", layer, 4) for layer in layers)
    ]
    assert set(frame.approximated_token_share) == {1.0}
    assert set(frame.dropped_pair_share) == {1 / k}
    decode = [row for step in setting.steps if step.phase == "decode" for row in step.rows]
    weights = setting.trace.topk_weights[decode].astype(float)
    row = run.to_dict()
    assert row["dropped_weight_share"] == pytest.approx(weights[..., -1].sum() / weights.sum())
    assert row["approximated_weight_share"] == row["dropped_weight_share"]
    assert (row["substituted_weight_share"], row["stale_pair_share"]) == (0, 0)


def test_a_run_that_commits_is_judged_by_the_forecast_that_it_committed_from() -> None:
    needs = Needs(tokens=True, changes_routing=True, forecasts=(("gate", 1),))
    setting = prepare(SHORT)
    frame = play(setting.with_composition(changing(LastLeftOut(setting.shape.top_k), needs))).routing_errors
    assert frame is not None
    decode = frame[frame.phase == "decode"].set_index("layer")
    assert decode.dropped_pair_share[0] > 0  # nobody commits the first layer
    later, k = decode.loc[1:], setting.shape.top_k
    assert (later[["substituted_pair_share", "degraded_pair_share", "dropped_pair_share"]] == 0).all(axis=None)
    rows = [row for step in setting.steps if step.phase == "decode" for row in step.rows]
    held = setting.trace.forecasts["gate", 1].ids[rows][:, :-1, :k]  # type: ignore[index]
    true = setting.trace.topk_ids[rows][:, 1:]
    missed = 1 - (true[..., None] == held[..., None, :]).any(axis=-1).mean(axis=(0, 2))
    assert later.speculated_wrongly_pair_share.tolist() == pytest.approx(missed.tolist())
    assert later.stale_pair_share.tolist() == pytest.approx([1 / k] * len(later))  # one expert of each step's one token


def test_a_policy_that_keeps_the_routing_has_no_routing_errors() -> None:
    run = simulate(replace(SHORT, policy="dali"))
    assert run.routing_errors is None
    assert {run.to_dict()[name] for name in TOTALS} == {None}
    assert "changes routing" not in run.labels


def test_a_policy_that_changes_the_routing_must_look_at_tokens() -> None:
    composition = changing(LastLeftOut(), Needs(changes_routing=True))
    with pytest.raises(PolicyError, match=r"policy 'changing' changes the routing, .* declare Needs\(tokens=True\)"):
        prepare(SHORT).with_composition(composition).checked()
