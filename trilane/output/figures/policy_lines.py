"""A line a policy: the best in colour and named at their ends, clairvoyant runs dashed, all others thin and grey."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from policies.protocols import PolicyKind
from trilane.output.figures.line_labels import LineEnd
from trilane.output.figures.marks import marked
from trilane.output.figures.policy_style import ALSO_RAN, Look, look_of

MOST = 8  # policies in colour: the best
_MARKERS = 12  # on a line; more would hide it


def policy_lines(
    ax: Axes, rows: pd.DataFrame, across: str, up: str, coloured: Collection[str], words: Callable[[pd.Series], str],
    places: Sequence[float] = (),
) -> list[LineEnd]:
    """Draw column ``up`` against column ``across``; returns the ends of coloured lines, with ``words`` of the last row.

    A line is broken at those of ``places`` at which its policy has no row. Columns ``UP_min`` and ``UP_max``, if there
    are any, make a band.
    """
    ends = []
    for key, mine in rows.groupby(["policy", "kind"], sort=False):
        policy, kind = str(key[0]), PolicyKind(str(key[1]))
        clairvoyant = kind == PolicyKind.CLAIRVOYANT
        look = look_of(policy, kind) if clairvoyant or policy in coloured else ALSO_RAN
        points = mine.set_index(across).sort_index()
        _line(ax, points, up, look, places)
        if look is not ALSO_RAN:
            last = points.iloc[-1]
            text = f"{marked(policy, kind)}  {words(last)}"
            ends.append(LineEnd(float(points.index[-1]), float(last[up]), text, look.colour, bold=not clairvoyant))
    return ends


def _line(ax: Axes, points: pd.DataFrame, up: str, look: Look, places: Sequence[float]) -> None:
    thick, alone = look is not ALSO_RAN, len(points) == 1
    marker, size = (look.marker, 5) if look.marker or not alone else ("_", 14)
    style: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "marker": marker, "markersize": size}
    inside = [place for place in places if points.index[0] < place < points.index[-1]]
    points = points.reindex(points.index.union(inside))
    ax.plot(points.index, points[up], markevery=1 + len(points) // _MARKERS, linewidth=2 if thick else 0.8,
            zorder=3 if thick else 2, **style)
    if thick and f"{up}_min" in points:
        _band(ax, points[f"{up}_min"], points[f"{up}_max"], look.colour, alone=alone)


def _band(ax: Axes, low: pd.Series, high: pd.Series, colour: str, *, alone: bool) -> None:
    """From the lowest to the highest; a stroke for a single point."""
    if (low.dropna() == high.dropna()).all():
        return
    if alone:
        ax.vlines(low.index, low, high, color=colour, linewidth=1.5)
    else:
        ax.fill_between(low.index, low, high, color=colour, alpha=0.12, linewidth=0)
