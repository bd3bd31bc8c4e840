"""Pictures: the parts that carry the message are there, and files are whole or absent."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sim.comparison import compare
from sim.engine.spans import spans_frame
from sim.pictures.figure_files import PictureError, save_figure
from sim.pictures.gantt import gantt, median_decode_step, save_gantt
from sim.pictures.plots import cache_curve, tpot_bars
from sim.results.run import Run
from sim.scenario import Scenario
from sim.simulate import simulate

PNG = b"\x89PNG"
MIB = 2**20


def row(policy: str, tpot: float, *labels: str, **more: Any) -> dict[str, Any]:
    """A run's row: a fifth of its time waiting for copies, a tenth for the CPU."""
    stalls = {"stall_h2d_ms": 0.2 * tpot, "stall_cpu_ms": 0.1 * tpot, "stall_host_ms": 0.0}
    return {"policy": policy, "tpot_ms": tpot, "labels": list(labels), **stalls, **more}


def texts(figure: Figure) -> str:
    """All that a reader can read in a figure, but for axis numbers."""
    [ax] = figure.axes
    legend = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    words = [text.get_text() for text in ax.texts] + [label.get_text() for label in ax.get_yticklabels()]
    return "\n".join([figure.get_suptitle(), ax.get_xlabel(), ax.get_ylabel(), *words, *legend])


def test_bars_rank_policies_and_say_who_wins() -> None:
    rows = [row("slow", 30.0), row("seer", 5.0, "clairvoyant"), row("fast", 10.0)]
    figure = tpot_bars(rows, "somewhere")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["seer *", "fast", "slow"]
    assert figure.get_suptitle() == "fast is fastest: 10.0 ms per token, 3.0x faster than slow"
    assert "(ms)" in texts(figure)


def test_bars_are_as_long_as_the_times() -> None:
    """Parts of a bar: 0.7 GPU, 0.2 copies, 0.1 CPU, 0 host of 10 ms."""
    [ax] = tpot_bars([row("only", 10.0)]).axes
    widths = [round(patch.get_width(), 9) for patch in ax.patches]  # type: ignore[attr-defined]
    assert widths == [7.0, 2.0, 1.0, 0.0]


def test_bars_mark_lower_bound_and_null_model() -> None:
    [ax] = tpot_bars([row("only", 10.0, lower_bound_tpot_ms=4.0, null_model_tpot_ms=12.0)]).axes
    marks = [line.get_xdata() for line in ax.lines]
    assert [float(x) for mark in marks for x in mark] == [4.0, 4.0, 12.0]
    assert ax.get_xlim()[1] > 12.0


def test_bars_of_means_have_whiskers_where_draws_differ() -> None:
    spread, steady = {"tpot_ms_min": 8.0, "tpot_ms_max": 13.0}, {"tpot_ms_min": 20.0, "tpot_ms_max": 20.0}
    figure = tpot_bars([row("mine", 10.0, **spread, draws=[{}] * 5), row("steady", 20.0, **steady, draws=[{}] * 5)])
    [ax] = figure.axes
    assert [tuple(line.get_xdata()) for line in ax.lines] == [(8.0, 13.0)]
    assert "lowest to highest of 5 draws" in texts(figure)
    assert figure.get_suptitle() == "mine is fastest on average: 10.0 ms per token, 2.0x faster than steady"
    assert [text.xy[0] for text in ax.texts] == [13.0, 20.0]  # type: ignore[attr-defined]


def test_a_bar_far_longer_than_most_is_cut() -> None:
    """The median of 10, 20 and 1000 is 20: the axis ends at 2.5 x 20 and room for labels."""
    [ax] = tpot_bars([row("mine", 10.0), row("other", 20.0), row("endless", 1000.0)]).axes
    assert ax.get_xlim()[1] == pytest.approx(1.17 * 50)
    assert [text.get_text() for text in ax.texts] == ["10.0 ms", "20.0 ms", "1,000.0 ms \N{RIGHTWARDS ARROW}"]


def test_many_bars_are_held_against_the_median() -> None:
    title = tpot_bars([row(f"p{n}", 10.0 + n) for n in range(9)]).get_suptitle()
    assert title == "p0 is fastest: 10.0 ms per token, 1.4x faster than the median"


def test_of_very_many_the_slowest_are_only_named() -> None:
    """26 policies: 24 bars, a line about the others, and no diamonds, for which there is no room."""
    rows = [
        row(f"p{n}", 10.0 + n, *(["changes routing"] if n == 25 else []), null_model_tpot_ms=9.0) for n in range(26)
    ]
    figure = tpot_bars(rows)
    [ax] = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"p{n}" for n in range(24)]
    assert ax.get_xlabel().endswith("2 more, slower (34 to 35 ms): p24, p25 ~")
    assert not ax.lines
    assert "null model" not in texts(figure)


def test_marks_are_explained() -> None:
    told = texts(tpot_bars([row("seer", 5.0, "clairvoyant"), row("bold", 10.0, "changes routing")]))
    assert {"seer *", "bold ~", "* knows the future", "~ changes the routing"} <= set(told.splitlines())
    assert "*" not in texts(tpot_bars([row("plain", 5.0)]))


@pytest.mark.parametrize("count", [3, 40])
def test_names_are_not_cut_off(count: int) -> None:
    figure = tpot_bars([row(f"a-very-long-name-of-a-policy@layer-wise-{n}", 10.0 + n) for n in range(count)])
    FigureCanvasAgg(figure).draw()
    [ax] = figure.axes
    assert min(label.get_window_extent().x0 for label in ax.get_yticklabels()) >= 0
    below = ax.xaxis.label.get_window_extent()
    assert below.x0 >= 0
    assert below.x1 <= figure.bbox.x1


def test_a_winner_that_changes_the_routing_is_named_as_one() -> None:
    title = tpot_bars([row("bold", 10.0, "changes routing"), row("exact", 20.0)]).get_suptitle()
    assert title.startswith("bold (changes routing) is fastest: ")


@pytest.mark.parametrize("rows", [[], [{"tpot_ms": None, "policy": "prefill only"}]])
def test_nothing_to_draw(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(PictureError, match="at least one run with decode steps"):
        tpot_bars(rows)


def point(policy: str, mib: int, rate: float) -> dict[str, Any]:
    return {"policy": policy, "capacity_bytes": mib * MIB, "hit_rate": rate, "hit_rate_decode": rate}


def test_curve_has_a_named_line_for_each_policy() -> None:
    points = [point("lru", 400, 0.5), point("lru", 100, 0.25), point("belady", 100, 0.5), point("belady", 400, 0.75)]
    figure = cache_curve(points)
    lines = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in figure.axes[0].lines}
    assert list(lines) == [(100.0, 400.0)]
    assert [tuple(line.get_ydata()) for line in figure.axes[0].lines] == [(0.25, 0.5), (0.5, 0.75)]
    assert "lru  50.0%" in texts(figure)
    assert "belady  75.0%" in texts(figure)
    assert "(MiB)" in texts(figure)


def test_curve_labels_keep_apart() -> None:
    points = [point(name, 100, 0.5) for name in ("lru", "lfu", "random", "belady")]
    heights = sorted(text.xy[1] for text in cache_curve(points).axes[0].texts)  # type: ignore[attr-defined]
    assert all(high - low > 0.04 for low, high in pairwise(heights))


def test_curve_of_nothing() -> None:
    with pytest.raises(PictureError, match="at least one point"):
        cache_curve([])


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


def test_pictures_are_the_same_every_time(run: Run, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_gantt(run, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_unknown_picture_format(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"ending in \.png"):
        save_figure(Figure(), tmp_path / "a.xyz")
    assert not list(tmp_path.iterdir())


def test_failed_picture_leaves_nothing(tmp_path: Path) -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "$\\undefined$")
    with pytest.raises(ValueError, match="undefined"):
        save_figure(figure, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_every_policy_can_be_drawn(tmp_path: Path) -> None:
    """One bar each; and a Gantt picture of who does something that none before did."""
    scenario = Scenario(trace="mini-moe", model=None, prompt_tokens=4, generated_tokens=2, cached_share=0.25)
    found = compare(scenario, draws=2)
    save_figure(tpot_bars(found.rows()), tmp_path / "tpot.png")
    seen: set[str] = set()
    for run in found.runs:
        if new := set(run.spans["kind"]) - seen:
            save_gantt(run, tmp_path / f"{run.policy}.png")
            seen |= new
    assert len(list(tmp_path.iterdir())) > 2
