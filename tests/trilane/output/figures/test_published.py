"""Predicted against measured speeds."""

from __future__ import annotations

import pytest
from matplotlib.collections import PolyCollection

from tests.kit.results import row
from trilane.engines.accuracy.errors import Speeds
from trilane.engines.accuracy.scores import HELD_OUT, Scores
from trilane.output.figures import PictureError, plot_accuracy

ROWS = [
    row("near", 100.0, prompt_tokens=512, prompt_tokens_per_s=1000.0), row("fast", 50.0), row("slow", 80.0),
    row("check", 70.0, quality="C"),
]
SPEEDS = {"near": Speeds(110.0, 900.0), "fast": Speeds(100.0), "slow": Speeds(40.0), "check": Speeds(70.0)}


def test_points_band_and_names() -> None:
    figure = plot_accuracy(Scores(ROWS, {HELD_OUT: SPEEDS}, {}, {}))
    decode, prompts = figure.axes
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]) for line in decode.lines if len(line.get_xdata()) == 1}
    assert drawn == {(100.0, 110.0), (50.0, 100.0), (80.0, 40.0), (70.0, 70.0)}
    assert (decode.get_xscale(), decode.get_yscale()) == ("log", "log")
    assert decode.get_xlim() == decode.get_ylim()
    assert decode.get_xlabel() == "measured: tokens a second of one sequence"
    assert prompts.get_ylabel() == "predicted: prompt tokens a second"
    [band] = [each for each in decode.collections if isinstance(each, PolyCollection)]
    x, low, high = band.get_paths()[0].vertices[1][0], *sorted(band.get_paths()[0].vertices[[1, -2], 1])
    assert (low / x, high / x) == (pytest.approx(0.8), pytest.approx(1.2))
    texts = [text.get_text() for text in decode.texts]
    assert {"fast", "slow"} < set(texts)
    assert "near" not in texts
    assert "fast: qwen3-30b-a3b on rtx-4080, +100%" in texts
    assert "slow: qwen3-30b-a3b on rtx-4080, -50%" in texts


def test_the_headline_counts_no_sanity_checks() -> None:
    figure = plot_accuracy(Scores(ROWS, {HELD_OUT: SPEEDS}, {}, {}))
    assert figure.get_suptitle() == ("Median error: decode 50% (3 speeds, 1 machine), prompts 10% (1 speed, 1 machine)")


def test_nothing_to_draw() -> None:
    with pytest.raises(PictureError, match="got none"):
        plot_accuracy(Scores([row(decode=None)], {HELD_OUT: {"1": Speeds()}}, {}, {}))
