"""Time per token against what it costs in quality: a panel for every model, with the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION
from trilane.output.figures.style import legend_of, page, round_ticks, tidy
from trilane.study.policy_choice import policy_in
from trilane.study.quality.summary import Quality, front

LEAST_NATS = 1e-3  # below, the axis is linear and reaches 0
_TICKS = (0.0, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_MOST_COLUMNS = 3
_COLOURS, _MARKERS = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE), "osD^vPX"


@default_settings
def plot_quality(found: Sequence[Quality]) -> Figure:
    """A point for a policy at one value of its parameter, values of one policy joined; whiskers are the intervals of
    KL. Policies that keep the routing lie at 0. Raises PictureError without any.
    """
    models = list(dict.fromkeys(quality.model for quality in found))
    if not models:
        raise PictureError("expected policies that have been measured, got none")
    rows, columns = -(-len(models) // _MOST_COLUMNS), min(len(models), _MOST_COLUMNS)
    figure, part = page(
        max(5.2 * columns, 7.5), 5.2 * rows + 0.6, "Time per token against its cost in quality",
        "KL divergence of the next token from the run with the model's own routing. Half of the experts on the GPU "
        "unless a policy uses less; grey: the front, below which nothing lies at this time.",
    )
    axes, looks = part.subplots(rows, columns, squeeze=False).ravel(), _looks(found)
    for ax, model in zip(axes, models, strict=False):
        _panel(ax, [quality for quality in found if quality.model == model], looks)
        ax.set_title(model, loc="left", fontsize=10)
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    handles = [_line(name, *look) for name, look in looks.items()]
    legend_of(part, [*handles, Line2D([], [], linestyle="", marker="|", color=INK, label="keep the routing")], 5)
    return figure


def _looks(found: Sequence[Quality]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each policy that changes something; together they differ for all."""
    names = dict.fromkeys(policy_in(quality.choice)[0] for quality in found if quality.kl.mean > 0)
    pairs = zip(cycle(_COLOURS), cycle(_MARKERS), strict=False)  # 6 and 7: 42 pairs
    return dict(zip(names, pairs, strict=False))


def _panel(ax: Axes, found: Sequence[Quality], looks: Mapping[str, tuple[str, str]]) -> None:
    best = front(found)
    ax.step([q.tpot_ms for q in best], [q.kl.mean for q in best], where="post", color=GREY, linewidth=3, zorder=1)
    for name in dict.fromkeys(policy_in(quality.choice)[0] for quality in found):
        own = sorted((q for q in found if policy_in(q.choice)[0] == name), key=lambda q: q.kl.mean)
        if own[-1].kl.mean == 0:
            ax.plot(own[-1].tpot_ms, 0, "|", color=INK, markersize=9, zorder=2)
            continue
        colour, marker = looks[name]
        times, nats = [q.tpot_ms for q in own], [q.kl.mean for q in own]
        ends = [[q.kl.mean - q.kl.low for q in own], [q.kl.high - q.kl.mean for q in own]]
        ax.errorbar(times, nats, yerr=ends, color=colour, marker=marker, linewidth=0.8, markersize=5, elinewidth=0.8)
    top = 1.3 * max(q.kl.high for q in found)
    ax.set_yscale("symlog", linthresh=LEAST_NATS, linscale=0.5)
    ax.set_xscale("log")
    round_ticks(ax.xaxis, *ax.get_xlim())
    ax.set(xlabel="ms per token, simulated", ylabel="KL, nats a token", ylim=(-LEAST_NATS / 3, top or 1.0))
    ax.set_yticks([tick for tick in _TICKS if tick <= (top or 1.0)], [f"{t:g}" for t in _TICKS if t <= (top or 1.0)])
    tidy(ax)


def _line(name: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linewidth=0.8, markersize=5, label=name)
