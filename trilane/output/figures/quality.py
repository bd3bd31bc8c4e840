"""Time per token against what it costs in quality: a panel for every model, with the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trilane.output.figures.figure_files import PictureError, default_settings
from trilane.output.figures.marks import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION
from trilane.output.figures.style import legend_of, page, tidy
from trilane.study.policy_choice import policy_in
from trilane.study.quality.published import PublishedQuality
from trilane.study.quality.summary import Quality, front

LEAST_NATS = 1e-3  # below, the axis is linear and reaches 0
_TICKS = (0.0, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_TIMES = (1, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100, 200)
_MOST_COLUMNS = 2
_COLOURS, _MARKERS = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE), "osD^vPX"


@default_settings
def plot_quality(found: Sequence[Quality], published: Sequence[PublishedQuality] = ()) -> Figure:
    """A point for a policy at one value of its parameter, values of one policy joined; whiskers are the intervals of
    KL. Policies that keep the routing lie at 0. ``published``: of large models, in one more panel, where fewer bits and
    changed routing lie on one plane. Raises PictureError without any.
    """
    models = list(dict.fromkeys(quality.model for quality in found))
    if not models:
        raise PictureError("expected policies that have been measured, got none")
    bargains = [value for value in published if value.tok_s and value.baseline_tok_s and value.nats]
    panels = len(models) + bool(bargains)
    columns = min(panels, _MOST_COLUMNS)
    rows = -(-panels // columns)
    figure, part = page(
        max(5.2 * columns, 7.5), 5.2 * rows + 0.6, "Time per token against its cost in quality",
        "KL divergence of the next token from the run with the model's own routing. Half of the experts on the GPU "
        "unless a policy uses less; grey: the front, below which nothing lies at this time.",
    )
    axes, looks = part.subplots(rows, columns, squeeze=False).ravel(), _looks(found)
    for ax, model in zip(axes, models, strict=False):
        _panel(ax, [quality for quality in found if quality.model == model], looks)
        ax.set_title(model, loc="left", fontsize=10)
    if bargains:
        _bargains(axes[len(models)], bargains)
    for ax in axes[panels:]:
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
    _ticks(ax, "x", _TIMES)
    ax.set(xlabel="ms per token, simulated", ylabel="KL, nats a token", ylim=(-LEAST_NATS / 3, top or 1.0))
    _ticks(ax, "y", _TICKS)
    tidy(ax)


def _bargains(ax: Axes, values: Sequence[PublishedQuality]) -> None:
    """Time per token over that without the method, against its cost; fewer bits are dots, changed routing is named."""
    bits = [value for value in values if value.method == "fewer bits"]
    ax.plot(*_places(bits), "o", color=SKY, markersize=4, label="fewer bits (against q8_0)")
    for value in (value for value in values if value.method != "fewer bits"):
        [[time], [nats]] = _places([value])
        ax.plot(time, nats, "X", color=VERMILLION, markersize=7)
        ax.annotate(f"{value.method},\n{value.model}", (time, nats), (0, 6), textcoords="offset points", fontsize=6.5,
                    color=INK, ha="left" if time < 0.7 else "center")
    ax.set_yscale("log")
    ax.margins(y=0.15)  # for the names above points
    _ticks(ax, "y", (0.003, 0.01, 0.03, 0.1, 0.3))
    ax.set(xlabel="time per token / without it, measured by the source", ylabel="KL, nats a token", xlim=(0.55, 1.05))
    ax.set_title("published, large models", loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="lower left")
    tidy(ax)


def _places(values: Sequence[PublishedQuality]) -> tuple[list[float], list[float]]:
    times = [(value.baseline_tok_s or 0.0) / (value.tok_s or 1.0) for value in values]
    return times, [value.nats or 0.0 for value in values]


def _ticks(ax: Axes, which: str, places: Sequence[float]) -> None:
    """Ticks at those of ``places`` that lie on an axis, "x" or "y", as plain numbers."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    low, high = axis.get_view_interval()
    shown = [place for place in places if low <= place <= high]
    axis.set_ticks(shown, [f"{place:g}" for place in shown])
    axis.set_ticks([], minor=True)


def _line(name: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linewidth=0.8, markersize=5, label=name)
