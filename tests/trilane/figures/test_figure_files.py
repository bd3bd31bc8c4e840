"""Files of pictures: whole or absent, the same bytes every time, data beside them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from tests.kit.reading import row
from trilane.figures.figure_files import Picture, PictureError, save_figure, save_picture
from trilane.figures.tpot_bars import plot_tpot_bars

PNG = b"\x89PNG"


def test_pictures_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_figure(plot_tpot_bars([row("mine", 10.0), row("other", 20.0)]), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_unknown_picture_format(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"ending in \.png"):
        save_figure(Figure(), tmp_path / "a.xyz")
    assert not list(tmp_path.iterdir())


def test_failed_picture_leaves_nothing(tmp_path: Path) -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "$\\undefined$")
    with pytest.raises(ValueError, match="undefined"):
        save_figure(figure, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_the_data_go_beside_the_picture(tmp_path: Path) -> None:
    picture = Picture(Figure(), pd.DataFrame({"policy": ["dali"], "tpot_ms": [1.5]}))
    assert save_picture(picture, tmp_path / "tpot.png") == tmp_path / "tpot.csv"
    assert (tmp_path / "tpot.csv").read_bytes() == b"policy,tpot_ms\ndali,1.5\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tpot.csv", "tpot.png"]
