"""Values of axes in words, and axes of pictures that show them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter, StrMethodFormatter

from trilane.figures.null_words import null_text, null_words
from trilane.study.sweep.axes import axis_label

_LOG_FROM = 4.0  # largest over smallest value, from where even ratios are drawn as such
_TICKS = 10  # as many values are all written
_LARGER: Mapping[str, tuple[tuple[float, str], ...]] = {  # units that are read more easily, from where they are used
    "bytes": ((1e9, "GB"),),
    "bytes/s": ((1e9, "GB/s"),),
    "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")),
}
_PLAIN = 1e9  # whole numbers below it are written with all their digits
_CROWDED = 0.05  # of an axis: ticks that are nearer to each other than that are not all written


def is_share(name: str) -> bool:
    """Whether the values of an axis are fractions that readers know as percentages."""
    return name.endswith("share")


def value_text(name: str, value: Any) -> str:
    """A value of an axis, without its unit unless that is a larger one than the axis': "16", "30%", "8 GB"."""
    number, unit = _scaled(name, value)
    return f"{number} {unit}" if unit else number


def value_words(name: str, value: Any) -> str:
    """A value of an axis with what it is: "30% cached", "16 GB/s", "batch 4", "rtx3090-ddr4"."""
    text = value_text(name, value)
    if is_null(name, value):
        return null_words(name)
    if name == "cached_share":
        return f"{text} cached"
    words, unit = _parts(axis_label(name))
    if isinstance(value, str):
        return text if name in ("hardware", "model", "trace", "parameters") else f"{words.split()[0]} {text}"
    if _scaled(name, value)[1]:
        return text
    return f"{text} {unit}" if unit and name != "batch" else f"{words} {text}"


def is_null(name: str, value: Any) -> bool:
    """Whether a value is none, or the words for it."""
    return value is None or value != value or value == null_text(name)


def _scaled(name: str, value: Any) -> tuple[str, str]:
    """A value, and its unit if that is a larger one than the axis'."""
    if is_null(name, value):
        return null_text(name), ""
    if isinstance(value, str) and value.startswith("{"):
        return json_words(value), ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value), ""
    if is_share(name):
        return f"{100 * value:.3g}%", ""
    for size, unit in _LARGER.get(_parts(axis_label(name))[1], ()):
        if value >= size:
            return f"{value / size:,g}", unit
    return f"{value:,.0f}" if value == round(value) and abs(value) < _PLAIN else f"{value:,g}", ""


def json_words(text: str) -> str:
    """A mapping in JSON as "window=8, early=false"."""
    values: Mapping[str, Any] = json.loads(text)
    return ", ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())


def setting_words(name: str, value: Any) -> str:
    """A value of an axis as the title of what is shown for it alone: "PCIe bandwidth 16 GB/s"; else as value_words."""
    words, unit = _parts(axis_label(name))
    named = unit and name != "batch" and not isinstance(value, str)
    return f"{words} {value_words(name, value)}" if named and not is_null(name, value) else value_words(name, value)


def _parts(label: str) -> tuple[str, str]:
    """The name of an axis and its unit."""
    found = re.fullmatch(r"(.*?)(?: \((.*)\))?", label)
    assert found is not None
    return found[1], found[2] or ""


def numeric(values: Sequence[Any]) -> bool:
    """Whether values have distances, or only an order."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def places(values: Sequence[Any]) -> dict[Any, float]:
    """Where each value stands on an axis: numbers where they are, text side by side."""
    return {value: float(value if numeric(values) else place) for place, value in enumerate(values)}


def style_values(ax: Axes, name: str, values: Sequence[Any]) -> None:
    """A horizontal axis for these values: logarithmic if they grow by ratios, ticks at the values themselves."""
    ax.set_xlabel(axis_label(name))
    if not numeric(values):
        ax.set_xticks(range(len(values)), [_wrapped(value_text(name, value)) for value in values])
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
    """Whether numbers grow by ratios rather than by steps: the middle one lies nearer to the geometric middle."""
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


def _written(values: Sequence[Any]) -> list[Any]:
    """The values that there is room to write: all, or every second, ..."""
    scale = [float(value) for value in values]
    room = (scale[-1] - scale[0]) * _CROWDED
    if by_ratio(values) or all(high - low >= room for low, high in pairwise(scale)):
        return list(values)
    return [value for place, value in enumerate(values) if not place or value - values[place - 1] >= room]


def _wrapped(text: str) -> str:
    """A machine made of parts on several lines."""
    return text.replace("+", "\n+")
