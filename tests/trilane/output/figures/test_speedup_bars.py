"""Speed-up over a baseline: bars are ratios of times, in the order of speed."""

from __future__ import annotations

from itertools import product

import pytest
from matplotlib.axes import Axes

from tests.kit.pictures import CHANGES, results, run, seer, texts, two_shares
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.speedup_bars import plot_speedup_bars
from trilane.output.figures.sweep_means import SweepMeans, means_of


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
