"""The picture of the leaderboard: twelve policies by name, one's own, and all others as grey points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes

from policies.protocols import PolicyKind
from tests.kit.results import entries_of, some_entries
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.leaderboard import NAMED, plot_leaderboard
from trilane.study.leaderboard.standings import Standing, standings


def rows_of(ax: Axes) -> dict[str, list[float]]:
    """The points of each row, by its name, from left to right."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    points: dict[str, list[float]] = {name: [] for name in names}
    for line in ax.lines:
        if line.get_marker() == "o":
            for x, y in zip(np.asarray(line.get_xdata()), np.asarray(line.get_ydata()), strict=True):
                points[names[int(y)]].append(float(x))
    return {name: sorted(found) for name, found in points.items()}


def test_a_bar_for_the_score_a_point_for_each_setting_and_grey_points_for_those_that_change_the_routing() -> None:
    picture = plot_leaderboard(standings(some_entries()))
    ax = picture.figure.axes[0]
    assert rows_of(ax) == {
        "steady": [0.5, 1.0, 1.0], "quick": [0.5, 1.0], "1 change the routing": [pytest.approx(4 ** (1 / 3))]
    }
    assert [round(bar.get_width(), 3) for bar in ax.patches] == [round(0.5 ** (1 / 3), 3), round(0.5 ** 0.5, 3)]
    assert [text.get_text() for text in ax.texts] == ["79%", "71%"]
    assert picture.figure.get_suptitle() == "Fastest, or within 2% of it: steady in 2 of 16 settings, quick in 1"


def many(count: int) -> list[Standing]:
    """Policies that keep the routing, ``p0`` the best."""
    one = next(found for found in standings(some_entries()) if found.policy == "steady")
    [*settings] = one.relative
    return [replace(one, policy=f"p{n}", relative={settings[0]: 1 - n / 100}) for n in range(count)]


def test_twelve_have_names_and_one_s_own_in_bold_wherever_it_stands() -> None:
    ax = plot_leaderboard(many(20), own=["p17"]).figure.axes[0]
    named = [f"p{n}" for n in range(NAMED)]
    assert [*rows_of(ax)] == [*named, "p17", "7 others"]
    assert rows_of(ax)["7 others"] == pytest.approx(sorted(1 - n / 100 for n in (12, 13, 14, 15, 16, 18, 19)))
    assert [label.get_text() for label in ax.get_yticklabels() if label.get_fontweight() == "bold"] == ["p17"]


def test_the_data_behind_it() -> None:
    frame = plot_leaderboard(standings(some_entries())).frame
    assert len(frame) == 9
    assert frame[frame["policy"] == "quick"]["relative"].tolist()[::2] == [0.5, 1.0]


def test_nothing_to_draw() -> None:
    with pytest.raises(PictureError, match="expected a policy that runs"):
        plot_leaderboard(standings(entries_of("never", None)))


def test_without_a_policy_that_keeps_the_routing_the_title_says_so() -> None:
    found = [replace(one, relative=dict.fromkeys(one.entries, 1.0)) for one in
             standings(entries_of("wild", 20.0, kind=PolicyKind.CHANGES))]
    assert plot_leaderboard(found).figure.get_suptitle() == "No policy that keeps the routing runs in any setting"
