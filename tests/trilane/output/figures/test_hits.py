"""Hit rate against the size of a cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.kit.pictures import results, run, texts, two_shares
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.lines import plot_hit_lines, plot_hit_rate_curve
from trilane.output.figures.sweep_means import means_of


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
