"""Bars of a comparison: ranked, as long as the times, with marks and whiskers, and nothing cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from sim.runs.scenario import Scenario
from tests.kit.pictures import row, texts
from trilane.output.figures.bars import plot_tpot_bars
from trilane.output.figures.figure_files import PictureError, save_figure
from trilane.output.figures.timelines import save_gantt
from trilane.study.compare import compare


def test_bars_rank_policies_and_say_who_wins() -> None:
    rows = [row("slow", 30.0), row("seer", 5.0, "clairvoyant"), row("fast", 10.0)]
    figure = plot_tpot_bars(rows, "somewhere")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["seer *", "fast", "slow"]
    assert figure.get_suptitle() == "fast is fastest: 10.0 ms per token, 3.0x faster than slow"
    assert "(ms)" in texts(figure)


def test_bars_are_as_long_as_the_times() -> None:
    """Parts of a bar: 0.7 GPU, 0.2 copies, 0.1 CPU, 0 host of 10 ms."""
    [ax] = plot_tpot_bars([row("only", 10.0)]).axes
    widths = [round(patch.get_width(), 9) for patch in ax.patches]  # type: ignore[attr-defined]
    assert widths == [7.0, 2.0, 1.0, 0.0]


def test_bars_mark_lower_bound_and_null_model() -> None:
    [ax] = plot_tpot_bars([row("only", 10.0, lower_bound_tpot_ms=4.0, null_model_tpot_ms=12.0)]).axes
    marks = [line.get_xdata() for line in ax.lines]
    assert [float(x) for mark in marks for x in mark] == [4.0, 4.0, 12.0]
    assert ax.get_xlim()[1] > 12.0


def test_the_bound_is_said_to_be_that_of_policies_that_keep_the_routing() -> None:
    """One that changes the routing may be faster, as here."""
    figure = plot_tpot_bars([row("bold", 3.0, "changes routing"), row("only", 10.0, lower_bound_tpot_ms=4.0)])
    assert "lower bound of policies that keep the routing" in texts(figure)


def test_nothing_covers_a_value() -> None:
    """A null model and whiskers anywhere: the numbers are in a column right of the axes, where no mark can be."""
    spread = {"tpot_ms_min": 8.0, "tpot_ms_max": 30.0, "draws": [{}] * 5}
    rows = [row("a", 10.0, null_model_tpot_ms=10.5, **spread), row("b", 70.0), row("c", 9.0, draws=[{}])]
    figure = plot_tpot_bars(rows)
    figure.draw_without_rendering()
    [ax] = figure.axes
    assert [text.get_text() for text in ax.texts] == ["9.0 ms", "10.0 ms", "70.0 ms \N{RIGHTWARDS ARROW}"]
    boxes = [text.get_window_extent() for text in ax.texts]
    assert all(ax.bbox.x1 < box.x0 < box.x1 < figure.bbox.x1 for box in boxes)


def test_a_remark_stands_at_the_foot() -> None:
    assert "tuned on these" in texts(plot_tpot_bars([row("only", 10.0)], remark="tuned on these"))


def test_bars_of_means_have_whiskers_where_draws_differ() -> None:
    spread, steady = {"tpot_ms_min": 8.0, "tpot_ms_max": 13.0}, {"tpot_ms_min": 20.0, "tpot_ms_max": 20.0}
    rows = [row("mine", 10.0, **spread, draws=[{}] * 5), row("steady", 20.0, **steady, draws=[{}] * 5)]
    figure = plot_tpot_bars(rows)
    [ax] = figure.axes
    assert [tuple(line.get_xdata()) for line in ax.lines] == [(8.0, 13.0)]
    assert "lowest to highest of 5 draws" in texts(figure)
    assert figure.get_suptitle() == "mine is fastest on average: 10.0 ms per token, 2.0x faster than steady"


def test_a_bar_far_longer_than_most_is_cut() -> None:
    """The median of 10, 20 and 1000 is 20: the axis ends at 2.5 x 20 and a margin."""
    [ax] = plot_tpot_bars([row("mine", 10.0), row("other", 20.0), row("endless", 1000.0)]).axes
    assert ax.get_xlim()[1] == pytest.approx(1.03 * 50)
    assert [text.get_text() for text in ax.texts] == ["10.0 ms", "20.0 ms", "1,000.0 ms \N{RIGHTWARDS ARROW}"]


def test_many_bars_are_held_against_the_median() -> None:
    title = plot_tpot_bars([row(f"p{n}", 10.0 + n) for n in range(9)]).get_suptitle()
    assert title == "p0 is fastest: 10.0 ms per token, 1.4x faster than the median"


def test_of_very_many_the_slowest_are_only_named() -> None:
    """26 policies: 24 bars, a line about the others, and no diamonds, for which there is no room."""
    rows = [
        row(f"p{n}", 10.0 + n, *(["changes routing"] if n == 25 else []), null_model_tpot_ms=9.0) for n in range(26)
    ]
    figure = plot_tpot_bars(rows)
    [ax] = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"p{n}" for n in range(24)]
    assert figure.get_supxlabel() == "2 more, slower (34 to 35 ms): p24, p25 ~"
    assert not ax.lines
    assert "null model" not in texts(figure)


def test_marks_are_explained() -> None:
    told = texts(plot_tpot_bars([row("seer", 5.0, "clairvoyant"), row("bold", 10.0, "changes routing")]))
    assert {"seer *", "bold ~", "* knows the future", "~ changes the routing"} <= set(told.splitlines())
    assert "*" not in texts(plot_tpot_bars([row("plain", 5.0)]))


@pytest.mark.parametrize("count", [3, 40])
def test_names_are_not_cut_off(count: int) -> None:
    figure = plot_tpot_bars([row(f"a-very-long-name-of-a-policy@layer-wise-{n}", 10.0 + n) for n in range(count)])
    FigureCanvasAgg(figure).draw()
    [ax] = figure.axes
    assert min(label.get_window_extent().x0 for label in ax.get_yticklabels()) >= 0
    for label in (figure._suptitle, figure._supxlabel):  # type: ignore[attr-defined]
        if label:
            box = label.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= figure.bbox.x1


def test_a_winner_that_changes_the_routing_is_named_as_one() -> None:
    title = plot_tpot_bars([row("bold", 10.0, "changes routing"), row("exact", 20.0)]).get_suptitle()
    assert title.startswith("bold (changes routing) is fastest: ")


@pytest.mark.parametrize("rows", [[], [{"tpot_ms": None, "policy": "prefill only"}]])
def test_nothing_to_draw(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(PictureError, match="at least one run with decode steps"):
        plot_tpot_bars(rows)


def test_every_policy_can_be_drawn(tmp_path: Path) -> None:
    """One bar each; and a Gantt chart of each that has a kind of span that none before had."""
    scenario = Scenario(trace="mini-moe", model=None, prompt_tokens=4, generated_tokens=2, cached_share=0.25)
    found = compare(scenario, draws=1)
    save_figure(plot_tpot_bars(found.rows()), tmp_path / "tpot.png")
    seen: set[str] = set()
    for run in found.runs:
        if new := set(run.spans["kind"]) - seen:
            save_gantt(run, tmp_path / f"{run.policy}.png")
            seen |= new
    assert len(list(tmp_path.iterdir())) > 2
