"""Forecasts made up: some of them alone, and how the error is found that makes them as accurate as asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import bisect

from traces.layout import ForecastKey, TraceError
from traces.library import load_trace
from traces.models.shape import ModelShape
from traces.synthesis.named import nearest_routing, with_lengths
from traces.synthesis.synthetic_trace import Synthesis, _guess, bisected, correlations, synthetic_trace

SHAPE = ModelShape("made-up", moe_layers=4, dense_layers=0, experts=32, top_k=4, hidden=8, expert_width=4)
ROUTING = nearest_routing(SHAPE)


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
    known = correlations(ROUTING, 0, ROUTING.forecast_accuracy)
    assert correlations(ROUTING, 0, ["residual@1"]) == {"residual@1": known["residual@1"]}
    other = replace(ROUTING, forecast_accuracy={**ROUTING.forecast_accuracy, "residual@1": 0.3})
    assert correlations(other, 0, ["residual@1"])["residual@1"] < known["residual@1"]  # no mistaking of like names


def test_without_some_forecasts_the_rest_of_a_trace_is_the_same() -> None:
    whole, part = (synthetic_trace(SHAPE, Synthesis(ROUTING, 2, 4, 4, forecasts=some)) for some in (None, ("gate@2",)))
    assert list(part.forecasts) == [ForecastKey("gate", 2)]
    tensors = part.tensors()
    assert {name: array.tolist() for name, array in whole.tensors().items() if name in tensors} == {
        name: array.tolist() for name, array in tensors.items()
    }


@pytest.mark.parametrize(
    ("asked", "held"),
    [("none", []), ("gate@1", [("gate", 1)]), ("partial@1,gate@3", [("gate", 3), ("partial", 1)]), ("gate@7", [])],
)
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
