"""Small multiples: one panel for each setting of the axes that a picture does not draw, at most six."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.sweep_means import SweepMeans
from trilane.output.figures.words import setting_words, value_text

MOST = 6
GRID = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}  # rows, columns


class Panel(NamedTuple):
    """The values of the axes that are not drawn, and the same in words."""

    where: dict[str, Any]
    title: str

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows of this panel."""
        for name, value in self.where.items():
            rows = rows[rows[name] == value]
        return rows


def settings_of(means: SweepMeans, drawn: Sequence[str] = ()) -> list[Panel]:
    """Every setting of the axes other than the ``drawn`` ones that has rows."""
    others = {name: values for name, values in means.axes.items() if name not in drawn}
    settings = [dict(zip(others, values, strict=True)) for values in product(*others.values())]
    panels = [Panel(where, ", ".join(setting_words(*pair) for pair in where.items())) for where in settings]
    return [panel for panel in panels if not panel.of(means.rows).empty]


def panels_of(means: SweepMeans, drawn: Sequence[str]) -> list[Panel]:
    """A panel for each of those settings. Raises PictureError if they are too many, naming the keys and values."""
    panels = settings_of(means, drawn)
    if len(panels) <= MOST:
        return panels
    values = {name: list(dict.fromkeys(panel.where[name] for panel in panels)) for name in panels[0].where}
    vary = ", or ".join(f"{name}={' '.join(value_text(name, value) for value in values[name])}" for name in values)
    raise PictureError(
        f"expected at most {MOST} settings of the axes that are not drawn (all but {', '.join(drawn)}), got "
        f"{len(panels)}: choose with --where {vary}"
    )


def page_size(count: int, height: float = 4.6) -> tuple[float, float]:
    """Inches of a page with so many panels, each so high."""
    rows, columns = GRID[count]
    return {1: 10.0, 2: 14.0, 3: 17.0}[columns], 1.2 + rows * height


def axes_of_panels(part: SubFigure, panels: Sequence[Panel]) -> Iterator[tuple[Panel, Axes]]:
    """The panels with the axes to draw each into, row by row, with their titles."""
    rows, columns = GRID[len(panels)]
    grid = np.atleast_1d(part.subplots(rows, columns, sharey=True, squeeze=False)).ravel()
    for ax in grid[len(panels) :]:
        ax.remove()
    for panel, ax in zip(panels, grid, strict=False):
        if len(panels) > 1:
            ax.set_title(panel.title, fontsize=11, loc="left", fontweight="bold")
        yield panel, ax
