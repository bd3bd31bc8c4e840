"""The Gantt picture: the right step, all lanes, short work still visible."""

from __future__ import annotations

import numpy as np
import pytest

from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import spans_frame
from sim.simulate import simulate
from trilane.figures.figure_files import PictureError
from trilane.figures.gantt import gantt, median_decode_step


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(Scenario(policy="dali", prompt_tokens=4, generated_tokens=3))


def test_gantt_shows_all_lanes_and_its_message(run: Run) -> None:
    figure = gantt(run)
    step = median_decode_step(run.spans)
    assert figure.get_suptitle().startswith(f"dali: decode step {step} (the median one) takes ")
    for ax in figure.axes[:2]:
        assert len(ax.get_yticklabels()) == 5
        assert "(ms)" in ax.get_xlabel()


def test_gantt_says_what_was_run_and_shows_short_work(run: Run) -> None:
    figure = gantt(run, step=1, about="a model on a machine")
    assert "median" not in figure.get_suptitle()
    above = figure.axes[0]
    assert above.get_title(loc="left").startswith("a model on a machine\n")
    dot = above.get_window_extent().width  # a bar narrower than a dot of the panel would not be seen
    left, right = above.get_xlim()
    widths = [np.ptp(path.vertices[:, 0]) for bars in above.collections for path in bars.get_paths()]
    assert min(widths) * dot / (right - left) > 0.8


def test_gantt_comes_close_where_the_gpu_waits_as_long_as_elsewhere(run: Run) -> None:
    """Layers of 10 ns: in 0 to 2 the GPU waits 8 ns, in 3 it waits 4 ns, in 4 to 7 none. Mean 3.5 ns a layer: 2 to 4
    (4 ns a layer) come nearest.
    """
    waits = [8, 8, 8, 4, 0, 0, 0, 0]
    rows = [("gpu", 10 * n, 10 * n, 10 * n + 1, "attention", "decode", 0, n, -1, -1, 1, 0) for n in range(8)]
    rows += [("gpu", 10 * n + 1 + wait, 10 * n + 1 + wait, 10 * n + 10, "combine", "decode", 0, n, -1, -1, 1, 0)
             for n, wait in enumerate(waits)]  # fmt: skip
    figure = gantt(Run(run.scenario, "by-hand", spans_frame(sorted(rows, key=lambda row: row[1]))))
    assert figure.axes[1].get_title(loc="left").startswith("layers 2 to 4 ")


def test_median_decode_step_by_hand() -> None:
    """Decode steps of 10, 30 and 20 ns: the last has the median duration."""
    rows = [
        ("gpu", start, start, end, "attention", phase, step, 0, -1, -1, 1, 0)
        for step, (start, end, phase) in enumerate(
            [(0, 100, "prefill"), (100, 110, "decode"), (110, 140, "decode"), (140, 160, "decode")]
        )
    ]
    assert median_decode_step(spans_frame(rows)) == 3


def test_gantt_without_decode_steps(run: Run) -> None:
    prefill = Run(run.scenario, run.policy, run.spans[run.spans["phase"] == "prefill"])
    with pytest.raises(PictureError, match="at least one decode step"):
        gantt(prefill)


def test_gantt_of_a_step_that_is_not_there(run: Run) -> None:
    with pytest.raises(PictureError, match="expected a step from 0 to 3, got 9"):
        gantt(run, step=9)
