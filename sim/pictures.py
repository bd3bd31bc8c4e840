"""Writing pictures: aside first and then renamed, the same bytes for the same figure."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class PictureError(ValueError):
    """A picture that cannot be drawn; the message says what is missing."""


def save_figure(figure: Figure, path: str | Path, dpi: int = 110) -> None:
    """Write ``figure`` in the format that the name's ending says. Raises PictureError for an unknown one."""
    target = Path(path)
    formats = FigureCanvasAgg.get_supported_filetypes()
    kind = target.suffix.lstrip(".").lower()
    if kind not in formats:
        raise PictureError(f"{target}: expected a picture file ending in one of {', '.join(sorted(formats))}")
    aside = target.with_name(f"{target.name}.part")
    try:
        metadata = {"Software": None} if kind == "png" else None
        figure.savefig(aside, format=kind, dpi=dpi, facecolor="white", metadata=metadata)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
