"""Time per token against what it costs in quality: a panel for every model, with the front."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import GREY, INK, look_of
from trilane.output.figures.style import legend_of, page, tidy
from trilane.study.policy_choice import policy_in
from trilane.study.quality.summary import Quality, front

LEAST_NATS = 1e-3  # below, the axis is linear and reaches 0
_MOST_COLUMNS = 3


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
    axes = part.subplots(rows, columns, squeeze=False).ravel()
    for ax, model in zip(axes, models, strict=False):
        _panel(ax, [quality for quality in found if quality.model == model])
        ax.set_title(model, loc="left", fontsize=10)
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    names = dict.fromkeys(policy_in(quality.choice)[0] for quality in found if quality.kl.mean > 0)
    handles = [_line(name) for name in names]
    legend_of(part, [*handles, Line2D([], [], linestyle="", marker="|", color=INK, label="keep the routing")], 5)
    return figure


def _panel(ax: Axes, found: Sequence[Quality]) -> None:
    best = front(found)
    ax.step([q.tpot_ms for q in best], [q.kl.mean for q in best], where="post", color=GREY, linewidth=3, zorder=1)
    for name in dict.fromkeys(policy_in(quality.choice)[0] for quality in found):
        own = sorted((q for q in found if policy_in(q.choice)[0] == name), key=lambda q: q.kl.mean)
        if own[-1].kl.mean == 0:
            ax.plot(own[-1].tpot_ms, 0, "|", color=INK, markersize=9, zorder=2)
            continue
        look = look_of(name)
        times, nats = [q.tpot_ms for q in own], [q.kl.mean for q in own]
        ends = [[q.kl.mean - q.kl.low for q in own], [q.kl.high - q.kl.mean for q in own]]
        ax.errorbar(times, nats, yerr=ends, color=look.colour, marker=look.marker, linestyle=look.line, linewidth=0.9,
                    markersize=5, elinewidth=0.8)
    ax.set_yscale("symlog", linthresh=LEAST_NATS, linscale=0.5)
    ax.set(xlabel="ms per token, simulated", ylabel="KL, nats a token", ylim=(-LEAST_NATS / 3, None))
    tidy(ax)


def _line(name: str) -> Line2D:
    look = look_of(name)
    line = Line2D([], [], color=look.colour, marker=look.marker, linewidth=0.9, markersize=5, label=name)
    line.set_linestyle(look.line)  # type: ignore[arg-type]  # a pattern of dashes
    return line
