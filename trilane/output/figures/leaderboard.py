"""The leaderboard: a row a policy, a column a setting, and how fast each is next to the fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import PercentFormatter

from policies.protocols import PolicyKind
from trilane.output.figures.figure_files import Picture, PictureError, default_settings
from trilane.output.figures.marks import marked
from trilane.output.figures.style import INK, kinds_in_words, page
from trilane.study.leaderboard.settings import BoardSetting, all_settings, leaderboard_settings
from trilane.study.leaderboard.standings import TIE, Standing

_COLOURS = colormaps["viridis"]  # readable in grey, and with any colour vision; dark is slow
_DARK = 0.45  # of the scale, below which text is white
_ROW = 0.27  # inches


@default_settings
def plot_leaderboard(found: Sequence[Standing], own: Collection[str] = ()) -> Picture:
    """Speeds over that of the fastest policy which keeps the routing, as colours and percentages; the best policy at
    the top, the names of one's ``own`` in bold. The frame has a row a policy and setting.

    Raises PictureError without a policy that runs.
    """
    shown, settings = [one for one in found if one.relative], all_settings()
    if not shown:
        raise PictureError("expected a policy that runs in some setting, there is none")
    board, kinds = leaderboard_settings(), {PolicyKind(one.kind) for one in shown}
    about = (
        "time per token of policies that keep the routing is compared with the fastest of them; "
        f"synthetic routing, engine {board.scenario['engine']}, {board.draws} draws"
    )
    figure, part = page(14, 2.6 + _ROW * len(shown), _headline(shown), about, "; ".join(kinds_in_words(kinds)))
    ax = part.subplots()
    values = np.array([[one.relative.get(setting, np.nan) for setting in settings] for one in shown])
    norm = Normalize(0.0, 1.0)
    ax.imshow(np.ma.masked_invalid(np.minimum(values, 1.0)), cmap=_COLOURS, norm=norm, aspect="auto")
    for row, column in np.argwhere(~np.isnan(values)).tolist():
        ax.annotate(f"{100 * values[row, column]:.0f}", (column, row), ha="center", va="center", fontsize=8,
                    color="white" if values[row, column] < _DARK else "black")
    _style(ax, shown, settings)
    for name, one in zip(ax.get_yticklabels(), shown, strict=True):
        name.set_fontweight("bold" if one.policy in own else "normal")
    bar = part.colorbar(ScalarMappable(norm, _COLOURS), ax=ax, pad=0.01, aspect=40, format=PercentFormatter(1.0))
    bar.set_label("speed over that of the fastest policy that keeps the routing")
    return Picture(figure, pd.DataFrame(
        {**entry._asdict(), "relative": one.relative.get(setting), "score": one.score}
        for one in shown for setting, entry in one.entries.items()
    ))


def _headline(shown: Sequence[Standing]) -> str:
    """The policies that are best most often, of those that keep the routing."""
    best = Counter({one.policy: one.best_in for one in shown if one.kind == PolicyKind.KEEPS and one.best_in})
    if not best:
        return "No policy that keeps the routing runs in any setting"
    named = [f"{policy} in {count}" for policy, count in best.most_common(3)]
    return f"Fastest, or within {TIE:.0%} of it, of {len(all_settings())} settings: {', '.join(named)}"


def _style(ax: Axes, shown: Sequence[Standing], settings: Sequence[BoardSetting]) -> None:
    machines = leaderboard_settings().machines
    ax.set_yticks(range(len(shown)), [marked(one.policy, PolicyKind(one.kind)) for one in shown], fontsize=9)
    ax.set_xticks(range(len(settings)), [f"{one.family}\nbatch {one.batch}" for one in settings], fontsize=8.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    each = len(settings) // len(machines)
    for place, machine in enumerate(machines.values()):
        ax.annotate(machine.about, (place * each + (each - 1) / 2, 1), xycoords=("data", "axes fraction"),
                    xytext=(0, 6), textcoords="offset points", ha="center", fontweight="bold", color=INK)
        if place:
            ax.axvline(place * each - 0.5, color="white", linewidth=4)
