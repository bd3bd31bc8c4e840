"""Speed-up over a baseline: a bar a policy, beside what the lower bound would allow."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from trilane.common.names import unknown
from trilane.figures.figure_files import Picture, PictureError
from trilane.figures.panels import MOST, Panel, axes_of_panels, page_size, settings_of
from trilane.figures.policy_style import look_of
from trilane.figures.style import IMPOSSIBLE, marks_in_words, page, style_bar_axis
from trilane.figures.sweep_means import BOUND, SweepMeans

BASELINES = ("llama.cpp", "on-demand", "layer-wise")  # without a word from the asker, the first of them that is there
_BARS = 20  # the fastest
_WHISKER = "#222222"
_ROOM = 1.15  # for labels, beyond the longest bar


def speedup_bars(means: SweepMeans, baseline: str | None = None) -> Picture:
    """TPOT of ``baseline`` over that of each policy, a panel for each setting; whiskers: lowest to highest draw.

    Of more than six settings there is one panel, of geometric means; whiskers: lowest to highest setting. Raises
    PictureError without the baseline or without anyone else.
    """
    name = _baseline(means, baseline)
    speedups, there = _speedups(means, name), settings_of(means)
    panels = [panel for panel in there if not panel.of(speedups).empty]
    without = len(there) - len(panels)
    settings, over = len(panels), len(panels) if len(panels) > MOST else 0
    speedups, panels = (_over_settings(speedups), [Panel({}, "")]) if over else (_counted(speedups), panels)
    ranked = speedups[speedups["settings"] == settings]  # means over other settings could not be compared with these
    if over and set(ranked["policy"]) <= {name, BOUND}:
        raise PictureError(f"expected a policy beside {name} that ran in all {settings} settings: choose with --where")
    drawn = ranked if over else speedups
    order = _order(drawn, ranked)
    shown = [policy for place, policy in enumerate(order) if place < _BARS or policy == name]
    slower = [policy for policy in order if policy not in shown]
    width, height = page_size(len(panels), 0.9 + 0.34 * len(shown))
    below = [*_below(means, slower, over), _some(speedups, settings, over), _without(without, name), *means.notes]
    headline = _headline(drawn, ranked, name, over)
    figure, part = page(width, height, headline, means.about, "\n".join(filter(None, below)))
    bound = drawn.loc[drawn["policy"] == BOUND, "speedup"].max()
    room = _ROOM * max(drawn.loc[drawn["policy"].isin(shown), ["speedup", "highest"]].max().max(), bound)
    marks = dict(zip(drawn["policy"], drawn["mark"], strict=True))
    for panel, ax in axes_of_panels(part, panels):
        _draw(ax, panel.of(drawn), shown, room)
        ax.set_xlabel(f"speed-up over {name} (TPOT of {name} / TPOT)")
        ax.set_yticks(range(len(shown)), [policy + marks[policy] for policy in shown], fontsize=10.5)
        ax.set_ylim(len(shown) - 0.4, -0.6)
    return Picture(figure, speedups.drop(columns="mark" if over else ["mark", "settings"]))


def _baseline(means: SweepMeans, asked: str | None) -> str:
    there = list(dict.fromkeys(means.rows["policy"]))
    if asked is not None and asked not in there:
        raise PictureError(unknown("policy in these results", asked, there))
    name = asked or next((name for name in BASELINES if name in there), str(means.real["policy"].iloc[0]))
    if set(there) == {name}:
        raise PictureError(f"expected policies beside the baseline {name}, these results hold no other")
    return name


def _speedups(means: SweepMeans, baseline: str) -> pd.DataFrame:
    """A row a policy and setting: speed-up by mean TPOT, lowest and highest of the draws; then those of the bound."""
    axes = list(means.axes)
    runs = _beside(means.runs, means.runs[means.runs["policy"] == baseline], [*axes, "draw"])
    runs = runs.assign(ratio=runs["tpot_ms_base"] / runs["tpot_ms"])
    groups = runs.groupby([*axes, "policy", "mark"], sort=False)
    found = groups["ratio"].agg(lowest="min", highest="max")
    found = found.assign(speedup=groups["tpot_ms_base"].mean() / groups["tpot_ms"].mean()).reset_index()
    bounds = _beside(means.bounds, means.rows[means.rows["policy"] == baseline], axes)
    bounds = bounds.assign(policy=BOUND, mark="", speedup=bounds["tpot_ms_base"] / bounds["tpot_ms"])
    columns = ["policy", "mark", *axes, "speedup", "lowest", "highest"]
    both: pd.DataFrame = pd.concat([found, bounds[[*axes, "policy", "mark", "speedup"]]], ignore_index=True)
    return both.reindex(columns=columns)


def _beside(rows: pd.DataFrame, base: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Rows with the baseline's TPOT in their setting; those of settings in which it did not run are left out."""
    times = base[[*by, "tpot_ms"]].rename(columns={"tpot_ms": "tpot_ms_base"})
    return pd.merge(rows, times, on=list(by)) if by else pd.merge(rows, times, how="cross")


def _over_settings(speedups: pd.DataFrame) -> pd.DataFrame:
    """Geometric means, the lowest and highest setting, and how many they are."""
    groups = speedups.groupby(["policy", "mark"], sort=False)["speedup"]
    return groups.agg(speedup=_geometric, lowest="min", highest="max", settings="size").reset_index()


def _counted(speedups: pd.DataFrame) -> pd.DataFrame:
    """With the number of settings in which each policy ran."""
    return speedups.assign(settings=speedups.groupby("policy")["speedup"].transform("size"))


def _geometric(ratios: pd.Series) -> float:
    return float(np.exp(np.log(ratios).mean()))


def _order(speedups: pd.DataFrame, ranked: pd.DataFrame) -> list[str]:
    """Clairvoyant runs first, then policies from the fastest on, then those that did not run in all settings."""
    rows = speedups[speedups["policy"] != BOUND]
    means = rows.groupby(["mark", "policy"])["speedup"].agg(_geometric).reset_index()
    means = means.assign(real=means["mark"] != " *", some=~means["policy"].isin(ranked["policy"]))
    means = means.sort_values(["real", "some", "speedup"], ascending=[True, True, False], kind="stable")
    return means["policy"].tolist()


def _headline(speedups: pd.DataFrame, ranked: pd.DataFrame, baseline: str, over: int) -> str:
    """How much faster the best is: on geometric average over the settings, of the policies that ran in all of them."""
    real, others = _real(ranked, baseline), _real(speedups, baseline)
    if real.empty and len(others):
        return f"beside {baseline} no policy ran in all settings"
    if real.empty:
        return f"what could be gained over {baseline}"
    best = real.groupby("policy")["speedup"].agg(_geometric).idxmax()
    mine = real[real["policy"] == best]
    low, high, mean = mine["speedup"].min(), mine["speedup"].max(), _geometric(mine["speedup"])
    name = f"{best}{mine['mark'].iloc[0]}"
    if over:
        span = f"{mine['lowest'].iloc[0]:.2f} to {mine['highest'].iloc[0]:.2f}x over {over} settings"
        return f"{name} is {mean:.2f}x as fast as {baseline} on average, {span}"
    allowed = speedups.loc[speedups["policy"] == BOUND, "speedup"]
    bound = f"; the lower bound allows {_span(allowed.min(), allowed.max())}" if len(allowed) else ""
    if mean <= 1:
        return f"none is faster than {baseline}: {name} comes nearest, {_span(low, high)} as fast{bound}"
    return f"{name} is {_span(low, high)} as fast as {baseline}{bound}"


def _real(speedups: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Without baseline, bound and clairvoyant runs."""
    return speedups[~speedups["policy"].isin([BOUND, baseline]) & (speedups["mark"] != " *")]


def _span(low: float, high: float) -> str:
    """One ratio, or two with "to" between them."""
    texts = dict.fromkeys(f"{ratio:.2f}x" for ratio in (low, high))
    return " to ".join(texts)


def _below(means: SweepMeans, slower: Sequence[str], over: int) -> list[str]:
    """Marks and lines, and the slower ones."""
    whiskers = f"bars: geometric means over {over} settings; whiskers: lowest to highest setting" if over else ""
    if not over and (means.rows["draws"] > 1).any():
        whiskers = "whiskers: lowest to highest draw"
    lines = "black line: what the lower bound would allow, on average" if over else "grey: beyond the lower bound"
    told = "; ".join(filter(None, [*marks_in_words(means.rows["mark"]), lines, whiskers]))
    return [told, f"not drawn, slower: {', '.join(slower)}" if slower else ""]


def _some(speedups: pd.DataFrame, settings: int, over: int) -> str:
    """Who did not run in all settings, and in how many."""
    some = speedups[(speedups["settings"] < settings) & (speedups["policy"] != BOUND)].drop_duplicates("policy")
    named = ", ".join(f"{row['policy']} ({row['settings']})" for row in some.to_dict("records"))
    return f"not {'drawn' if over else 'ranked'}, did not run in all {settings} settings: {named}" if named else ""


def _without(settings: int, baseline: str) -> str:
    plural = "s" * (settings != 1)
    return f"left out: {settings} setting{plural} in which {baseline} did not run" if settings else ""


def _draw(ax: Axes, rows: pd.DataFrame, order: Sequence[str], room: float) -> None:
    """The bars of one panel; the dashed line is the baseline, the black one the bound."""
    style_bar_axis(ax)
    bars = rows[rows["policy"].isin(order)]
    bound = rows.loc[rows["policy"] == BOUND, "speedup"]
    for bar in bars.to_dict("records"):
        _bar(ax, order.index(bar["policy"]), bar)
    ax.axvline(1, color=_WHISKER, linewidth=1, linestyle=":", zorder=4)
    for limit in bound:
        ax.axvline(limit, color="black", linewidth=2, zorder=4)
        ax.axvspan(limit, room, color=IMPOSSIBLE, linewidth=0, zorder=0)
    ax.set_xlim(0, room)


def _bar(ax: Axes, place: int, bar: Mapping[Hashable, Any]) -> None:
    """One policy: its speed-up, from where to where it goes, and the number."""
    seer = bar["mark"] == " *"
    colour = look_of(bar["policy"], bar["mark"]).colour
    ax.barh(place, bar["speedup"], height=0.62, color=colour, alpha=0.3 if seer else 1.0, linewidth=0, zorder=2)
    end = bar["highest"]
    if bar["lowest"] != end:
        ends = [bar["lowest"], end]
        ax.plot(ends, [place, place], color=_WHISKER, linewidth=1.3, marker="|", markersize=7, zorder=5)
    start = 0.0 if seer else end  # there, a bar that ends near the bound would have its number across the bound's line
    paper = None if seer else {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
    ax.annotate(f"{bar['speedup']:.2f}x", (start, place), xytext=(7, 0), textcoords="offset points", va="center",
                fontsize=9.5, fontweight="normal" if seer else "bold", zorder=6, bbox=paper)  # fmt: skip
