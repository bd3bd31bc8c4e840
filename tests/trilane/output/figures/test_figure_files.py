"""Files of pictures: whole or absent, the same bytes every time, data beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.kit.pictures import row, texts
from tests.kit.processes import small_disk
from trilane.output.figures.bars import plot_tpot_bars
from trilane.output.figures.figure_files import Picture, PictureError, save_figure, save_picture
from trilane.output.figures.style import drawable

PNG = b"\x89PNG"
KINDS = ("png", "svg", "pdf")
ROOT = Path(__file__).parents[4]
DRAWN = """
import sys
from tests.trilane.output.figures.test_figure_files import draw
draw(*sys.argv[1:])
"""


def test_pictures_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_figure(plot_tpot_bars([row("mine", 10.0), row("other", 20.0)]), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def draw(*paths: str) -> None:
    for path in paths:
        save_figure(plot_tpot_bars([row("mine", 10.0, null_model_tpot_ms=8.0), row("other", 20.0)], about="$5"), path)


def test_pictures_are_the_same_in_every_process(tmp_path: Path) -> None:
    here, there = ([str(tmp_path / f"{name}.{kind}") for kind in KINDS] for name in ("here", "there"))
    draw(*here)
    subprocess.run([sys.executable, "-c", DRAWN, *there], cwd=ROOT, check=True)
    for one, other in zip(here, there, strict=True):
        assert Path(one).read_bytes() == Path(other).read_bytes()


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_users_settings_of_matplotlib_change_nothing(tmp_path: Path, kind: str) -> None:
    own = {"font.size": 20, "axes.facecolor": "black", "savefig.bbox": "tight", "svg.fonttype": "none"}
    for name, settings in (("a", {}), ("b", own)):
        with rc_context(settings):
            save_figure(plot_tpot_bars([row("mine", 10.0), row("other", 20.0)]), tmp_path / f"{name}.{kind}")
    assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


STRANGE = ("50$ or 60$", r"$\undefined$", "esc \x1b[31m", "nul \x00", "\ud800", "\uffff", "中文")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", STRANGE, ids=ascii)
def test_any_name_is_shown_as_it_is_written(tmp_path: Path, name: str) -> None:
    rows = [row(f"of {name}", 10.0), row("other", 20.0, name)]
    figure = plot_tpot_bars(rows, about=f"about {name}", remark=f"remark {name}")
    for kind in ("png", "svg"):
        save_figure(figure, tmp_path / f"a.{kind}")
    shown = drawable(name)
    assert all(f"{where} {shown}" in texts(figure) for where in ("of", "about", "remark"))
    ElementTree.parse(tmp_path / "a.svg")
    assert not any(text.get_parse_math() for text in figure.findobj(Text) if isinstance(text, Text))


def test_characters_without_a_letter_are_escapes() -> None:
    assert drawable("中 a·τ→\n\x1b") == "\\u4e2d a·τ→\n\\x1b"


def test_a_picture_that_does_not_fit_on_the_disk_is_named(tmp_path: Path) -> None:
    with small_disk(), pytest.raises(OSError, match="File too large") as raised:
        save_figure(plot_tpot_bars([row("mine", 10.0)]), tmp_path / "a.png")
    assert raised.value.filename == str(tmp_path / "a.png")


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
