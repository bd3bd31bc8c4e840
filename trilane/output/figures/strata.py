"""Predicted against measured windows of Strata's requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from trilane.engines.strata.predicted import QUANTITIES
from trilane.engines.strata.predictions import Predictions, group_of, grouped
from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from trilane.output.figures.scatter import BAND, Dot, band_handles, draw_dots, line_handle, point_handle
from trilane.output.figures.style import legend_of, page

_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
_BANDS = {0.1: BAND}


@default_settings
def plot_requests(found: Predictions) -> Figure:
    """Windows with the hits of the log, a point a request, with a cross where the null model is."""
    pairs = found.pairs(QUANTITIES[0])
    if not pairs:
        raise PictureError("expected requests that state windows and hits, got none")
    looks = {name: _look(number) for number, name in enumerate(grouped(one for one, _, _ in pairs))}
    dots = [
        Dot(measured, predicted, looks[group_of(one)], found.null_ms[one.request.id])
        for one, predicted, measured in pairs
    ]
    errors = np.abs([predicted / measured - 1 for _, predicted, measured in pairs])
    most = np.quantile(errors, 0.9)
    about = f"{len(pairs)} requests; the median error is {np.median(errors):.1%}, nine of ten are below {most:.0%}"
    figure, part = page(8.0, 7.4, "Windows of Strata, with the hits of its logs", about)
    ax = part.subplots()
    draw_dots(ax, dots, _BANDS, 1.1, linear_up_to=10.0)
    ax.set(aspect="equal", xlabel="measured: ms a window", ylabel="predicted: ms a window")
    handles = [point_handle(name, **look) for name, look in looks.items()]
    null = point_handle("null model, fitted to each", marker="x", color="#9A9A9A")
    legend_of(part, [*handles, null, line_handle(), *band_handles(_BANDS)], 2)
    return figure


def _look(number: int) -> dict[str, Any]:
    return {"marker": "osvDP"[number % 5], "color": _COLOURS[number % len(_COLOURS)], "markersize": 5, "alpha": 0.8}
