"""The page of a picture with its headline, axes without clutter, and axes for the values of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise
from textwrap import fill
from typing import Any

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
from trilane.output.figures.marks import GRID, INK, meanings
from trilane.output.figures.words import is_share, numeric, value_text
from trilane.study.sweep.axes import axis_label

_LARGEST, _SMALLEST = 14.0, 11.5  # points of a headline
_LETTER = 0.6  # width of a bold letter over its size, with some to spare
_POINTS = 72  # an inch
_LOG_FROM = 4.0  # highest over lowest value, from which on values that grow by ratios are drawn so
_TICKS = 10  # up to this number every value has a tick
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
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, as plain numbers or as values of an axis."""
    every = [digit * 10.0**power for power in range(-6, 16) for digit in (1, 2, 5)]
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
