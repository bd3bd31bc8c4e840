"""Two axes of a sweep: each cell names the fastest policy and its time per token, and is coloured by it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from policies.protocols import PolicyKind
from trilane.output.figures.figure_files import Picture, default_settings
from trilane.output.figures.marks import SIGNS, marked
from trilane.output.figures.panels import GRID, axes_of_panels, panels_of
from trilane.output.figures.style import kinds_in_words, page, round_ticks, wrapped
from trilane.output.figures.sweep_means import SweepMeans
from trilane.output.figures.winners import tally
from trilane.output.figures.words import value_text
from trilane.study.sweep.axes import axis_label

_LOG_FROM = 4.0  # highest over lowest time, from which on colours stand for ratios
_COLOURS = colormaps["viridis_r"]  # readable in grey, and with any colour vision; dark is slow
_CELL = (1.35, 0.8)  # inches, where there is room
_WIDEST, _NARROWEST = 17.0, 0.62  # inches of a row of cells, and of one cell
_ONE_LINE = 1.2  # inches of a cell, from which on its last line holds two numbers
_TEXT = 10.5  # points of a cell's first lines
_DARK = 0.45  # luminance of a cell below which its text is white


@default_settings
def plot_heat_map(means: SweepMeans, x: str, y: str) -> Picture:
    """The fastest policy over the axes ``x`` and ``y``, a panel for each setting of the others.

    Below it, each cell has the TPOT of the clairvoyant run (*) and the lower bound, in ms; black lines separate cells
    of different policies. ``means`` come from ``means_of``. Raises PictureError if an axis has no values or the other
    axes have too many.
    """
    across, up = means.axis(x), means.axis(y)
    panels, cells = panels_of(means, [x, y]), fastest_cells(means)
    rows, columns = GRID[len(panels)]
    cell = max(_NARROWEST, min(_CELL[0], _WIDEST / columns / len(across)))
    width = 2.6 + columns * (0.4 + cell * max(3, len(across)))
    height = 2.1 + rows * (0.5 + _CELL[1] * max(3, len(up)))
    headline = tally(zip(cells["policy"], cells["kind"], strict=True))
    figure, part = page(max(9.0, width), height, headline, means.about, _below(means, cells))
    norm = _norm(cells["tpot_ms"])
    for panel, ax in axes_of_panels(part, panels):
        _draw(ax, panel.of(cells), (x, across), (y, up), norm, cell)
    bar = part.colorbar(ScalarMappable(norm, _COLOURS), ax=part.axes, pad=0.02, aspect=30)
    bar.set_label("TPOT of the fastest policy (ms)")
    if isinstance(norm, LogNorm):
        round_ticks(bar.ax.yaxis, norm.vmin or 0, norm.vmax or 0)
    return Picture(figure, cells.drop(columns="kind"))


def fastest_cells(means: SweepMeans) -> pd.DataFrame:
    """A row a setting: the fastest policy, its kind and TPOT, the clairvoyant TPOT and the bound."""
    axes = list(means.axes)
    best = means.real.dropna(subset=axes).sort_values(["tpot_ms", "policy"], kind="stable").drop_duplicates(axes)
    best = best.sort_index()[[*axes, "policy", "kind", "tpot_ms"]]
    least = means.clairvoyant.groupby(axes, sort=False)["tpot_ms"].min().rename("clairvoyant_tpot_ms").reset_index()
    bounds = means.bounds.rename(columns={"tpot_ms": "lower_bound_tpot_ms"})
    return best.merge(least, on=axes, how="left").merge(bounds, on=axes, how="left")


def left_to_gain(cell: Mapping[Hashable, Any], between: str) -> str:
    """The clairvoyant run and the bound of a cell, in ms, where there are any."""
    columns = {SIGNS[PolicyKind.CLAIRVOYANT]: "clairvoyant_tpot_ms", "bound": "lower_bound_tpot_ms"}
    return between.join(f"{sign} {cell[key]:,.1f}" for sign, key in columns.items() if pd.notna(cell[key]))


def _below(means: SweepMeans, cells: pd.DataFrame) -> str:
    small = "the clairvoyant run (*) and the lower bound" if len(means.clairvoyant) else "the lower bound"
    legend = f"in each cell: the fastest policy, its TPOT in ms; small: {small}"
    return "\n".join(["; ".join([legend, *kinds_in_words(set(cells["kind"]))]), *means.notes])


def _norm(times: pd.Series) -> Normalize:
    low, high = float(times.min()), float(times.max())
    return LogNorm(low, high) if high > _LOG_FROM * low else Normalize(min(low, 0.97 * high), high)


def _draw(
    ax: Axes, cells: pd.DataFrame, horizontal: tuple[str, Sequence[Any]], vertical: tuple[str, Sequence[Any]],
    norm: Normalize, width: float,
) -> None:
    """One panel: cells of equal size, whatever the distances of the values; the first value of ``y`` is at the foot."""
    (x, across), (y, up) = horizontal, vertical
    places = {"index": pd.Index(up), "columns": pd.Index(across)}
    names, times = (cells.pivot(index=y, columns=x, values=name).reindex(**places) for name in ("policy", "tpot_ms"))
    ax.imshow(np.ma.masked_invalid(times), cmap=_COLOURS, norm=norm, origin="lower", aspect="auto")
    for cell in cells.to_dict("records"):
        _write(ax, cell, (across.index(cell[x]), up.index(cell[y])), norm, width)
    _part(ax, names)
    ax.set_xticks(range(len(across)), [wrapped(value_text(x, value)) for value in across])
    ax.set_yticks(range(len(up)), [wrapped(value_text(y, value)) for value in up])
    ax.set_xlabel(axis_label(x))
    ax.set_ylabel(axis_label(y))
    ax.tick_params(length=0, labelleft=True)
    ax.spines[:].set_visible(False)


def _write(ax: Axes, cell: Mapping[Hashable, Any], place: tuple[int, int], norm: Normalize, width: float) -> None:
    """The words of a cell ``width`` inches wide, light on dark and dark on light."""
    red, green, blue, _ = _COLOURS(norm(cell["tpot_ms"]))
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < _DARK else "black"
    name = marked(cell["policy"], cell["kind"])
    size = min(_TEXT, 0.95 * width * 72 / (0.62 * len(name)))
    ax.annotate(f"{name}\n{cell['tpot_ms']:,.1f}", place, xytext=(0, 8), textcoords="offset points",
                ha="center", va="center", color=ink, fontsize=size, fontweight="bold")
    small = left_to_gain(cell, "  " if width > _ONE_LINE else "\n")
    ax.annotate(small, place, xytext=(0, -9), textcoords="offset points", ha="center", va="top", color=ink,
                fontsize=8 if width > _ONE_LINE else 6.5)


def _part(ax: Axes, names: pd.DataFrame) -> None:
    """A thick line between neighbours with different policies, and a white one between all."""
    grid = names.fillna("").to_numpy(dtype=object)  # cells in which no policy could run are alike
    rows, columns = grid.shape
    for row, column in np.ndindex(rows, columns - 1):
        _edge(ax, (column + 0.5, row - 0.5), (column + 0.5, row + 0.5), grid[row, column] != grid[row, column + 1])
    for row, column in np.ndindex(rows - 1, columns):
        _edge(ax, (column - 0.5, row + 0.5), (column + 0.5, row + 0.5), grid[row, column] != grid[row + 1, column])


def _edge(ax: Axes, start: tuple[float, float], end: tuple[float, float], border: bool) -> None:
    xs, ys = zip(start, end, strict=True)
    if border:
        ax.plot(xs, ys, color="white", linewidth=5, solid_capstyle="projecting", zorder=2)
        ax.plot(xs, ys, color="black", linewidth=2, solid_capstyle="projecting", zorder=3)
    else:
        ax.plot(xs, ys, color="white", linewidth=1, zorder=2)
