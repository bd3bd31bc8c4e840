"""Bars of a comparison: ranked, as long as the times, with marks and whiskers, and nothing cut off."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from sim.runs.scenario import Scenario
from tests.kit.pictures import CHANGES, results, row, run, seer, texts, two_shares
from tests.kit.results import agreement, comparison
from trilane.output.figures.bars import plot_tpot_bars
from trilane.output.figures.figure_files import PictureError, save_figure
from trilane.output.figures.scatter import plot_agreement
from trilane.output.figures.speedup_bars import plot_speedup_bars
from trilane.output.figures.sweep_means import SweepMeans, means_of
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
    for played in found.runs:
        if new := set(played.spans["kind"]) - seen:
            save_gantt(played, tmp_path / f"{played.policy}.png")
            seen |= new
    assert len(list(tmp_path.iterdir())) > 2


# --- Speed-up over a baseline -----------------------------------------------------------------------------------------


def widths(ax: Axes) -> dict[str, float]:
    """Lengths of the bars by the names to the left of the first panel."""
    names = [label.get_text() for label in ax.get_figure(root=True).axes[0].get_yticklabels()]  # type: ignore[union-attr]
    bars = [bar for bar in ax.patches if bar.get_height() < 1 and bar.get_x() == 0]  # type: ignore[attr-defined]
    return {names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in bars}  # type: ignore[attr-defined]


def test_bars_of_one_setting() -> None:
    means = means_of(results(rows=[run("fiddler", 20.0), run("dali", 10.0), run("slow", 40.0), seer(5.0)]))
    picture = plot_speedup_bars(means, "fiddler")
    [ax] = picture.figure.axes
    assert widths(ax) == {"oracle *": 4.0, "dali": 2.0, "fiddler": 1.0, "slow": 0.5}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["oracle *", "dali", "fiddler", "slow"]
    assert {float(line.get_xdata()[0]) for line in ax.lines} == {1.0, 5.0}  # the baseline, and the bound at 4 ms
    assert picture.figure.get_suptitle() == "dali is 2.00x as fast as fiddler; the lower bound allows 5.00x"
    assert picture.frame.to_csv(index=False).splitlines() == [
        "policy,speedup,lowest,highest",
        "fiddler,1.0,1.0,1.0",
        "dali,2.0,2.0,2.0",
        "slow,0.5,0.5,0.5",
        "oracle,4.0,4.0,4.0",
        "lower bound,5.0,,",
    ]


def test_speed_up_is_of_mean_times_and_whiskers_of_the_draws() -> None:
    """10 and 30 ms against 10 and 10: 2x by the means, 1x and 3x in the draws."""
    rows = [run("fiddler", 10.0), run("fiddler", 30.0, draw=1), run("dali", 10.0), run("dali", 10.0, draw=1)]
    picture = plot_speedup_bars(means_of(results(rows=rows)), "fiddler")
    dali = picture.frame[picture.frame["policy"] == "dali"]
    assert dali[["speedup", "lowest", "highest"]].to_numpy().tolist() == [[2.0, 1.0, 3.0]]
    assert [1.0, 3.0] in [list(line.get_xdata()) for line in picture.figure.axes[0].lines]
    assert "whiskers: lowest to highest draw" in texts(picture.figure)


def test_no_whisker_or_line_covers_a_value() -> None:
    """fiddler's draws go down to 0.07x and the bound is near dali: wherever they end, numbers are right of the axes."""
    rows = [run("fiddler", 10.0 ** (1 + draw), draw=draw) for draw in (0, 1)]
    rows += [run("dali", time, draw=draw) for draw, time in enumerate((4.1, 44.0))]
    rows += [run("slow", time, draw=draw) for draw, time in enumerate((140.0, 150.0))] + [seer(4.0), seer(9.0, draw=1)]
    figure = plot_speedup_bars(means_of(results(rows=rows)), "fiddler").figure
    figure.draw_without_rendering()
    [ax] = figure.axes
    values = [text for text in ax.texts if text.get_text().endswith("x")]
    assert len(values) == 4
    boxes = [value.get_window_extent() for value in values]
    assert all(ax.bbox.x1 < box.x0 < box.x1 < figure.bbox.x1 for box in boxes)


def test_a_panel_a_setting() -> None:
    picture = plot_speedup_bars(means_of(two_shares()), "fiddler")
    assert [ax.get_title(loc="left") for ax in picture.figure.axes] == ["20% cached", "80% cached"]
    assert [widths(ax)["dali"] for ax in picture.figure.axes] == [0.5, 1.8]
    headline = picture.figure.get_suptitle()
    assert headline.startswith("none is faster than fiddler")
    assert "dali comes nearest, 0.50x to 1.80x" in headline
    assert headline.endswith("4.00x to 6.00x")


def test_of_many_settings_geometric_means() -> None:
    """dali is 4x as fast in half of the 8 settings and as fast in the others: 2x."""
    rows = []
    for batch in range(1, 9):
        rows += [run("fiddler", 40.0, batch=batch), run("dali", 10.0 if batch % 2 else 40.0, batch=batch)]
    picture = plot_speedup_bars(means_of(results("batch", rows=rows)), "fiddler")
    [ax] = picture.figure.axes
    assert widths(ax)["dali"] == pytest.approx(2.0)
    assert picture.figure.get_suptitle() == "dali is 2.00x as fast as fiddler on average, 1.00 to 4.00x over 8 settings"
    dali = picture.frame[picture.frame["policy"] == "dali"].iloc[0]
    assert (dali["lowest"], dali["highest"], dali["settings"]) == (1.0, 4.0, 8)


def test_of_many_policies_the_slowest_are_named_and_the_baseline_is_drawn() -> None:
    rows = [run(f"p{n:02}", 10.0 + n) for n in range(40)]
    figure = plot_speedup_bars(means_of(results(rows=rows)), "p39").figure
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [*(f"p{n:02}" for n in range(20)), "p39"]
    assert "not drawn, slower: p20, p21" in texts(figure)


def test_by_default_the_baseline_is_llama_cpp() -> None:
    rows = [run("dali", 10.0), run("on-demand", 20.0), run("llama.cpp", 15.0)]
    figure = plot_speedup_bars(means_of(results(rows=rows))).figure
    assert figure.axes[0].get_xlabel() == "speed-up over llama.cpp (TPOT of llama.cpp / TPOT)"


def test_settings_in_which_the_baseline_could_not_run_are_left_out() -> None:
    rows = [run(name, 10.0, batch=batch) for name, batch in product(("dali", "fiddler"), (1, 2))]
    rows[-1] = run("fiddler", None, batch=2, error="E: no")
    picture = plot_speedup_bars(means_of(results("batch", rows=rows)), "fiddler")
    assert set(picture.frame["batch"]) == {1}
    assert len(picture.figure.axes) == 1
    assert "left out: 1 setting in which fiddler did not run" in texts(picture.figure)


def many(*, lucky: range) -> SweepMeans:
    """Eight settings: dali is twice as fast as fiddler, lucky 4x where it runs."""
    rows = []
    for batch in range(8):
        rows += [run("fiddler", 40.0, batch=batch), run("dali", 20.0, batch=batch)]
        rows += [run("lucky", 10.0, batch=batch)] if batch in lucky else []
    return means_of(results("batch", rows=rows))


def test_policies_that_did_not_run_in_all_settings_are_not_ranked() -> None:
    figure = plot_speedup_bars(many(lucky=range(1)), "fiddler").figure
    assert figure.get_suptitle() == "dali is 2.00x as fast as fiddler on average, 2.00 to 2.00x over 8 settings"
    assert widths(figure.axes[0]) == pytest.approx({"dali": 2.0, "fiddler": 1.0})
    assert "not drawn, did not run in all 8 settings: lucky (1)" in texts(figure)
    everywhere = plot_speedup_bars(many(lucky=range(8)), "fiddler").figure
    assert everywhere.get_suptitle().startswith("lucky is 4.00x as fast as fiddler")


def test_only_the_baseline_ran_in_all_settings() -> None:
    rows = [run("fiddler", 40.0, batch=batch) for batch in range(8)]
    with pytest.raises(PictureError, match="other than fiddler in all 8 settings"):
        plot_speedup_bars(means_of(results("batch", rows=[*rows, run("dali", 10.0, batch=1)])), "fiddler")
    some = [*rows[:3], run("dali", 10.0, batch=1)]
    figure = plot_speedup_bars(means_of(results("batch", rows=some)), "fiddler").figure
    assert figure.get_suptitle() == "only fiddler ran in all settings"


def test_of_panels_too() -> None:
    rows = [run(name, time, batch=batch) for batch in (1, 2) for name, time in (("fiddler", 40.0), ("dali", 20.0))]
    rows.append(run("lucky", 9.0, batch=1, **CHANGES))
    figure = plot_speedup_bars(means_of(results("batch", rows=rows)), "fiddler").figure
    assert figure.get_suptitle() == "dali is 2.00x as fast as fiddler; the lower bound allows 10.00x"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["dali", "fiddler", "lucky ~"]
    assert "not ranked, did not run in all 2 settings: lucky (1)" in texts(figure)


@pytest.mark.parametrize(("policies", "baseline", "message"), [
    (("dali", "fiddler"), "fidler", "did you mean 'fiddler'"), (("dali",), None, "the baseline dali"),
])
def test_refusals(policies: tuple[str, ...], baseline: str | None, message: str) -> None:
    with pytest.raises(PictureError, match=message):
        plot_speedup_bars(means_of(results(rows=[run(name, 10.0) for name in policies])), baseline)


# --- Pictures of a validation -----------------------------------------------------------------------------------------


def marks(ax: Axes, *shapes: str) -> list[tuple[float, float]]:
    """Places of the single marks of some shapes."""
    return [(float(l.get_xdata()[0]), float(l.get_ydata()[0])) for l in ax.lines if l.get_marker() in shapes]  # type: ignore[index] # noqa: E741


class TestScatter:
    def test_points_stand_at_measured_and_predicted(self) -> None:
        both = agreement(comparison("dali", (19, 20, 22), 22), comparison("fiddler", (30,), 30))
        times, errors = plot_agreement(both).axes
        assert marks(times, "o") == [(20, 22), (30, 30)]
        assert [x for x, _ in marks(errors, "o")] == pytest.approx([0.1, 0])

    def test_whiskers_go_from_lowest_to_highest_repeat(self) -> None:
        times, errors = plot_agreement(agreement(comparison("dali", (19, 20, 22), 22))).axes
        [whisker] = [line for line in times.lines if line.get_marker() == "|"]
        assert list(whisker.get_xdata()) == [19, 22]
        [whisker] = [line for line in errors.lines if line.get_marker() == "|"]
        assert list(whisker.get_xdata()) == pytest.approx([0, 22 / 19 - 1])

    def test_the_null_model_is_grey_beside_it(self) -> None:
        times, errors = plot_agreement(agreement(comparison("dali", (20,), 20, null=21.0))).axes
        assert marks(times, "x") == [(20, 21)]
        assert marks(errors, "x")[0][0] == pytest.approx(0.05)

    def test_a_null_model_beyond_the_axis_stands_at_its_edge(self) -> None:
        errors = plot_agreement(agreement(comparison("dali", (20,), 20, null=5.0))).axes[1]
        assert marks(errors, "<")[0][0] == errors.get_xlim()[0] == pytest.approx(-0.2)

    def test_axes_are_logarithmic_where_times_lie_far_apart(self) -> None:
        near, far = agreement(comparison("a", (20,), 20), comparison("b", (90,), 90)), comparison("c", (101,), 101)
        assert plot_agreement(near).axes[0].get_xscale() == "linear"
        assert plot_agreement(agreement(*near.comparisons, far)).axes[0].get_yscale() == "log"

    def test_both_axes_have_one_range(self) -> None:
        times = plot_agreement(agreement(comparison("a", (20,), 20), comparison("b", (101,), 90))).axes[0]
        assert times.get_xlim() == times.get_ylim()

    def test_shapes_are_batches_and_colours_policies(self) -> None:
        both = [comparison(policy, (20,), 20, batch=batch) for policy in "ab" for batch in (1, 4)]
        lines = [line for line in plot_agreement(agreement(*both)).axes[0].lines if line.get_marker() in ("o", "s")]
        assert [line.get_marker() for line in lines] == ["o", "s", "o", "s"]
        a, a_too, b, b_too = (line.get_markerfacecolor() for line in lines)
        assert (a == a_too, b == b_too, a == b) == (True, True, False)

    def test_twelve_policies_look_different(self) -> None:
        many = agreement(*(comparison(name, (20,), 20) for name in "abcdefghijkl"))
        lines = [line for line in plot_agreement(many).axes[0].lines if line.get_marker() == "o"]
        assert len({(line.get_markerfacecolor(), line.get_markeredgecolor()) for line in lines}) == 12

    def test_the_headline_says_how_good_it_is(self) -> None:
        figure = plot_agreement(agreement(comparison("a", (20,), 21), comparison("b", (30,), 33)))
        assert all(fact in figure.get_suptitle() for fact in ("7.5% off (median of 2)", "at worst 10%", "tau 1.00"))
