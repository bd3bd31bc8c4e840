"""The leaderboard as a picture: a row a policy, a column a setting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.protocols import PolicyKind
from tests.kit.leaderboard_entries import entries_of, some_entries
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.leaderboard import plot_leaderboard
from trilane.study.leaderboard.standings import standings


def test_rows_columns_and_speeds() -> None:
    picture = plot_leaderboard(standings(some_entries()))
    ax = picture.figure.axes[0]
    [image] = ax.images
    values = np.ma.asarray(image.get_array())
    assert values.shape == (3, 16)
    assert values[:, :3].tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.5], [0.5, None, 1.0]]  # at most 1 in colour
    assert [label.get_text() for label in ax.get_yticklabels()] == ["wild ~", "steady", "quick"]
    assert [text.get_text() for text in ax.texts][:8] == ["200", "200", "100", "100", "100", "50", "50", "100"]
    assert picture.figure.get_suptitle() == "Fastest, or within 2% of it, of 16 settings: steady in 2, quick in 1"


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
