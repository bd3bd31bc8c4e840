"""Every picture that the results of a sweep allow, over the axes that vary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from trilane.common.names import unknown
from trilane.output.figures.figure_files import Picture, PictureError
from trilane.output.figures.lines import plot_hit_lines, plot_tpot_lines
from trilane.output.figures.maps import plot_heat_map
from trilane.output.figures.speedup_bars import plot_speedup_bars
from trilane.output.figures.sweep_means import SweepMeans
from trilane.output.figures.words import numeric

_X_FIRST = "cached_share"  # the axis of most questions


class FigureOptions(NamedTuple):
    """Axes and baseline of the pictures; None: chosen from the results."""

    x: str | None = None
    y: str | None = None
    baseline: str | None = None


def pictures_of(
    means: SweepMeans, kinds: Collection[str], options: FigureOptions
) -> tuple[dict[str, Picture], dict[str, str]]:
    """Pictures by kind (a key of KINDS), and why the others cannot be drawn.

    Raises PictureError for options with a name that the results do not hold.
    """
    _check(means, kinds, options)
    drawn: dict[str, Picture] = {}
    reasons: dict[str, str] = {}
    for kind in kinds:
        try:
            drawn[kind] = KINDS[kind](means, options)
        except PictureError as error:
            reasons[kind] = str(error)
    return drawn, reasons


def _check(means: SweepMeans, kinds: Collection[str], options: FigureOptions) -> None:
    """Refuse unknown kinds, axes that do not vary, one axis twice, and a baseline that is not known."""
    for kind in kinds:
        if kind not in KINDS:
            raise PictureError(f"--kind: {unknown('picture', kind, KINDS)}")
    for option, name in (("--x", options.x), ("--y", options.y)):
        if name is not None and name not in means.axes:
            what = "varying axis (other than policy)"
            raise PictureError(f"{option}: {unknown(what, name, means.axes or ['none'])}")
    if options.x is not None and options.x == options.y:
        raise PictureError(f"--x {options.x} --y {options.y}: expected two axes, got one twice")
    if options.baseline is not None and options.baseline not in (known := means.rows["policy"].unique().tolist()):
        raise PictureError(f"--baseline: {unknown('policy in these results', options.baseline, known)}")


KINDS: Mapping[str, Callable[[SweepMeans, FigureOptions], Picture]] = {
    "tpot": lambda means, options: plot_tpot_lines(means, *axes_for(means, options, 1)),
    "speedup": lambda means, options: plot_speedup_bars(means, options.baseline),
    "heat": lambda means, options: plot_heat_map(means, *axes_for(means, options, 2)),
    "hits": lambda means, options: plot_hit_lines(means),
}


def axes_for(means: SweepMeans, options: FigureOptions, count: int) -> list[str]:
    """The first of: axes of the options, the cached share, numbers with most values, and names. Raises PictureError."""
    others = [name for name in means.axes if name not in (options.x, options.y)]
    others.sort(key=lambda name: (name != _X_FIRST, not numeric(means.axes[name]), -len(means.axes[name])))
    if options.x is None and options.y is not None:
        others.insert(1, options.y)
    chosen = [name for name in (options.x, options.y if options.x else None, *others) if name is not None]
    if len(chosen) < count:
        wanted = "an axis that varies" if count == 1 else f"{count} axes that vary"
        raise PictureError(f"expected {wanted} other than the policy; these vary: {', '.join(means.axes) or 'none'}")
    return chosen[:count]
