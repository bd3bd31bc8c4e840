"""The map of an idea: every cell has its gain, a line parts those that pay, a frame is around the machine's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.pays_questions import hand_made_map, small_question
from tests.kit.reading import texts
from trilane.output.figures.pays_map import plot_pays


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
    assert [label.get_text() for label in ax.get_yticklabels()] == ["100", "300"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("experts on the GPU (share of all)", "upload of an expert (us)")
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


def test_the_data_behind_it_whole() -> None:
    assert plot_pays(hand_made_map()).frame.to_csv(index=False).splitlines() == [
        "experts on the GPU (share of all),upload of an expert (us),gain,gain_min,gain_max,without,"
        "without_tokens_per_s,using,using_tokens_per_s,here,reason",
        "0.25,100.0,0.1,0.1,0.1,llama.cpp,15.0,llama-cache-lru,16.5,False,",
        "0.5,100.0,0.3,0.2,0.4,llama.cpp,15.0,llama-cache-lru,20.0,True,",
        "0.25,300.0,,,,llama.cpp,15.0,llama-cache-lru,,False,too small",
        "0.5,300.0,-0.1,-0.1,-0.1,llama.cpp,15.0,llama-cache-lru,13.5,False,",
    ]
