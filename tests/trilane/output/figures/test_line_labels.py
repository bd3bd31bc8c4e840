"""Labels at line ends: in order, apart, inside, and no further from their lines than that takes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from trilane.output.figures.line_labels import LineEnd, apart, label_ends
from trilane.output.figures.style import page

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
