"""The page of a picture with its headline, axes for the values of a sweep, and small multiples of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter, StrMethodFormatter

from policies.protocols import PolicyKind
from trilane.common.quoting import printable
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.marks import GRID, INK, meanings
from trilane.output.figures.sweep_means import SweepMeans
from trilane.output.figures.words import is_share, numeric, setting_words, value_text
from trilane.study.sweep.axes import axis_label

_LARGEST, _SMALLEST = 14.0, 11.5  # points of a headline
_LETTER = 0.6  # width of a bold letter over its size, with some to spare
_POINTS = 72  # an inch
_LOG_FROM = 4.0  # highest over lowest value, from which on values that grow by ratios are drawn so
_TICKS = 10  # up to this number every value has a tick
_LONG = 1e4  # of a logarithmic axis, the highest value over the lowest
_CROWDED = 0.05  # of an axis: of ticks nearer to each other than that not all are written


class PlainFigure(Figure):
    """A figure that shows text as it is written: a $ begins no formula, and what has no letter is an escape."""

    def draw(self, renderer: Any) -> None:
        """As in matplotlib."""
        with rc_context({"text.parse_math": False}):  # of ticks, which are made while it draws
            for text in self.findobj(Text):
                assert isinstance(text, Text)
                text.set_parse_math(False)
                text.set_text(drawable(text.get_text()))
            for axis in self.findobj(Axis):
                assert isinstance(axis, Axis)
                if isinstance(ticks := axis.get_major_formatter(), FuncFormatter):  # names of ticks are such, too
                    ticks.func = lambda *tick, texts=ticks.func: drawable(texts(*tick))
            super().draw(renderer)


def drawable(text: str) -> str:
    """``printable`` text; characters that the font of pictures lacks, such as Chinese ones, are escapes too."""
    return "".join(c if ord(c) in _letters() or c == "\n" else ascii(c)[1:-1] for c in printable(text))


@cache
def _letters() -> frozenset[int]:
    """The code points that matplotlib's own font has, bold letters too."""
    fonts = (FontProperties(family="DejaVu Sans", weight=weight) for weight in ("normal", "bold"))
    return frozenset.intersection(*(frozenset(get_font(findfont(font)).get_charmap()) for font in fonts))


def page(width: float, height: float, headline: str, about: str = "", below: str = "") -> tuple[Figure, SubFigure]:
    """A figure (inches) with its finding in bold and what was run under it, and the part of it to draw into.

    ``below``: remarks at the foot, broken into lines that fit.
    """
    figure = PlainFigure(figsize=(width, height), layout="constrained")
    part = figure.add_subfigure(figure.add_gridspec()[0])
    size = min(_LARGEST, width * _POINTS / (_LETTER * max(1, len(headline))))
    if size < _SMALLEST:
        size, headline = 13.0, _broken(headline, width, 13.0)
    figure.suptitle(headline, fontsize=size, fontweight="bold", x=0.01, ha="left")
    if about:
        part.suptitle(_broken(about, width, 9.0), fontsize=9.5, x=0.01, ha="left", color=INK)
    if below:
        figure.supxlabel(_broken(below, width, 8.5), fontsize=9, x=0.01, ha="left", color=INK)
    return figure, part


def _broken(text: str, width: float, size: float) -> str:
    """``text`` on lines that fit into ``width`` inches with letters of ``size`` points; its own lines are kept."""
    letters = max(20, int(width * _POINTS / (_LETTER * size)))
    return "\n".join(fill(line, letters, break_on_hyphens=False, break_long_words=False) for line in text.split("\n"))


def legend_of(part: SubFigure | Figure, handles: Sequence[Any], columns: int = 3) -> None:
    """A legend below the panels."""
    part.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def kinds_in_words(kinds: Collection[PolicyKind]) -> list[str]:
    """Meanings of the marks of these kinds of policies: "* knows the future"."""
    return [f"{sign} {meaning}" for sign, meaning in meanings(kinds).items()]


def kind_handles(kinds: Collection[PolicyKind]) -> list[Line2D]:
    """Entries of a legend with the meanings of these kinds' marks."""
    return [Line2D([], [], linestyle="", label=text) for text in kinds_in_words(kinds)]


# --- axes -------------------------------------------------------------------------------------------------------------


def tidy(ax: Axes, grid: str = "both") -> None:
    """No box around the data, and a pale grid behind it (``x``, ``y`` or ``both``)."""
    ax.grid(axis=grid, color=GRID)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.spines[["right", "top"]].set_visible(False)


# --- axes for the values of a sweep -----------------------------------------------------------------------------------


def places(values: Sequence[Any]) -> dict[Any, float]:
    """Places of values on an axis: numbers at their value, text at equal distances."""
    return {value: float(value if numeric(values) else place) for place, value in enumerate(values)}


def style_values(ax: Axes, name: str, values: Sequence[Any]) -> None:
    """A horizontal axis for these values: logarithmic if they grow by ratios, with ticks at the values themselves."""
    ax.set_xlabel(axis_label(name))
    if not numeric(values):
        ax.set_xticks(range(len(values)), [wrapped(value_text(name, value)) for value in values])
        ax.set_xlim(-0.3, len(values) - 0.7)
        return
    if by_ratio(values):
        ax.set_xscale("log")
    if len(values) == 1:
        ax.set_xlim(0.5 * values[0], 1.5 * values[0] or 1.0)
    if len(values) <= _TICKS:
        ax.set_xticks(_written(values), [value_text(name, value) for value in _written(values)])
    elif is_share(name):
        ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    elif by_ratio(values):
        round_ticks(ax.xaxis, values[0], values[-1], name)
    else:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_text(name, value)))
    ax.xaxis.set_minor_locator(NullLocator())


def by_ratio(values: Sequence[Any]) -> bool:
    """True if numbers grow by ratios, not by steps: the middle one is nearer to the geometric mean of the ends."""
    low, high, middle = values[0], values[-1], values[len(values) // 2]
    if len(values) < 3 or low <= 0 or high < _LOG_FROM * low:
        return False
    return bool(abs(middle - (low * high) ** 0.5) < abs(middle - (low + high) / 2))


def round_ticks(axis: Axis, low: float, high: float, name: str = "") -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, of a long one at these alone, as plain numbers or
    as values of an axis."""
    digits = (1, 2, 5) if high < _LONG * low else (1,)
    every = [digit * 10.0**power for power in range(-6, 16) for digit in digits]
    axis.set_ticks([value for value in every if low <= value <= high])
    axis.set_minor_locator(NullLocator())
    plain = StrMethodFormatter("{x:,g}")
    axis.set_major_formatter(FuncFormatter(lambda value, _: value_text(name, value)) if name else plain)


def wrapped(text: str) -> str:
    """A machine made of parts, on several lines."""
    return text.replace("+", "\n+")


def _written(values: Sequence[Any]) -> list[Any]:
    """The values that there is room to write."""
    scale = [float(value) for value in values]
    room = (scale[-1] - scale[0]) * _CROWDED
    if by_ratio(values) or all(high - low >= room for low, high in pairwise(scale)):
        return list(values)
    return [value for place, value in enumerate(values) if not place or value - values[place - 1] >= room]


# --- a panel for each setting of the axes that a picture does not draw ------------------------------------------------

MOST_PANELS = 6
PANEL_GRID = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}  # rows, columns


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
    if len(panels) <= MOST_PANELS:
        return panels
    values = {name: list(dict.fromkeys(panel.where[name] for panel in panels)) for name in panels[0].where}
    vary = ", or ".join(f"{name}={' '.join(value_text(name, value) for value in values[name])}" for name in values)
    raise PictureError(
        f"expected at most {MOST_PANELS} settings of the axes that are not drawn (all but {', '.join(drawn)}), got "
        f"{len(panels)}: choose with --where {vary}"
    )


def page_size(count: int, height: float = 4.6) -> tuple[float, float]:
    """Inches of a page with so many panels, each so high."""
    rows, columns = PANEL_GRID[count]
    return {1: 10.0, 2: 14.0, 3: 17.0}[columns], 1.2 + rows * height


def axes_of_panels(part: SubFigure, panels: Sequence[Panel]) -> Iterator[tuple[Panel, Axes]]:
    """The panels with the axes to draw each into, row by row, with their titles."""
    rows, columns = PANEL_GRID[len(panels)]
    grid = np.atleast_1d(part.subplots(rows, columns, sharey=True, squeeze=False)).ravel()
    for ax in grid[len(panels) :]:
        ax.remove()
    for panel, ax in zip(panels, grid, strict=False):
        if len(panels) > 1:
            ax.set_title(panel.title, fontsize=11, loc="left", fontweight="bold")
        yield panel, ax
