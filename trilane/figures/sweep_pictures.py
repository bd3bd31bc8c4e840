"""Every picture that the results of a sweep can carry, over axes found from what varies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from trilane.common.names import unknown
from trilane.figures.axis_words import numeric
from trilane.figures.figure_files import Picture, PictureError
from trilane.figures.heat_map import heat_map
from trilane.figures.hit_lines import hit_lines
from trilane.figures.speedup_bars import speedup_bars
from trilane.figures.sweep_means import SweepMeans
from trilane.figures.tpot_lines import tpot_lines

_X_FIRST = "cached_share"  # what most is asked about


class Asked(NamedTuple):
    """What the asker says of the pictures; None: found from the results."""

    x: str | None = None
    y: str | None = None
    baseline: str | None = None


def pictures_of(means: SweepMeans, kinds: Collection[str], asked: Asked) -> tuple[dict[str, Picture], dict[str, str]]:
    """Pictures by kind (a key of KINDS), and why the others cannot be drawn. Raises PictureError for what nobody can
    draw: a name that the results do not hold.
    """
    _check(means, asked)
    drawn: dict[str, Picture] = {}
    reasons: dict[str, str] = {}
    for kind in kinds:
        try:
            drawn[kind] = KINDS[kind](means, asked)
        except PictureError as error:
            reasons[kind] = str(error)
    return drawn, reasons


def _check(means: SweepMeans, asked: Asked) -> None:
    """Refuse axes that do not vary, one axis twice, and a baseline that is not there. Raises PictureError."""
    for option, name in (("--x", asked.x), ("--y", asked.y)):
        if name is not None and name not in means.axes:
            what = "axis, beside the policy, that varies"
            raise PictureError(f"{option}: {unknown(what, name, means.axes or ['none'])}")
    if asked.x is not None and asked.x == asked.y:
        raise PictureError(f"--x {asked.x} --y {asked.y}: expected two axes, got one twice")
    if asked.baseline is not None and asked.baseline not in (there := means.rows["policy"].unique().tolist()):
        raise PictureError(f"--baseline: {unknown('policy in these results', asked.baseline, there)}")


def _tpot(means: SweepMeans, asked: Asked) -> Picture:
    x, *_ = axes_for(means, asked, 1)
    return tpot_lines(means, x)


def _heat(means: SweepMeans, asked: Asked) -> Picture:
    x, y, *_ = axes_for(means, asked, 2)
    return heat_map(means, x, y)


KINDS: Mapping[str, Callable[[SweepMeans, Asked], Picture]] = {
    "tpot": _tpot,
    "speedup": lambda means, asked: speedup_bars(means, asked.baseline),
    "heat": _heat,
    "hits": lambda means, asked: hit_lines(means),
}


def axes_for(means: SweepMeans, asked: Asked, count: int) -> list[str]:
    """The axes that were asked for, then the cached share, numbers with most values, and names. Raises PictureError."""
    others = [name for name in means.axes if name not in (asked.x, asked.y)]
    others.sort(key=lambda name: (name != _X_FIRST, not numeric(means.axes[name]), -len(means.axes[name])))
    if asked.x is None and asked.y is not None:
        others.insert(1, asked.y)
    found = [name for name in (asked.x, asked.y if asked.x else None, *others) if name is not None]
    if len(found) < count:
        wanted = "an axis that varies" if count == 1 else f"{count} axes that vary"
        raise PictureError(f"expected {wanted} beside the policy, what varies is {', '.join(means.axes) or 'nothing'}")
    return found
