"""What pictures share: one style, and writing them aside first, the same bytes for the same figure."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from traces.written_aside import written_aside

FORMATS = ("png", "svg", "pdf")


class PictureError(ValueError):
    """A picture that cannot be drawn; the message says what is missing."""


def picture_format(path: str | Path) -> str:
    """The format that a name's ending says. Raises PictureError for one that we do not write."""
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise PictureError(f"{path}: expected the name of a picture, ending in .{', .'.join(FORMATS)}")
    return kind


def save_figure(figure: Figure, path: str | Path, dpi: int = 110) -> None:
    """Write ``figure`` in the format that the name's ending says. Raises PictureError for an unknown one."""
    kind = picture_format(path)
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with written_aside(path) as aside:
        figure.savefig(aside, format=kind, dpi=dpi, facecolor="white", metadata=metadata)


def style_tpot_axis(ax: Axes, room_ms: float) -> None:
    """An axis of horizontal bars that show times per token, up to ``room_ms``."""
    ax.set_xlim(0, room_ms)
    ax.set_xlabel("time per output token, TPOT (ms); shorter is better")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["right", "top", "left"]].set_visible(False)
