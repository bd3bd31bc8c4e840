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

import trilane.output.figures
from policies.protocols import PolicyKind
from policies.registry import policy_names
from sim.runs.vocabulary import kind_of
from tests.kit.pictures import row, texts
from tests.kit.processes import small_disk
from trilane.output.figures.bars import plot_tpot_bars, style_bars
from trilane.output.figures.figure_files import Picture, PictureError, save_figure, save_picture
from trilane.output.figures.marks import CLAIRVOYANT, look_of, marked, meanings
from trilane.output.figures.style import by_ratio, drawable, kind_handles, kinds_in_words, page, places, style_values

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


# --- the page of a picture and its axes -------------------------------------------------------------------------------


LONG = "a finding that takes many words to say because it is about many things at once " * 3


def words_fit(figure: Figure) -> bool:
    figure.draw_without_rendering()
    [part] = figure.subfigs
    texts = (figure._suptitle, figure._supxlabel, part._suptitle)  # type: ignore[attr-defined]
    boxes = [text.get_window_extent() for text in texts]
    return all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes) and not any(
        one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place]
    )


@pytest.mark.parametrize("width", [6, 10, 17])
@pytest.mark.parametrize("text", ["short", LONG.strip(), "x" * 40])
def test_words_fit_whatever_they_are(width: float, text: str) -> None:
    figure, part = page(width, 6, text, f"about {text}", f"below {text}\nand another remark")
    part.subplots()
    assert words_fit(figure)
    assert figure.get_suptitle().replace("\n", " ") == text
    assert part.get_suptitle().replace("\n", " ") == f"about {text}"


def test_kinds_of_policies_are_explained() -> None:
    kinds = {PolicyKind.KEEPS, PolicyKind.CHANGES}
    assert kinds_in_words(kinds) == [line.get_label() for line in kind_handles(kinds)] == ["~ changes the routing"]
    assert kinds_in_words({PolicyKind.KEEPS}) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 4, 8, 16], True), ([8.0, 64.0], False), ([0.1, 0.3, 0.5, 0.7], False), ([0, 1, 10, 100], False),
     ([1, 2, 3], False)],
)
def test_ratios(values: list[float], expected: bool) -> None:
    assert by_ratio(values) is expected


def test_numbers_stand_where_they_are_and_names_side_by_side() -> None:
    assert places([8, 64]) == {8: 8.0, 64: 64.0}
    assert places(["3x16", "5x16"]) == {"3x16": 0.0, "5x16": 1.0}


def test_axes_have_names_units_and_ticks_at_the_values() -> None:
    ax = Figure().subplots()
    style_values(ax, "batch", [1, 4, 16])
    assert (ax.get_xlabel(), ax.get_xscale()) == ("batch (sequences)", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "4", "16"]
    ax = Figure().subplots()
    style_values(ax, "hardware", ["rtx-4090+ddr4-3200", "a100"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["rtx-4090\n+ddr4-3200", "a100"]


def test_many_bytes_are_read_in_gb() -> None:
    for rates in ([8e9 + 1e9 * step for step in range(12)], [1e9 * 2**step for step in range(12)]):
        ax = Figure().subplots()
        style_values(ax, "link.h2d_bytes_per_s", rates)
        ax.set_xlim(rates[0], rates[-1])
        assert "10 GB/s" in [label.get_text() for label in ax.get_xticklabels()]


def test_a_single_value_stands_in_the_middle() -> None:
    ax = Figure().subplots()
    style_values(ax, "pcie_gbps", [16.0])
    assert ax.get_xlim() == (8.0, 24.0)


@pytest.mark.filterwarnings("error")
def test_names_on_axes_are_shown_as_they_are_written() -> None:
    figure, part = page(6, 6, "headline")
    ax = part.subplots()
    style_values(ax, "trace", ["50$ or 60$", "esc \x1b", "\ud800"])
    style_bars(ax, ["$x$", "\ud800"])
    figure.draw_without_rendering()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["50$ or 60$", r"esc \x1b", r"\ud800"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["$x$", r"\ud800"]


# --- Marks of policies, and one look for each in every picture --------------------------------------------------------


@pytest.mark.parametrize(("labels", "expected"), [
    ((), "name"),
    (("synthetic trace",), "name"),
    (("clairvoyant",), "name *"),
    (["synthetic trace", "changes routing"], "name ~"),
    (("changes routing", "clairvoyant"), "name *"),
])
def test_marks(labels: tuple[str, ...], expected: str) -> None:
    assert marked("name", kind_of(labels)) == expected


def test_only_the_marks_of_these_kinds_are_explained() -> None:
    assert list(meanings(set(PolicyKind))) == ["*", "~"]
    assert list(meanings([PolicyKind.CHANGES, PolicyKind.KEEPS])) == ["~"]
    assert meanings([PolicyKind.KEEPS]) == {}


# --- looks ------------------------------------------------------------------------------------------------------------

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "black"}


def test_every_policy_has_a_look_of_its_own() -> None:
    looks = {name: look_of(name) for name in policy_names() if name != "oracle"}
    assert len(set(looks.values())) == len(looks)
    assert {look.colour for look in looks.values()} <= OKABE_ITO


def test_clairvoyant_policies_are_black_and_dashed() -> None:
    assert look_of("anything", PolicyKind.CLAIRVOYANT) == CLAIRVOYANT == ("black", "--", "")


def test_an_unknown_policy_has_a_look_too() -> None:
    assert look_of("mine").colour not in OKABE_ITO


# --- trilane.output.figures for programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", trilane.output.figures.__all__)
def test_every_name_is_there_and_described(name: str) -> None:
    assert getattr(trilane.output.figures, name).__doc__
    assert f"{name}" in str(trilane.output.figures.__doc__)
    assert name in dir(trilane.output.figures)


def test_every_picture_is_public() -> None:
    folder = Path(str(trilane.output.figures.__file__)).parent
    drawn = [line.split("(")[0].removeprefix("def ") for file in folder.glob("*.py") for line in file.open()
             if line.startswith("def plot_")]
    assert set(drawn) == {name for name in trilane.output.figures.__all__ if name.startswith("plot_")}


def test_every_picture_is_drawn_with_matplotlibs_own_settings() -> None:
    drawn = ["save_figure", *(name for name in trilane.output.figures.__all__ if name.startswith("plot_"))]
    assert [name for name in drawn if not hasattr(getattr(trilane.output.figures, name), "__wrapped__")] == []


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'plot_gant'.*plot_gantt"):
        trilane.output.figures.plot_gant  # noqa: B018


def test_the_import_is_light_and_no_module_hides_a_name() -> None:
    code = "import sys, trilane.output.figures; assert not {'matplotlib', 'pandas', 'numpy'} & set(sys.modules); " \
           "from trilane.output.figures import plot_gantt, means_of; assert callable(plot_gantt) and callable(means_of)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
