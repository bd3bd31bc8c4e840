"""Pictures of a validation: marks are where the numbers say."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes

from tests.kit.results import agreement, comparison
from trilane.output.figures.scatter import plot_agreement


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
