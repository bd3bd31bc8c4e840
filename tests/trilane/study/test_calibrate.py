"""Numbers of an engine from times: those that made the times are found again."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from trilane.study import calibrate
from trilane.study.calibrate import Bounds, CalibrationError, TimedPlay, UnreachedError, calibrated, solved, value_in

SHORT = Scenario(policy="on-demand", prompt_tokens=8, generated_tokens=4, cached_share=0.5, engine="smoe-2025")
LAYER, EXPERT = "software.layer_ns", "software.gpu_expert_ns"


def timed(quantity: calibrate.SpeedQuantity, numbers: Mapping[str, float], **fields: object) -> TimedPlay:
    """A play whose time was made with these numbers."""
    scenario = SHORT.with_(**fields)
    return TimedPlay(scenario, quantity, value_in(simulate(scenario.with_(engine_overrides=numbers)), quantity))


@pytest.mark.parametrize("quantity", ["tpot_ms", "ttft_ms", "tokens_per_s", "prompt_tokens_per_s"])
def test_a_number_that_made_a_time_is_found_again(quantity: calibrate.SpeedQuantity) -> None:
    assert calibrated([timed(quantity, {LAYER: 1.3e6})], [LAYER]) == pytest.approx({LAYER: 1.3e6}, rel=0.01)


def test_a_time_that_no_value_gives_says_how_far_the_nearest_is() -> None:
    with pytest.raises(UnreachedError, match=r"no value of software.layer_ns .* times as long as asked") as error:
        calibrated([TimedPlay(SHORT, "tpot_ms", 0.01)], [LAYER])
    assert error.value.nearest == pytest.approx({LAYER: 800_000 / calibrate.ANY})


def test_as_many_numbers_as_times() -> None:
    with pytest.raises(CalibrationError, match="expected as many numbers as times, got 1 for 2"):
        calibrated([TimedPlay(SHORT, "tpot_ms", 9.0)] * 2, [LAYER])
    with pytest.raises(CalibrationError, match=r"'smoe-2025': expected a value above 0 of software.copy_ns"):
        calibrated([TimedPlay(SHORT, "tpot_ms", 9.0)], ["software.copy_ns"])


def test_several_numbers_of_any_function() -> None:
    bounds = {"a": Bounds(1, 1e4), "b": Bounds(1, 1e4)}

    def errors(numbers: Mapping[str, float]) -> list[float]:
        a, b = numbers["a"], numbers["b"]
        return [math.log((2 * a + b) / 230), math.log((a + 9 * b) / 370)]

    assert solved(errors, bounds) == pytest.approx({"a": 100, "b": 30}, rel=0.01)
