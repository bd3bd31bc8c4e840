"""The leaderboard as a picture: the twelve policies with the best scores by name, all others as grey points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from policies.protocols import PolicyKind
from trilane.output.figures.figure_files import Picture, PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, INK, ORANGE, VERMILLION, marked
from trilane.output.figures.style import legend_of, page, tidy
from trilane.study.leaderboard.standings import TIE, Standing, all_settings, leaderboard_settings

NAMED = 12
_MACHINES = (BLUE, ORANGE, GREEN, VERMILLION)  # colours
_OTHERS = {
    PolicyKind.KEEPS: "others", PolicyKind.CHANGES: "change the routing", PolicyKind.CLAIRVOYANT: "know the future",
}
_ROW = 0.34  # inches


@default_settings
def plot_leaderboard(standings: Sequence[Standing], own: Collection[str] = ()) -> Picture:
    """Speeds over that of the fastest policy which keeps the routing. Twelve of those that keep it have a row each, and
    one's ``own``, whose names are bold: a bar for the score, a point a setting. All others are grey points, by their
    score. The frame has a row a policy and setting.

    Raises PictureError without a policy that runs.
    """
    shown = [one for one in standings if one.relative]
    if not shown:
        raise PictureError("expected a policy that runs in some setting, there is none")
    keeping = [one for one in shown if one.kind == PolicyKind.KEEPS]
    named = [one for one in shown if one in keeping[:NAMED] or one.policy in own]
    others = {
        about: [one for one in shown if one.kind == kind and one not in named] for kind, about in _OTHERS.items()
    }
    board, groups = leaderboard_settings(), {about: those for about, those in others.items() if those}
    about = (
        f"speed over that of the fastest policy that keeps the routing, in each of {len(all_settings())} settings; "
        f"synthetic routing, engine {board.scenario['engine']}, {board.draws} draws"
    )
    figure, part = page(9, 2.2 + _ROW * (len(named) + len(groups)), _best_of(shown), about)
    ax = part.subplots()
    for row, one in enumerate(named):
        _draw_policy(ax, row, one)
    for row, those in enumerate(groups.values(), len(named)):
        ax.plot([one.score or 0.0 for one in those], [row] * len(those), "o", color=INK, alpha=0.35, markersize=5)
    names = [marked(one.policy, PolicyKind(one.kind)) for one in named]
    _style(ax, [*names, *(f"{len(those)} {about}" for about, those in groups.items())])
    for name, one in zip(ax.get_yticklabels(), named, strict=False):
        name.set_fontweight("bold" if one.policy in own else "normal")
    legend_of(part, _handles(), 3)
    return Picture(figure, pd.DataFrame(
        {**entry._asdict(), "relative": one.relative.get(setting), "score": one.score}
        for one in shown for setting, entry in one.entries.items()
    ))


def _draw_policy(ax: Axes, row: int, one: Standing) -> None:
    """A bar as long as the score, which is written at its foot, and a point for each setting."""
    score = one.score or 0.0
    ax.barh(row, score, height=0.62, color="#DCE6EE")
    ax.annotate(f"{score:.0%}", (0.01, row), va="center", fontsize=9, fontweight="bold")
    for colour, machine in zip(_MACHINES, leaderboard_settings().machines, strict=True):
        speeds = [speed for setting, speed in one.relative.items() if setting.machine == machine]
        ax.plot(speeds, [row] * len(speeds), "o", color=colour, markersize=4.5, alpha=0.85)


def _style(ax: Axes, names: Sequence[str]) -> None:
    ax.axvline(1.0, color="black", linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, None))
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.tick_params(axis="y", length=0)
    tidy(ax, "x")


def _handles() -> list[Line2D]:
    machines = leaderboard_settings().machines.values()
    points = [
        Line2D([], [], linestyle="", marker="o", markersize=5, color=colour, label=machine.about)
        for colour, machine in zip(_MACHINES, machines, strict=True)
    ]
    return [
        *points, Line2D([], [], linewidth=7, color="#DCE6EE", label="score: geometric mean"),
        Line2D([], [], linestyle="", marker="o", markersize=5, color=INK, alpha=0.35, label="score of another policy"),
    ]


def _best_of(shown: Sequence[Standing]) -> str:
    """The policies that are best most often, of those that keep the routing."""
    best = Counter({one.policy: one.best_in for one in shown if one.kind == PolicyKind.KEEPS and one.best_in})
    if not best:
        return "No policy that keeps the routing runs in any setting"
    (first, most), *others = best.most_common(3)
    named = [f"{first} in {most} of {len(all_settings())} settings", *(f"{name} in {count}" for name, count in others)]
    return f"Fastest, or within {TIE:.0%} of it: {', '.join(named)}"
