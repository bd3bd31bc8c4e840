"""``trilane.output.figures`` for programs: every name is there and described, and importing it loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trilane.output.figures

ROOT = Path(__file__).parents[4]


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
