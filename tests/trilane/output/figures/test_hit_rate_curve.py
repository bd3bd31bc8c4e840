"""A cache curve: a named line for each cache policy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.kit.reading import texts
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.hit_rate_curve import plot_hit_rate_curve

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
