"""Pictures as files: written aside first, the same bytes for the same figure, with the data that it draws."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.style import context

from trilane.common.errors import TrilaneError
from trilane.common.files import atomic_path

FORMATS = ("png", "svg", "pdf")

# A decorator: in the function, matplotlib's own settings hold, whatever a user's say, and ids in SVG are not random.
default_settings = context(["default", {"svg.hashsalt": "trilane"}])


class PictureError(TrilaneError):
    """A picture that cannot be drawn; the message says what is missing."""


def picture_format(path: str | Path) -> str:
    """The format that the ending of a name says. Raises PictureError for an unknown one."""
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise PictureError(f"{path}: expected the name of a picture, ending in .{', .'.join(FORMATS)}")
    return kind


def without_title(figure: Figure) -> None:
    """Remove the headline and the line under it, for a figure with a caption of its own."""
    for part in (figure, *figure.subfigs):
        part.suptitle("")


@default_settings
def save_figure(figure: Figure, path: str | Path, dpi: int = 110) -> None:
    """Write ``figure`` in the format that the ending of the name says. Raises PictureError for an unknown one."""
    kind = picture_format(path)
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, dpi=dpi, facecolor="white", metadata=metadata)
    with atomic_path(path) as aside:
        aside.write_bytes(drawn.getvalue())


class Picture(NamedTuple):
    """A figure, and the rows that it draws."""

    figure: Figure
    frame: pd.DataFrame


def save_picture(picture: Picture, path: str | Path) -> Path:
    """Write the figure, and what it draws as a CSV of the same name, whose path is returned. Raises PictureError."""
    save_figure(picture.figure, path)
    target = Path(path).with_suffix(".csv")
    with atomic_path(target) as aside:
        picture.frame.to_csv(aside, index=False, lineterminator="\n")
    return target
