"""Pictures of a validation: marks are where the numbers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.agreement_runs import agreement, comparison, decode_spans, run
from trilane.output.figures.agreement_scatter import plot_agreement
from trilane.output.figures.figure_files import save_figure
from trilane.output.figures.measured_timeline import plot_measured_timeline
from trilane.study.validation.comparison import RunComparison


def marks(ax: Axes, *shapes: str) -> list[tuple[float, float]]:
    """Where single marks of some shapes stand."""
    return [(float(l.get_xdata()[0]), float(l.get_ydata()[0])) for l in ax.lines if l.get_marker() in shapes]  # type: ignore[index] # noqa: E741


def words(figure: Figure) -> str:
    return "\n".join([figure.get_suptitle(), *(text.get_text() for ax in figure.axes for text in ax.texts)])


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


def bars(ax: Axes) -> list[tuple[float, float, float]]:
    """Middle of the row, begin and end in ms of every bar."""
    found = []
    for collection in ax.collections:
        for path in collection.get_paths():
            box: Any = path.get_extents()
            found.append((round((box.y0 + box.y1) / 2, 2), round(box.x0, 6), round(box.x1, 6)))
    return sorted(found)


class TestOverlay:
    def test_every_lane_has_a_row_measured_and_one_predicted(self) -> None:
        """The copy starts 7 ms into the step and takes 8 as measured, 12 as predicted; h2d is the fourth lane."""
        above, _ = plot_measured_timeline(comparison(measured=(20,), predicted=24)).axes
        assert [bar for bar in bars(above) if 2.5 < bar[0] < 3.5] == [(2.79, 7, 15), (3.21, 7, 19)]

    def test_busy_times_stand_at_the_rows(self) -> None:
        texts = words(plot_measured_timeline(comparison(measured=(20,), predicted=24)))
        assert "8.00 ms busy" in texts
        assert "12.00 ms (+50%)" in texts

    def test_the_ends_of_the_step_are_marked(self) -> None:
        above, _ = plot_measured_timeline(comparison(measured=(20,), predicted=24)).axes
        ends = [float(line.get_xdata()[0]) for line in above.lines if line.get_color() == "black"]  # type: ignore[index]
        assert ends == [20, 24]

    def test_the_headline_says_how_far_off_the_step_is(self) -> None:
        headline = plot_measured_timeline(comparison(measured=(20,), predicted=24)).get_suptitle()
        assert all(fact in headline for fact in ("dali: decode step 1 ", "20.00 ms", "24.00 ms", "(+20.0%)"))

    def test_the_repeat_of_median_tpot_is_shown(self) -> None:
        assert "took 20.00 ms" in plot_measured_timeline(comparison(measured=(30, 20, 19), predicted=24)).get_suptitle()

    def test_close_by_both_sides_begin_with_the_layer(self) -> None:
        """Attention is the layer's first work on the GPU, 1 ms into the step; it starts at 0 on either side."""
        late = run(spans=decode_spans(attention=2))
        _, below = plot_measured_timeline(RunComparison((run(),), late)).axes
        gpu = [bar for bar in bars(below) if 0.5 < bar[0] < 1.5]
        assert (0.79, 0, 4) in gpu
        assert (1.21, 0, 2) in gpu

    def test_a_step_of_a_simulated_run_is_drawn_whole(self, tmp_path: Path) -> None:
        asked = Scenario(prompt_tokens=4, generated_tokens=3, cached_share=0.4)
        slower = simulate(asked.with_(hardware_overrides={"link.h2d_bytes_per_s": 9e9}))
        figure = plot_measured_timeline(RunComparison((slower,), simulate(asked)), about="somewhere")
        save_figure(figure, tmp_path / "step.png")
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
        assert figure.subfigs[0].get_suptitle() == "somewhere"
