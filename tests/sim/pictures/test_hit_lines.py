"""Hit rate against capacity, in shares and GB."""

from __future__ import annotations

import pytest

from sim.pictures.figure_files import PictureError
from sim.pictures.hit_lines import hit_lines
from sim.pictures.sweep_means import means_of
from tests.sim.pictures.reading import texts
from tests.sim.pictures.sweep_rows import results, run, two_shares


def test_lines_are_the_hit_rates() -> None:
    picture = hit_lines(means_of(two_shares()))
    ax = picture.figure.axes[0]
    drawn = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in ax.lines]
    assert drawn == [[(0.2, 0.2), (0.8, 0.8)], [(0.2, 0.1), (0.8, 0.4)], [(0.2, 0.9), (0.8, 0.9)]]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "-", "--"]
    assert [text.get_text() for text in ax.texts] == ["dali  80%", "fiddler  40%", "oracle *  90%"]
    assert picture.figure.get_suptitle() == "dali hits most: 20% with 20% cached, 80% with 80% cached"
    assert "hit rate (resident; decode steps)" in texts(picture.figure)


def test_the_second_axis_is_in_gb() -> None:
    """All experts take 10 GB."""
    figure = hit_lines(means_of(two_shares())).figure
    figure.draw_without_rendering()
    ax = figure.axes[0]
    [above] = ax.child_axes
    assert above.get_xlabel() == "cache (GB)"
    assert above.get_xlim() == pytest.approx([10 * end for end in ax.get_xlim()])


def test_the_data_behind_it_whole() -> None:
    assert hit_lines(means_of(two_shares(oracle=False))).frame.to_csv(index=False).splitlines() == [
        "policy,cached_share,cache_share,cache_bytes,decode_resident_hit_rate,draws",
        "dali,0.2,0.2,2000000000,0.2,1",
        "fiddler,0.2,0.2,2000000000,0.1,1",
        "dali,0.8,0.8,8000000000,0.8,1",
        "fiddler,0.8,0.8,8000000000,0.4,1",
    ]


def test_caches_of_one_size_make_no_lines() -> None:
    rows = [run("dali", 10.0, batch=batch) for batch in (1, 4)]
    with pytest.raises(PictureError, match="cached_share or gpu_memory_gb must vary"):
        hit_lines(means_of(results("batch", rows=rows)))
