"""Maps of coloured cells: the fastest policy, what an idea gains."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from matplotlib.colors import LogNorm

from tests.kit.pictures import CHANGES, results, run, seer, texts
from tests.kit.questions import hand_made_map, small_question
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.maps import plot_heat_map, plot_pays
from trilane.output.figures.sweep_means import SweepMeans, means_of

# --- the fastest policy -----------------------------------------------------------------------------------------------


def four_cells(*, wide: bool = False) -> SweepMeans:
    """dali is fastest but for batch 4 with 80 % cached, where smoe, which changes the routing, is."""
    rows = []
    for batch, share in product((1, 4), (0.2, 0.8)):
        at = {"batch": batch, "cached_share": share}
        rows += [run("dali", batch * (10.0 - 5 * share), **at), seer(batch * 5.0, **at)]
        rows.append(run("smoe", 2.0 if wide else 20.0 if (batch, share) == (4, 0.8) else 60.0, **{**at, **CHANGES}))
    return means_of(results("batch", "cached_share", rows=rows))


def test_cells() -> None:
    picture = plot_heat_map(four_cells(), "cached_share", "batch")
    ax = picture.figure.axes[0]
    [image] = ax.images
    assert np.asarray(image.get_array()).tolist() == [[9.0, 6.0], [36.0, 20.0]]  # batch 1 at the foot
    assert [text.get_text() for text in ax.texts] == [
        "dali\n9.0", "* 5.0  bound 4.0", "dali\n6.0", "* 5.0  bound 4.0",
        "dali\n36.0", "* 20.0  bound 4.0", "smoe ~\n20.0", "* 20.0  bound 4.0",
    ]
    assert picture.figure.get_suptitle() == "dali is fastest in 3 of 4 settings, smoe ~ in 1"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["20%", "80%"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("share of experts cached", "batch (sequences)")
    assert picture.figure.axes[-1].get_ylabel() == "TPOT of the fastest policy (ms)"
    assert "~ changes the routing" in texts(picture.figure)


def test_the_data_behind_it_whole() -> None:
    assert plot_heat_map(four_cells(), "cached_share", "batch").frame.to_csv(index=False).splitlines() == [
        "batch,cached_share,policy,tpot_ms,clairvoyant_tpot_ms,lower_bound_tpot_ms",
        "1,0.2,dali,9.0,5.0,4.0",
        "1,0.8,dali,6.0,5.0,4.0",
        "4,0.2,dali,36.0,20.0,4.0",
        "4,0.8,smoe,20.0,20.0,4.0",
    ]


def test_borders_part_cells_of_different_policies() -> None:
    ax = plot_heat_map(four_cells(), "cached_share", "batch").figure.axes[0]
    borders = {tuple(map(tuple, line.get_xydata())) for line in ax.lines if line.get_color() == "black"}
    assert borders == {((0.5, 0.5), (0.5, 1.5)), ((0.5, 0.5), (1.5, 0.5))}


def test_colours_stand_for_ratios_where_times_are_wide() -> None:
    images = [plot_heat_map(four_cells(wide=wide), "cached_share", "batch").figure.axes[0].images[0] for wide in (0, 1)]
    assert [isinstance(image.norm, LogNorm) for image in images] == [True, False]


@pytest.mark.parametrize("count", [2, 24])
def test_words_stay_in_their_cells(count: int) -> None:
    places = product(range(1, count + 1), (0.2, 0.8))
    rows = [run("a-long-name@impl", 100.0 + n, batch=n, cached_share=share) for n, share in places]
    figure = plot_heat_map(means_of(results("batch", "cached_share", rows=rows)), "batch", "cached_share").figure
    figure.draw_without_rendering()
    ax = figure.axes[0]
    cell = ax.get_window_extent().width / count
    assert max(text.get_window_extent().width for text in ax.texts) < cell


def test_a_cell_that_nobody_could_run_is_empty() -> None:
    rows = [run("dali", 10.0, batch=batch, cached_share=share) for batch, share in ((1, 0.2), (1, 0.8), (4, 0.2))]
    ax = plot_heat_map(means_of(results("batch", "cached_share", rows=rows)), "cached_share", "batch").figure.axes[0]
    assert sum(line.get_color() == "black" for line in ax.lines) == 2
    assert np.ma.getmaskarray(ax.images[0].get_array()).tolist() == [[False, False], [False, True]]


def test_no_border_parts_two_empty_cells() -> None:
    rows = [run("dali", 10.0, batch=batch, cached_share=share) for batch, share in ((1, 0.2), (2, 0.4), (4, 0.8))]
    means = means_of(results("batch", "cached_share", rows=rows), asked=["cached_share"])
    ax = plot_heat_map(means, "cached_share", "batch").figure.axes[0]
    borders = {tuple(map(tuple, line.get_xydata())) for line in ax.lines if line.get_color() == "black"}
    assert len(borders) == 8  # about the three cells of the diagonal


def test_an_axis_that_does_not_vary() -> None:
    with pytest.raises(PictureError, match="'pcie' does not"):
        plot_heat_map(four_cells(), "cached_share", "pcie")


# --- of an idea -------------------------------------------------------------------------------------------------------

def test_cells_axes_and_the_machine() -> None:
    figure = plot_pays(hand_made_map()).figure
    ax = figure.axes[0]
    [image] = ax.images
    gains = np.ma.asarray(image.get_array())
    assert gains[0].tolist() == pytest.approx([0.1, 0.3])
    assert gains[1].tolist() == [None, pytest.approx(-0.1)]
    assert [text.get_text() for text in ax.texts] == [
        "+10%",
        "+30%",
        "+20 to +40",
        "cannot run",
        "-10%",
        "this machine",
    ]
    assert figure.get_suptitle().replace("\n", " ") == "A cache of experts on the GPU (llama-cache-lru) pays here: +30%"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["25%", "50%"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["100\n4.0 x16", "300"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "experts on the GPU (share of all)", "upload of an expert (us), and the PCIe link"
    )
    [frame] = ax.patches
    assert frame.get_bbox().bounds == (0.5, -0.5, 1.0, 1.0)


def test_the_break_even_line_is_drawn_where_there_is_one() -> None:
    found = hand_made_map()
    assert "break-even: it pays on the blue side" in texts(plot_pays(found).figure)
    everywhere = replace(found, rows=found.rows[:1])
    assert "no break-even on this map" in texts(plot_pays(everywhere).figure)


def test_the_scale_is_the_same_in_all_maps() -> None:
    """Colours of two pictures compare; what is above the ends has the colour of the ends."""
    found = hand_made_map()
    cell = found.cell
    much = replace(cell, using=cell.using._replace(tokens_per_s=(90.0, 180.0)))
    rows = ((found.rows[0][0], much), found.rows[1])
    for shown in (found, replace(found, rows=rows)):
        ax, scale = plot_pays(shown).figure.axes
        [image] = ax.images
        assert image.get_clim() == (-0.6, 0.6)
        assert [label.get_text() for label in scale.get_yticklabels()] == [
            "-60% or less", "-40%", "-20%", "0%", "+20%", "+40%", "+60% or more"
        ]


def test_what_must_be_bought_is_white_where_it_begins_to_pay() -> None:
    found = replace(hand_made_map(), question=small_question("memory", draws=2))
    [image] = plot_pays(found).figure.axes[0].images
    assert image.norm(found.question.idea.worth) == 0.5
    assert (image.norm(-0.6), image.norm(0.6)) == (0.0, 1.0)


def test_below_the_headline_is_the_machine_and_at_the_foot_what_is_played() -> None:
    figure = plot_pays(hand_made_map()).figure
    assert "model on machine:\nanswers" in texts(figure)
    assert figure.get_supxlabel().startswith("llama-cache-lru: patches that are not")


def test_the_data_behind_it_whole_of_an_idea() -> None:
    assert plot_pays(hand_made_map()).frame.to_csv(index=False).splitlines() == [
        "experts on the GPU (share of all),upload of an expert (us),gain,gain_min,gain_max,without,"
        "without_tokens_per_s,using,using_tokens_per_s,here,reason",
        "0.25,100.0,0.1,0.1,0.1,llama.cpp,15.0,llama-cache-lru,16.5,False,",
        "0.5,100.0,0.3,0.2,0.4,llama.cpp,15.0,llama-cache-lru,20.0,True,",
        "0.25,300.0,,,,llama.cpp,15.0,llama-cache-lru,,False,too small",
        "0.5,300.0,-0.1,-0.1,-0.1,llama.cpp,15.0,llama-cache-lru,13.5,False,",
    ]
