"""Made-up routing: valid, said to be made up, the same for the same seed, and forecast as well as asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import bisect

from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate
from traces.file import write_trace
from traces.layout import ForecastKey, TraceError
from traces.library import load_trace
from traces.models.shape import ModelShape
from traces.statistics import forecast_statistics, lag_profile, popularity
from traces.synthesis.measured import measure_trace
from traces.synthesis.named import nearest_routing, with_lengths
from traces.synthesis.routing_model import RoutingModel, stored_models
from traces.synthesis.synthetic_trace import Synthesis, _guess, bisected, correlations, synthetic_trace
from traces.trace import Trace
from trilane.common.errors import TrilaneError

SHAPE = ModelShape("made-up", moe_layers=4, dense_layers=0, experts=32, top_k=4, hidden=8, expert_width=4)
ROUTING = nearest_routing(SHAPE, stored_models()["mini-deepseek"])


def made(routing: RoutingModel = ROUTING, seed: int = 0, model_seed: int = 0, sequences: int = 3) -> Trace:
    return synthetic_trace(SHAPE, Synthesis(routing, sequences, 16, 48, seed, model_seed))


def test_it_is_a_trace_of_the_shape_that_calls_itself_synthetic() -> None:
    trace = made()
    assert trace.topk_ids.shape == (3 * 64, 4, 4)
    assert [int((trace.phase == phase).sum()) for phase in (0, 1)] == [48, 144]
    assert trace.provenance["synthetic"].startswith("fitted to mini-deepseek (")
    assert trace.provenance["text"] == "generated"
    assert trace.scores is not None
    np.testing.assert_allclose(trace.scores.astype(np.float32).sum(axis=2), 1, atol=2e-2)
    best = np.take_along_axis(trace.scores, trace.topk_ids.astype(np.intp), axis=2)
    assert (best.min(axis=2) >= np.sort(trace.scores, axis=2)[:, :, -4]).all()


def test_it_says_whether_it_was_fitted_to_given_text() -> None:
    assert load_trace("synthetic:deepseek-v2-lite/1x1+1").provenance["text"] == "given"


def test_a_seed_gives_one_trace_and_another_gives_other_texts() -> None:
    assert made().checksum == made().checksum
    assert len({trace.checksum for trace in (made(), made(seed=1), made(model_seed=1))}) == 3


def test_a_text_does_not_depend_on_how_many_are_made_with_it() -> None:
    np.testing.assert_array_equal(made(sequences=1).topk_ids, made(sequences=3).topk_ids[:64])


def test_texts_share_what_the_model_likes_and_other_models_like_others() -> None:
    partial = replace(ROUTING, preference_share=(0.8,) * 4, model_share=0.9)

    def likeness(one: Trace, other: Trace) -> float:
        return float(np.corrcoef(popularity(one).ravel(), popularity(other).ravel())[0, 1])

    assert likeness(made(partial), made(partial, seed=1)) > 0.8
    assert abs(likeness(made(partial), made(partial, seed=1, model_seed=1))) < 0.3


def test_each_parameter_does_what_it_says() -> None:
    def persistence(routing: RoutingModel) -> list[float]:
        return [float(value) for value in lag_profile(made(routing), range(1, 3))["probability"]]

    still = replace(ROUTING, preference_share=(0.9,) * 4)
    moving = replace(ROUTING, preference_share=(0.01,) * 4)
    slow = replace(moving, autocorrelation=(0.9, 0.0))
    assert persistence(still)[1] > persistence(moving)[1] + 0.2
    assert persistence(slow)[0] > persistence(moving)[0] + 0.2
    noisy = replace(moving, noise_share=0.9)
    assert measure_trace(made(moving)).gain > measure_trace(made(noisy)).gain + 0.1


@pytest.mark.parametrize("accuracy", [0.3, 0.7, 0.95])
def test_forecasts_are_as_accurate_as_asked(accuracy: float) -> None:
    trace = made(replace(ROUTING, forecast_accuracy={"gate@1": accuracy, "gate@3": accuracy, "partial@1": 1.0}))
    found = forecast_statistics(trace).groupby("forecast")["accuracy_at_k"].mean()
    assert found.drop("partial@1").to_dict() == pytest.approx({"gate@1": accuracy, "gate@3": accuracy}, abs=0.04)
    assert found["partial@1"] == 1
    assert [key.kind for key, forecast in trace.forecasts.items() if forecast.scores is not None] == ["partial"]


@pytest.mark.parametrize("policy", ["smoe", "hybrimoe", "hybrid-pf", "best-exact"])
def test_policies_run_on_it_and_say_that_it_is_synthetic(tmp_path, policy: str) -> None:  # type: ignore[no-untyped-def]
    names = [tmp_path / f"{name}.safetensors" for name in ("evaluated", "calibration")]
    for seed, path in enumerate(names):
        write_trace(made(seed=seed), path)
    scenario = Scenario(trace=str(names[0]), calibration=str(names[1]), model=None, policy=policy, cached_share=0.5)
    assert "synthetic trace" in simulate(scenario.with_(prompt_tokens=4, generated_tokens=3)).labels


def test_texts_that_are_evaluated_are_none_to_calibrate_on() -> None:
    """Fewer of the same: another checksum, but what they route is known."""
    scenario = Scenario(
        trace="synthetic:mini-moe/2x8+16", calibration="synthetic:mini-moe/1x8+16", model=None, policy="fiddler"
    )
    with pytest.raises(ScenarioError, match="is the trace that is evaluated"):
        simulate(scenario)
    assert simulate(scenario.with_(calibration=None)).scenario.calibration == "synthetic:mini-moe-calibration"


@pytest.mark.parametrize("wrong", [{"sequences": 0}, {"seed": -1}, {"generated_tokens": 0}, {"seed": 2 * 10**18}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(TraceError, match="expected a whole number from"):
        Synthesis(ROUTING, **wrong)


@pytest.mark.parametrize("large", [{"sequences": 10**8}, {"prompt_tokens": 10**9}, {"generated_tokens": 10**7}])
def test_a_trace_beyond_the_limit_is_refused_before_it_is_made(large: dict[str, int]) -> None:
    with pytest.raises(TraceError, match=r"at most 4 GB, [0-9,]+ tokens of this model would take [0-9,]+ GB; lower"):
        synthetic_trace(SHAPE, Synthesis(ROUTING, **large))


@pytest.mark.parametrize("name", ["synthetic:mini-moe/%sx2+2", "synthetic:mini-moe:%s", "mini-moe:%s"])
@pytest.mark.parametrize("number", ["9" * 9, "9" * 5000])
def test_numbers_in_a_name_have_limits(name: str, number: str) -> None:
    with pytest.raises((TrilaneError, OSError)):  # the system refuses long file names itself
        load_trace(name % number)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 2), (8, 2), (129, 3), (512, 10)])
def test_any_topology_and_the_shortest_texts_will_do(experts: int, top_k: int) -> None:
    shape = replace(SHAPE, experts=experts, top_k=top_k, moe_layers=2)
    trace = synthetic_trace(shape, Synthesis(nearest_routing(shape), 1, 1, 1))
    assert trace.topk_ids.shape == (2, 2, top_k)
    assert {key.kind for key in trace.forecasts} >= {"gate", "residual", "quasi_hidden", "partial", "estimator"}


def test_routing_of_another_topology_is_refused() -> None:
    with pytest.raises(TraceError, match="routing with top_k = 4 for made-up, got 2"):
        made(replace(ROUTING, top_k=2))


def test_a_model_given_as_a_file_has_a_trace_that_follows_the_file(tmp_path: Path) -> None:
    values = {"hidden_size": 64, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
    file = tmp_path / "config.json"
    for layers in (2, 3):
        rest = {"moe_intermediate_size": 32, "vocab_size": 100, "num_hidden_layers": layers}
        file.write_text(json.dumps({**values, **rest}))
        trace = load_trace(f"synthetic:{file}/2x4+4")
        assert (trace.shape.moe_layers, trace.shape.name) == (layers, str(file))
        assert load_trace(f"synthetic:{file}-calibration/1x2+2:1").shape.moe_layers == 1


NEAREST = nearest_routing(SHAPE)


@given(st.floats(1e-9, 1 - 1e-9), st.floats(0.2, 5), st.integers(1, 200))
def test_bisecting_gives_the_very_numbers_of_scipy(root: float, power: float, steps: int) -> None:
    """Of curves and of stairs, as shares of a few choices are."""

    def rising(x: float) -> float:
        return float(np.floor((x**power) * steps) / steps - root)

    assert bisected(rising) == bisect(rising, 0.0, 1.0, xtol=1e-5)


def test_a_root_that_is_met_is_exact() -> None:
    assert bisected(lambda x: x - 0.5) == 0.5


def test_a_guess_of_some_correlation_varies_as_much_as_the_truth() -> None:
    """0.6 of the true logit and 0.8 of the error, since 0.6² + 0.8² = 1; exact but for the low bits."""
    logits, error = np.array([[5, 0, 5]], np.float32), np.array([[0, 5, 10]], np.float32)
    np.testing.assert_allclose(_guess(logits, error, 0.6), [[3, 4, 11]], rtol=1e-4)


def test_one_forecast_is_solved_as_it_is_among_all() -> None:
    known = correlations(NEAREST, 0, NEAREST.forecast_accuracy)
    assert correlations(NEAREST, 0, ["residual@1"]) == {"residual@1": known["residual@1"]}
    other = replace(NEAREST, forecast_accuracy={**NEAREST.forecast_accuracy, "residual@1": 0.3})
    assert correlations(other, 0, ["residual@1"])["residual@1"] < known["residual@1"]  # no mistaking of like names


def test_without_some_forecasts_the_rest_of_a_trace_is_the_same() -> None:
    whole, part = (synthetic_trace(SHAPE, Synthesis(NEAREST, 2, 4, 4, forecasts=some)) for some in (None, ("gate@2",)))
    assert list(part.forecasts) == [ForecastKey("gate", 2)]
    tensors = part.tensors()
    assert {name: array.tolist() for name, array in whole.tensors().items() if name in tensors} == {
        name: array.tolist() for name, array in tensors.items()
    }


@pytest.mark.parametrize(("asked", "held"), [
    ("none", []), ("gate@1", [("gate", 1)]), ("partial@1,gate@3", [("gate", 3), ("partial", 1)]), ("gate@7", []),
])
def test_a_name_may_say_which_forecasts(asked: str, held: list[tuple[str, int]]) -> None:
    assert sorted(load_trace(f"synthetic:mini-moe/1x2+2/{asked}").forecasts) == held


def test_a_name_lists_its_forecasts() -> None:
    two = with_lengths("synthetic:mini-moe", 4, 64, 8, ["gate@1", "gate@2"])
    assert two == "synthetic:mini-moe/4x64+8/gate@1,gate@2"
    assert with_lengths("synthetic:mini-moe", 4, 64, 8, []) == "synthetic:mini-moe/4x64+8/none"


@pytest.mark.parametrize("asked", ["", "gate", "gate@1,", "gate@1,none"])
def test_a_name_that_says_it_otherwise_is_refused(asked: str) -> None:
    with pytest.raises(TraceError, match="expected synthetic:MODEL"):
        load_trace(f"synthetic:mini-moe/1x2+2/{asked}")
