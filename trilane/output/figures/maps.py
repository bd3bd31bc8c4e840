"""Maps of coloured cells: the fastest policy over two axes of a sweep, and what an idea gains."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize, TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from trilane.output.figures.figure_files import Picture, default_settings
from trilane.output.figures.marks import BLUE, INK, VERMILLION, marked
from trilane.output.figures.pays_words import gain_text, remarks_of, row_text, shown_text, verdict_of, y_label
from trilane.output.figures.style import (
    PANEL_GRID,
    axes_of_panels,
    kinds_in_words,
    legend_of,
    page,
    panels_of,
    round_ticks,
    wrapped,
)
from trilane.output.figures.sweep_means import SweepMeans, fastest_cells, left_to_gain
from trilane.output.figures.words import tally, value_text
from trilane.study.pays.gain_map import Cell, GainMap
from trilane.study.sweep.axes import axis_label

_SLOW_IS_DARK = colormaps["viridis_r"]  # readable in grey, and with any colour vision
_DARK = 0.45  # luminance of a cell, below which text is white


def _draw_cells(
    ax: Axes, values: Any, look: tuple[Colormap, Normalize], across: Sequence[str], up: Sequence[str],
    origin: Literal["lower", "upper"] = "lower",
) -> None:
    """Cells of equal size, named below and to the left; the first row is at the foot unless ``origin`` is "upper"."""
    ax.imshow(np.ma.masked_invalid(values), cmap=look[0], norm=look[1], origin=origin, aspect="auto")
    ax.set_xticks(range(len(across)), across)
    ax.set_yticks(range(len(up)), up)
    ax.tick_params(length=0, labelleft=True)
    ax.spines[:].set_visible(False)


# --- the fastest policy over two axes of a sweep ----------------------------------------------------------------------

_LOG_FROM = 4.0  # highest over lowest time, from which on colours stand for ratios
_CELL = (1.35, 0.8)  # inches, where there is room
_WIDEST, _NARROWEST = 17.0, 0.62  # inches of a row of cells, and of one cell
_ONE_LINE = 1.2  # inches of a cell, from which on its last line holds two numbers
_TEXT = 10.5  # points of a cell's first lines


@default_settings
def plot_heat_map(means: SweepMeans, x: str, y: str) -> Picture:
    """The fastest policy over the axes ``x`` and ``y``, a panel for each setting of the others.

    Below it, each cell has the TPOT of the clairvoyant run (*) and the lower bound, in ms; black lines separate cells
    of different policies. ``means`` come from ``means_of``. Raises PictureError if an axis has no values or the other
    axes have too many.
    """
    across, up = means.axis(x), means.axis(y)
    panels, cells = panels_of(means, [x, y]), fastest_cells(means)
    rows, columns = PANEL_GRID[len(panels)]
    cell = max(_NARROWEST, min(_CELL[0], _WIDEST / columns / len(across)))
    width = 2.6 + columns * (0.4 + cell * max(3, len(across)))
    height = 2.1 + rows * (0.5 + _CELL[1] * max(3, len(up)))
    headline = tally(zip(cells["policy"], cells["kind"], strict=True))
    figure, part = page(max(9.0, width), height, headline, means.about, _marks_and_notes(means, cells))
    low, high = float(cells["tpot_ms"].min()), float(cells["tpot_ms"].max())
    norm = LogNorm(low, high) if high > _LOG_FROM * low else Normalize(min(low, 0.97 * high), high)
    for panel, ax in axes_of_panels(part, panels):
        _draw_fastest(ax, panel.of(cells), (x, across), (y, up), norm, cell)
    bar = part.colorbar(ScalarMappable(norm, _SLOW_IS_DARK), ax=part.axes, pad=0.02, aspect=30)
    bar.set_label("TPOT of the fastest policy (ms)")
    if isinstance(norm, LogNorm):
        round_ticks(bar.ax.yaxis, norm.vmin or 0, norm.vmax or 0)
    return Picture(figure, cells.drop(columns="kind"))


def _marks_and_notes(means: SweepMeans, cells: pd.DataFrame) -> str:
    small = "the clairvoyant run (*) and the lower bound" if len(means.clairvoyant) else "the lower bound"
    legend = f"in each cell: the fastest policy, its TPOT in ms; small: {small}"
    return "\n".join(["; ".join([legend, *kinds_in_words(set(cells["kind"]))]), *means.notes])


def _draw_fastest(
    ax: Axes, cells: pd.DataFrame, horizontal: tuple[str, Sequence[Any]], vertical: tuple[str, Sequence[Any]],
    norm: Normalize, width: float,
) -> None:
    """One panel; ``horizontal`` and ``vertical`` are axes with their values, ``width`` the inches of a cell."""
    (x, across), (y, up) = horizontal, vertical
    places = {"index": pd.Index(up), "columns": pd.Index(across)}
    names, times = (cells.pivot(index=y, columns=x, values=name).reindex(**places) for name in ("policy", "tpot_ms"))
    below, left = ([wrapped(value_text(name, value)) for value in values] for name, values in (horizontal, vertical))
    _draw_cells(ax, times, (_SLOW_IS_DARK, norm), below, left)
    for cell in cells.to_dict("records"):
        _write_fastest(ax, cell, (across.index(cell[x]), up.index(cell[y])), norm, width)
    _draw_borders(ax, names)
    ax.set_xlabel(axis_label(x))
    ax.set_ylabel(axis_label(y))


def _write_fastest(
    ax: Axes, cell: Mapping[Hashable, Any], place: tuple[int, int], norm: Normalize, width: float
) -> None:
    """The words of a cell ``width`` inches wide, light on dark and dark on light."""
    red, green, blue, _ = _SLOW_IS_DARK(norm(cell["tpot_ms"]))
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < _DARK else "black"
    name = marked(cell["policy"], cell["kind"])
    size = min(_TEXT, 0.95 * width * 72 / (0.62 * len(name)))
    ax.annotate(f"{name}\n{cell['tpot_ms']:,.1f}", place, xytext=(0, 8), textcoords="offset points",
                ha="center", va="center", color=ink, fontsize=size, fontweight="bold")
    small = left_to_gain(cell, "  " if width > _ONE_LINE else "\n")
    ax.annotate(small, place, xytext=(0, -9), textcoords="offset points", ha="center", va="top", color=ink,
                fontsize=8 if width > _ONE_LINE else 6.5)


def _draw_borders(ax: Axes, names: pd.DataFrame) -> None:
    """A thick line between neighbours with different policies, and a white one between all."""
    grid = names.fillna("").to_numpy(dtype=object)  # cells in which no policy could run are alike
    rows, columns = grid.shape
    for row, column in np.ndindex(rows, columns - 1):
        _draw_border(ax, [column + 0.5] * 2, [row - 0.5, row + 0.5], grid[row, column] != grid[row, column + 1])
    for row, column in np.ndindex(rows - 1, columns):
        _draw_border(ax, [column - 0.5, column + 0.5], [row + 0.5] * 2, grid[row, column] != grid[row + 1, column])


def _draw_border(ax: Axes, xs: list[float], ys: list[float], thick: bool) -> None:
    if thick:
        ax.plot(xs, ys, color="white", linewidth=5, solid_capstyle="projecting", zorder=2)
        ax.plot(xs, ys, color="black", linewidth=2, solid_capstyle="projecting", zorder=3)
    else:
        ax.plot(xs, ys, color="white", linewidth=1, zorder=2)


# --- what an idea gains -----------------------------------------------------------------------------------------------

_GAINS = LinearSegmentedColormap.from_list("pays", [VERMILLION, "#FFFFFF", BLUE])
_ENDS = (-0.6, 0.6)  # gains from which on a colour is full: the same in all maps, so that these compare
_TICKS = {-0.6: "-60% or less", -0.4: "-40%", -0.2: "-20%", 0.0: "0%", 0.2: "+20%", 0.4: "+40%", 0.6: "+60% or more"}
_STRONG = 0.7  # of a colour, from which on its text is white


@default_settings
def plot_pays(gain_map: GainMap) -> Picture:
    """Gains over the two numbers that decide, blue where the idea pays, with the break-even line and a frame around the
    machine; cells are of equal size, whatever the distances of their values. The frame of data has a row a cell.
    """
    idea, rows = gain_map.question.idea, gain_map.rows
    gains = np.array([[np.nan if cell.gain is None else cell.gain for cell in cells] for cells in rows])
    norm = TwoSlopeNorm(idea.worth, *_ENDS)
    about, remarks = gain_map.about.replace(": ", ":\n", 1), "\n".join(remarks_of(gain_map))
    figure, part = page(2.6 + 1.25 * len(rows[0]), 2.6 + 0.75 * len(rows), verdict_of(gain_map), about, remarks)
    ax = part.subplots()
    _draw_cells(ax, gains, (_GAINS, norm), [shown_text(idea.x, cell.x) for cell in rows[0]],
                [row_text(gain_map, row, "\n") for row in range(len(rows))])
    for up, cells in enumerate(rows):
        for across, cell in enumerate(cells):
            _write_gain(ax, cell, (across, up), norm(gains[up, across]))
    drawn = _draw_break_even(ax, gains, idea.worth)
    _frame_machine(ax, *gain_map.here)
    ax.set_xlabel(idea.x.label)
    ax.set_ylabel(y_label(gain_map))
    bar = part.colorbar(ScalarMappable(norm, _GAINS), ax=ax, pad=0.02, aspect=30, extend="both")
    bar.set_ticks(list(_TICKS), labels=list(_TICKS.values()))
    bar.set_label(f"gain in tokens/s over {idea.over}")
    what = f"gain of {idea.worth:.0%}" if idea.worth else "break-even"
    text = f"{what}: it pays on the blue side" if drawn else "no break-even on this map"
    legend_of(part, [Line2D([], [], color="black" if drawn else "none", linewidth=2.5, label=text)])
    return Picture(figure, _gain_rows(gain_map))


def _gain_rows(gain_map: GainMap) -> pd.DataFrame:
    """A row a cell: the two numbers, the gain with its lowest and highest draw, and the speeds."""
    idea = gain_map.question.idea
    return pd.DataFrame(
        {
            idea.x.label: cell.x, idea.y.label: cell.y, "gain": cell.gain,
            "gain_min": min(cell.gains, default=None), "gain_max": max(cell.gains, default=None),
            "without": cell.without.policy, "without_tokens_per_s": cell.without.mean_tokens_per_s or None,
            "using": cell.using.policy, "using_tokens_per_s": cell.using.mean_tokens_per_s or None,
            "here": (across, up) == gain_map.here, "reason": cell.without.reason or cell.using.reason,
        }
        for up, cells in enumerate(gain_map.rows) for across, cell in enumerate(cells)
    )


def _write_gain(ax: Axes, cell: Cell, place: tuple[int, int], colour: float) -> None:
    """The gain, and below it the lowest and the highest of the draws, if these differ; ``colour``: the cell's."""
    if cell.gain is None:
        ax.annotate("cannot run", place, ha="center", va="center", color=INK, fontsize=8)
        return
    look: dict[str, Any] = {
        "ha": "center", "va": "center", "color": "white" if abs(2 * colour - 1) > _STRONG else "black",
    }
    ax.annotate(gain_text(cell.gain), place, fontsize=11, fontweight="bold", **look)
    low, high = (gain_text(end).removesuffix("%") for end in (min(cell.gains), max(cell.gains)))
    if low != high:
        ax.annotate(f"{low} to {high}", place, xytext=(0, -13), textcoords="offset points", fontsize=7.5, **look)


def _draw_break_even(ax: Axes, gains: np.ndarray, worth: float) -> bool:
    """Draw the borders between cells that pay and those that do not; return False if there are none."""
    side = np.where(np.isnan(gains), 0, np.where(gains > worth, 1, -1))
    upright = np.argwhere(side[:, :-1] * side[:, 1:] < 0).tolist()
    level = np.argwhere(side[:-1] * side[1:] < 0).tolist()
    for row, column in upright:
        _draw_border(ax, [column + 0.5] * 2, [row - 0.5, row + 0.5], thick=True)
    for row, column in level:
        _draw_border(ax, [column - 0.5, column + 0.5], [row + 0.5] * 2, thick=True)
    return bool(upright or level)


def _frame_machine(ax: Axes, column: int, row: int) -> None:
    corner = (column - 0.5, row - 0.5)
    ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=3, zorder=5))
    ax.annotate("this machine", (column, row + 0.5), xytext=(0, -8), textcoords="offset points", ha="center",
                va="center", fontsize=8.5, fontweight="bold", zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})
