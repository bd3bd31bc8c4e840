"""Lines with names at their ends: times along an axis, and hit rates against the size of a cache."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.text import Text

from tests.kit.pictures import results, run, seer, texts, two_shares
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.lines import (
    MOST,
    LineEnd,
    apart,
    label_ends,
    plot_hit_lines,
    plot_hit_rate_curve,
    plot_tpot_lines,
)
from trilane.output.figures.marks import ALSO_RAN
from trilane.output.figures.style import page
from trilane.output.figures.sweep_means import means_of

GAP = 0.05
HEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=20)


def test_labels_that_have_room_stay() -> None:
    assert apart([0.9, 0.1, 0.5], GAP).tolist() == pytest.approx([0.9, 0.1, 0.5])


def test_labels_of_one_place_share_it() -> None:
    assert apart([0.5, 0.5, 0.5], 0.1).tolist() == pytest.approx([0.4, 0.5, 0.6])


def test_labels_at_the_edge_move_inside() -> None:
    assert apart([1.0, 0.99], 0.1).tolist() == pytest.approx([1.0, 0.9])


@given(HEIGHTS)
def test_order_distance_and_edges(heights: list[float]) -> None:
    placed = apart(heights, GAP)
    order = np.argsort(heights, kind="stable")
    assert all(high - low >= GAP - 1e-9 for low, high in pairwise(placed[order]))
    assert placed.min() >= -1e-9
    assert placed.max() <= 1 + 1e-9


@given(st.lists(st.floats(0.3, 0.7), min_size=2, max_size=4))
def test_no_shift_of_neighbours_would_be_nearer(heights: list[float]) -> None:
    """Against a search: moving any run of labels up or down a little, where that is allowed, never helps."""
    order = np.argsort(heights, kind="stable")
    wanted, placed = np.asarray(heights)[order], apart(heights, GAP)[order]
    cost = np.square(placed - wanted).sum()
    for first in range(len(wanted)):
        for last in range(first + 1, len(wanted) + 1):
            for step in (-1e-3, 1e-3):
                moved = placed.copy()
                moved[first:last] += step
                if (np.diff(moved) >= GAP).all():
                    assert np.square(moved - wanted).sum() >= cost - 1e-9


def test_labels_stand_beside_the_axes_in_the_colour_of_their_lines() -> None:
    figure, part = page(6, 4, "A headline")
    ax = part.subplots()
    ax.set(xlim=(0, 10), ylim=(0, 10))
    label_ends(ax, [LineEnd(9, 5, "mine", "#0072B2"), LineEnd(9, 5, "other", "#D55E00", bold=False)])
    mine, other = ax.texts
    assert [(text.get_text(), text.get_color(), text.get_weight()) for text in (mine, other)] == [
        ("mine", "#0072B2", "bold"), ("other", "#D55E00", "normal"),
    ]
    assert mine.xy == pytest.approx((0.9, 0.5))  # type: ignore[attr-defined]
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in (mine, other)]  # without the lines to the ends
    assert boxes[0].x0 > ax.get_window_extent().x1
    assert not boxes[0].overlaps(boxes[1])


# --- of tpot ----------------------------------------------------------------------------------------------------------

def lines(ax: Axes) -> dict[tuple[str, object], list[tuple[float, float]]]:
    """Data of the lines by colour and style."""
    return {
        (str(line.get_color()), line.get_linestyle()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in ax.lines
    }


def test_lines_are_the_times_with_bound_and_clairvoyant_run() -> None:
    picture = plot_tpot_lines(means_of(two_shares()), "cached_share")
    [ax] = picture.figure.axes
    assert lines(ax) == {
        ("#0072B2", "-"): [(0.2, 40.0), (0.8, 10.0)],
        ("#E69F00", "-"): [(0.2, 20.0), (0.8, 18.0)],
        ("black", "--"): [(0.2, 8.0), (0.8, 6.0)],
        ("black", "-"): [(0.2, 5.0), (0.8, 3.0)],
    }
    labels = ["dali  10.0", "fiddler  18.0", "oracle *  6.0", "lower bound  3.0"]
    assert [text.get_text() for text in ax.texts] == labels
    assert picture.figure.get_suptitle() == "fiddler is fastest below 80% cached, dali from there on"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("share of experts cached", "time per output token, TPOT (ms)")
    assert "* knows the future; grey area: below the lower bound" in texts(picture.figure)
    assert picture.frame.equals(means_of(two_shares()).frame())


def test_a_band_goes_from_the_lowest_to_the_highest_draw() -> None:
    [ax] = plot_tpot_lines(means_of(two_shares(draws=2)), "cached_share").figure.axes
    heights = [set(np.round(band.get_paths()[0].vertices[:, 1], 9)) for band in ax.collections]
    assert {40.0, 80.0, 10.0, 20.0} in heights


def test_without_a_clairvoyant_run_the_picture_says_so() -> None:
    figure = plot_tpot_lines(means_of(two_shares(oracle=False)), "cached_share").figure
    assert "these results hold no clairvoyant run" in texts(figure)
    assert "*" not in texts(figure)


def test_of_many_policies_the_slower_are_grey_and_named_below() -> None:
    rows = [run(f"p{n:02}", 10.0 + n, cached_share=share) for n, share in product(range(20), (0.2, 0.8))]
    figure = plot_tpot_lines(means_of(results("cached_share", rows=rows)), "cached_share").figure
    [ax] = figure.axes
    assert sum(line.get_color() == ALSO_RAN.colour for line in ax.lines) == 20 - MOST
    names = [text.get_text().split()[0] for text in ax.texts]
    assert names == [*(f"p{n:02}" for n in range(MOST)), "lower"]
    assert "thin and grey, slower: p08, p09, p10" in texts(figure)
    assert ax.get_ylim()[1] < 10 + MOST + 2  # the slower ones do not press the others together


@pytest.mark.parametrize("count", [2, 9, 40])
def test_no_label_lies_on_another_or_is_cut(count: int) -> None:
    places = product(range(count), (0.2, 0.8))
    rows = [run(f"a-long-name@impl-{n}", 10.0 + n / 100, cached_share=share) for n, share in places]
    figure = plot_tpot_lines(means_of(results("cached_share", rows=rows)), "cached_share").figure
    figure.draw_without_rendering()
    [ax] = figure.axes
    boxes = [Text.get_window_extent(text) for text in ax.texts]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
    assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


def test_a_single_value_is_points_and_the_bound_a_line_across() -> None:
    rows = [run("dali", 10.0), run("dali", 14.0, draw=1), seer(6.0), seer(6.0, draw=1)]
    means = means_of(results("cached_share", rows=rows), asked=["cached_share"])
    figure = plot_tpot_lines(means, "cached_share").figure
    [ax] = figure.axes
    assert {str(line.get_marker()): list(line.get_ydata()) for line in ax.lines} == {
        "o": [12.0], "_": [6.0], "None": [4.0, 4.0],
    }
    assert figure.get_suptitle() == "dali is fastest at 50% cached: 12.0 ms per token"


def test_a_line_that_ends_early_says_where() -> None:
    """fiddler does not fit with 80 % cached."""
    times = (("dali", 40.0, 0.2), ("dali", 10.0, 0.8), ("fiddler", 20.0, 0.2))
    rows = [run(policy, tpot, cached_share=share) for policy, tpot, share in times]
    [ax] = plot_tpot_lines(means_of(results("cached_share", rows=rows)), "cached_share").figure.axes
    assert {text.get_text() for text in ax.texts} == {"dali  10.0", "fiddler  20.0 at 20%", "lower bound  4.0"}


def test_a_line_is_broken_where_its_policy_could_not_run() -> None:
    times = {"dali": (40.0, 30.0, 10.0), "fiddler": (20.0, None, 20.0)}
    rows = [
        run(policy, tpot, cached_share=share, error="" if tpot else "E: no")
        for policy, tpots in times.items()
        for share, tpot in zip((0.2, 0.4, 0.8), tpots, strict=True)
    ]
    [ax] = plot_tpot_lines(means_of(results("cached_share", rows=rows)), "cached_share").figure.axes
    heights = {str(line.get_color()): np.asarray(line.get_ydata()).tolist() for line in ax.lines}
    assert heights["#0072B2"] == [40.0, 30.0, 10.0]
    assert str(heights["#E69F00"]) == "[20.0, nan, 20.0]"


def test_of_many_panels_the_headline_counts_the_very_fastest() -> None:
    """With batch 2 and 80 % cached b is 1 % faster than a, who was the fastest before."""
    times = {("a", 1): (10.0, 10.0), ("b", 1): (20.0, 20.0), ("a", 2): (10.0, 10.0), ("b", 2): (20.0, 9.9)}
    rows = [
        run(policy, tpot, batch=batch, cached_share=share)
        for (policy, batch), tpots in times.items()
        for share, tpot in zip((0.2, 0.8), tpots, strict=True)
    ]
    figure = plot_tpot_lines(means_of(results("batch", "cached_share", rows=rows)), "cached_share").figure
    assert figure.get_suptitle() == "a is fastest in 3 of 4 settings, b in 1"


def test_wide_times_are_drawn_by_ratio() -> None:
    rows = [run(name, tpot) for name, tpot in (("dali", 10.0), ("fiddler", 500.0))]
    [ax] = plot_tpot_lines(means_of(results("batch", rows=rows), asked=["batch"]), "batch").figure.axes
    assert ax.get_yscale() == "log"
    assert plot_tpot_lines(means_of(two_shares()), "cached_share").figure.axes[0].get_ylim()[0] < 3


def test_other_axes_make_panels_and_too_many_are_refused() -> None:
    def rows(batches: range) -> list[dict[str, object]]:
        return [run("dali", 10.0 * batch, cached_share=s, batch=batch) for batch, s in product(batches, (0.2, 0.8))]

    figure = plot_tpot_lines(means_of(results("batch", "cached_share", rows=rows(range(1, 6)))), "cached_share").figure
    assert [ax.get_title(loc="left") for ax in figure.axes] == [f"batch {n}" for n in range(1, 6)]
    assert figure.get_suptitle() == "dali is fastest in all 10 settings"
    many = means_of(results("batch", "cached_share", rows=rows(range(1, 8))))
    with pytest.raises(PictureError, match="got 7: choose with --where batch=1 2 3 4 5 6 7"):
        plot_tpot_lines(many, "cached_share")


def test_names_stand_side_by_side() -> None:
    rows = [run("dali", tpot, pcie=link) for link, tpot in (("4x16", 10.0), ("5x16", 8.0))]
    [ax] = plot_tpot_lines(means_of(results("pcie", rows=rows)), "pcie").figure.axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4x16", "5x16"]
    assert list(ax.lines[1].get_xdata()) == [0.0, 1.0]


def test_an_axis_that_does_not_vary() -> None:
    with pytest.raises(PictureError, match=r"'batch' .*: cached_share"):
        plot_tpot_lines(means_of(two_shares()), "batch")


# --- hit rates --------------------------------------------------------------------------------------------------------

def test_lines_are_the_hit_rates() -> None:
    picture = plot_hit_lines(means_of(two_shares()))
    ax = picture.figure.axes[0]
    drawn = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in ax.lines]
    assert drawn == [[(0.2, 0.2), (0.8, 0.8)], [(0.2, 0.1), (0.8, 0.4)], [(0.2, 0.9), (0.8, 0.9)]]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "-", "--"]
    assert [text.get_text() for text in ax.texts] == ["dali  80%", "fiddler  40%", "oracle *  90%"]
    assert picture.figure.get_suptitle() == "dali hits most: 20% with 20% cached, 80% with 80% cached"
    assert "hit rate in decode steps" in texts(picture.figure)


def test_the_second_axis_is_in_gb() -> None:
    """All experts take 10 GB."""
    figure = plot_hit_lines(means_of(two_shares())).figure
    figure.draw_without_rendering()
    ax = figure.axes[0]
    [above] = ax.child_axes
    assert above.get_xlabel() == "cache (GB)"
    assert above.get_xlim() == pytest.approx([10 * end for end in ax.get_xlim()])


@pytest.mark.parametrize("cached", [0.0, 0.2])
def test_without_bytes_there_is_none(cached: float) -> None:
    rows = [
        run("dali", 10.0, gpu_memory_gb=size, cache_share=cached, cache_bytes=0, decode_resident_hit_rate=cached)
        for size in (1.0, 2.0)
    ]
    figure = plot_hit_lines(means_of(results("gpu_memory_gb", rows=rows))).figure
    figure.draw_without_rendering()
    assert figure.axes[0].child_axes == []


def test_the_data_behind_it_whole() -> None:
    assert plot_hit_lines(means_of(two_shares(oracle=False))).frame.to_csv(index=False).splitlines() == [
        "policy,cached_share,cache_share,cache_bytes,decode_resident_hit_rate,draws",
        "dali,0.2,0.2,2000000000,0.2,1",
        "fiddler,0.2,0.2,2000000000,0.1,1",
        "dali,0.8,0.8,8000000000,0.8,1",
        "fiddler,0.8,0.8,8000000000,0.4,1",
    ]


def test_of_many_panels_the_headline_counts_settings() -> None:
    """b hits most with batch 1, a with batch 4, though the highest of all is a's."""
    hits = {("a", 1): 0.1, ("b", 1): 0.3, ("a", 4): 0.9, ("b", 4): 0.2}
    rows = [
        run(policy, 10.0, batch=batch, cached_share=share, cache_share=share, decode_resident_hit_rate=rate)
        for (policy, batch), rate in hits.items()
        for share in (0.2, 0.8)
    ]
    figure = plot_hit_lines(means_of(results("batch", "cached_share", rows=rows))).figure
    assert figure.get_suptitle() == "b hits most in 2 of 4 settings, a in 2"


def test_one_size_on_machines_of_different_experts_makes_no_lines() -> None:
    rows = [run("dali", 10.0, hardware=name, gpu_memory_gb=12.0, cache_share=s) for name, s in (("x", 0.2), ("y", 0.3))]
    means = means_of(results("hardware", "gpu_memory_gb", rows=rows), asked=["gpu_memory_gb"])
    with pytest.raises(PictureError, match="cached_share or gpu_memory_gb"):
        plot_hit_lines(means)


def test_sizes_by_share_and_by_memory_make_one_line() -> None:
    rows = [run("dali", 10.0, cached_share=s, cache_share=s, decode_resident_hit_rate=s) for s in (0.2, 0.8)]
    other = {"cached_share": None, "gpu_memory_gb": 12.0, "cache_share": 0.5, "decode_resident_hit_rate": 0.4}
    rows.append(run("dali", 9.0, **other))
    figure = plot_hit_lines(means_of(results("cached_share", "gpu_memory_gb", rows=rows))).figure
    assert list(figure.axes[0].lines[0].get_xdata()) == [0.2, 0.5, 0.8]
    assert figure.get_suptitle() == "dali hits most: 20% with 20% cached, 80% with 80% cached"


def test_caches_of_one_size_make_no_lines() -> None:
    rows = [run("dali", 10.0, batch=batch) for batch in (1, 4)]
    with pytest.raises(PictureError, match="cached_share or gpu_memory_gb"):
        plot_hit_lines(means_of(results("batch", rows=rows)))


# --- of replayed caches -----------------------------------------------------------------------------------------------

MIB = 2**20


def point(policy: str, mib: int, rate: float) -> dict[str, Any]:
    return {"policy": policy, "capacity_bytes": mib * MIB, "hit_rate": rate, "hit_rate_decode": rate}


def test_curve_has_a_named_line_for_each_policy() -> None:
    points = [point("lru", 400, 0.5), point("lru", 100, 0.25), point("belady", 100, 0.5), point("belady", 400, 0.75)]
    figure = plot_hit_rate_curve(points)
    lines = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in figure.axes[0].lines}
    assert list(lines) == [(100.0, 400.0)]
    assert [tuple(line.get_ydata()) for line in figure.axes[0].lines] == [(0.25, 0.5), (0.5, 0.75)]
    assert "lru  50.0%" in texts(figure)
    assert "belady *  75.0%" in texts(figure)
    assert "* knows the future" in texts(figure)
    assert figure.get_suptitle().startswith("lru hits most")
    assert "25%" in figure.get_suptitle()
    assert "50%" in figure.get_suptitle()
    assert "(MiB)" in texts(figure)


def test_curve_labels_keep_apart() -> None:
    points = [point(name, 100, 0.5) for name in ("lru", "lfu", "random", "belady")]
    heights = sorted(text.xyann[1] for text in plot_hit_rate_curve(points).axes[0].texts)  # type: ignore[attr-defined]
    assert len(heights) == 4
    assert all(high - low > 0.03 for low, high in pairwise(heights))


def test_curve_of_nothing() -> None:
    with pytest.raises(PictureError, match="at least one point"):
        plot_hit_rate_curve([])
