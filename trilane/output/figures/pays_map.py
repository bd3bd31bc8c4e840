"""The map of an idea: what it gains over the two numbers that decide, the break-even line, and the machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from trilane.output.figures.figure_files import Picture, default_settings
from trilane.output.figures.style import BLUE, INK, VERMILLION, legend_of, page
from trilane.study.pays.gain_map import Cell, GainMap
from trilane.study.pays.remarks import remarks_of
from trilane.study.pays.words import gain_text, shown_text, verdict_of

_COLOURS = LinearSegmentedColormap.from_list("pays", [VERMILLION, "#FFFFFF", BLUE])
_ENDS = (-0.6, 0.6)  # gains from which on a colour is full: the same in all maps, so that these compare
_TICKS = {-0.6: "-60% or less", -0.4: "-40%", -0.2: "-20%", 0.0: "0%", 0.2: "+20%", 0.4: "+40%", 0.6: "+60% or more"}
_STRONG = 0.7  # of a colour, from which on its text is white
_CELL = (1.25, 0.75)  # inches


@default_settings
def plot_pays(found: GainMap) -> Picture:
    """Gains as colours and numbers, blue where the idea pays; cells are of equal size, whatever the distances of their
    values. The frame has a row a cell."""
    idea, rows = found.question.idea, found.rows
    gains = np.array([[np.nan if cell.gain is None else cell.gain for cell in cells] for cells in rows])
    norm = TwoSlopeNorm(idea.worth, *_ENDS)
    width, height = 2.6 + _CELL[0] * len(rows[0]), 2.6 + _CELL[1] * len(rows)
    about, remarks = found.about.replace(": ", ":\n", 1), "\n".join(remarks_of(found))
    figure, part = page(width, height, verdict_of(found), about, remarks)
    ax = part.subplots()
    ax.imshow(np.ma.masked_invalid(gains), cmap=_COLOURS, norm=norm, origin="lower", aspect="auto")
    for up, cells in enumerate(rows):
        for across, cell in enumerate(cells):
            place = norm(gains[up, across])
            strong = abs(2 * place - 1) > _STRONG
            _write(ax, cell, (across, up), "white" if strong else "black", _COLOURS(place))
    drawn = _break_even(ax, gains, idea.worth)
    _machine(ax, found.here)
    _style(ax, found)
    bar = part.colorbar(ScalarMappable(norm, _COLOURS), ax=ax, pad=0.02, aspect=30, extend="both")
    bar.set_ticks(list(_TICKS), labels=list(_TICKS.values()))
    bar.set_label(f"gain in tokens/s over {idea.over}")
    what = f"gain of {idea.worth:.0%}" if idea.worth else "break-even"
    text = f"{what}: it pays on the blue side" if drawn else "no break-even on this map"
    legend_of(part, [Line2D([], [], color="black" if drawn else "none", linewidth=2.5, label=text)])
    return Picture(figure, _frame(found))


def _frame(found: GainMap) -> pd.DataFrame:
    """A row a cell: the two numbers, the gain with its lowest and highest draw, and the speeds."""
    idea = found.question.idea
    return pd.DataFrame(
        {
            idea.x.label: cell.x, idea.y.label: cell.y, "gain": cell.gain,
            "gain_min": min(cell.gains, default=None), "gain_max": max(cell.gains, default=None),
            "without": cell.without.policy, "without_tokens_per_s": cell.without.mean_tokens_per_s or None,
            "using": cell.using.policy, "using_tokens_per_s": cell.using.mean_tokens_per_s or None,
            "here": (across, up) == found.here, "reason": cell.without.reason or cell.using.reason,
        }
        for up, cells in enumerate(found.rows) for across, cell in enumerate(cells)
    )


def _write(ax: Axes, cell: Cell, place: tuple[int, int], ink: str, ground: tuple[float, ...]) -> None:
    """The gain, and below it the lowest and the highest of the draws, if these differ. ``ground``, the colour of the
    cell, keeps the break-even line off the digits."""
    if cell.gain is None:
        ax.annotate("cannot run", place, ha="center", va="center", color=INK, fontsize=8)
        return
    look: dict[str, Any] = {
        "ha": "center", "va": "center", "color": ink, "path_effects": [withStroke(linewidth=4, foreground=ground)]
    }
    ax.annotate(gain_text(cell.gain), place, fontsize=11, fontweight="bold", **look)
    low, high = (gain_text(end).removesuffix("%") for end in (min(cell.gains), max(cell.gains)))
    if low != high:
        ax.annotate(f"{low} to {high}", place, xytext=(0, -13), textcoords="offset points", fontsize=7.5, **look)


def _break_even(ax: Axes, gains: np.ndarray, worth: float) -> bool:
    """The line between the cells that pay and those that do not; whether there is one."""
    known = gains[~np.isnan(gains)]
    if min(gains.shape) < 2 or known.min() > worth or known.max() <= worth:
        return False
    for colour, width in (("white", 5.0), ("black", 2.5)):
        ax.contour(np.ma.masked_invalid(gains), levels=[worth], colors=colour, linewidths=width)
    return True


def _machine(ax: Axes, here: tuple[int, int]) -> None:
    """A frame around the machine's cell."""
    left, foot = here[0] - 0.5, here[1] - 0.5
    ax.add_patch(Rectangle((left, foot), 1, 1, fill=False, edgecolor="black", linewidth=3, zorder=5))
    ax.annotate("this machine", (here[0], here[1] + 0.5), xytext=(0, -8), textcoords="offset points", ha="center",
                va="center", fontsize=8.5, fontweight="bold", zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})


def _style(ax: Axes, found: GainMap) -> None:
    idea = found.question.idea
    ax.set_xticks(range(len(found.rows[0])), [shown_text(idea.x, cell.x) for cell in found.rows[0]])
    ax.set_yticks(range(len(found.rows)), [shown_text(idea.y, cells[0].y) for cells in found.rows])
    ax.set_xlabel(idea.x.label)
    ax.set_ylabel(idea.y.label)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
