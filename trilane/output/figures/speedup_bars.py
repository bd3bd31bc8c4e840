"""Speed-up over a baseline: a bar for each policy, and the speed-up that the lower bound would allow."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from policies.protocols import PolicyKind
from trilane.output.figures.bars import style_bars, whisker, write_value
from trilane.output.figures.figure_files import Picture, PictureError, default_settings
from trilane.output.figures.marks import IMPOSSIBLE, WHISKER, look_of, marked
from trilane.output.figures.style import (
    MOST_PANELS,
    Panel,
    axes_of_panels,
    kinds_in_words,
    page,
    page_size,
    settings_of,
)
from trilane.output.figures.sweep_means import BOUND, SweepMeans, clairvoyant, policy_there

BASELINES = ("llama.cpp", "on-demand", "layer-wise")  # by default the first of these in the results
_BARS = 20  # the fastest
_ROOM = 1.05  # length of the axis over the longest bar


@default_settings
def plot_speedup_bars(means: SweepMeans, baseline: str | None = None) -> Picture:
    """TPOT of ``baseline`` over that of each policy, a panel for each setting; whiskers: lowest to highest draw.

    Of more than six settings there is one panel, of geometric means; whiskers: lowest to highest setting. ``means``
    come from ``means_of``. Raises PictureError without the baseline or without another policy.
    """
    name = _baseline(means, baseline)
    speedups, every_setting = _speedups(means, name), settings_of(means)
    panels = [panel for panel in every_setting if not panel.of(speedups).empty]
    without = len(every_setting) - len(panels)
    settings, over = len(panels), len(panels) if len(panels) > MOST_PANELS else 0
    if over:
        groups = speedups.groupby(["policy", "kind"], sort=False)["speedup"]
        means_over = groups.agg(speedup=_geometric, lowest="min", highest="max", settings="size")
        speedups, panels = means_over.reset_index(), [Panel({}, "")]
    else:
        speedups["settings"] = speedups.groupby("policy")["speedup"].transform("size")  # in which each policy ran
    ranked = speedups[speedups["settings"] == settings]  # means over other settings could not be compared with these
    if over and set(ranked["policy"]) <= {name, BOUND}:
        raise PictureError(f"expected a policy other than {name} in all {settings} settings: choose with --where")
    drawn = ranked if over else speedups
    order = _order(drawn, ranked)
    shown = [policy for place, policy in enumerate(order) if place < _BARS or policy == name]
    slower = [policy for policy in order if policy not in shown]
    width, height = page_size(len(panels), 0.9 + 0.34 * len(shown))
    lacking = f"left out: {without} setting{'s' * (without > 1)} in which {name} did not run" if without else ""
    below = [*_below(means, slower, over), _some(speedups, settings, over), lacking, *means.notes]
    headline = _headline(drawn, ranked, name, over)
    figure, part = page(width, height, headline, means.about, "\n".join(filter(None, below)))
    bound = drawn.loc[drawn["policy"] == BOUND, "speedup"].max()
    room = _ROOM * max(drawn.loc[drawn["policy"].isin(shown), ["speedup", "highest"]].max().max(), bound)
    kinds = dict(zip(drawn["policy"], drawn["kind"], strict=True))
    for panel, ax in axes_of_panels(part, panels):
        _draw(ax, panel.of(drawn), shown, room)
        ax.set_xlabel(f"speed-up over {name} (TPOT of {name} / TPOT)")
        style_bars(ax, [marked(policy, kinds[policy]) for policy in shown])
    return Picture(figure, speedups.drop(columns="kind" if over else ["kind", "settings"]))


def _baseline(means: SweepMeans, wanted: str | None) -> str:
    known = set(means.rows["policy"])
    usual = next((name for name in BASELINES if name in known), str(means.real["policy"].iloc[0]))
    name = usual if wanted is None else policy_there(wanted, means.rows)
    if known == {name}:
        raise PictureError(f"expected policies to compare with the baseline {name}, these results hold no other")
    return name


def _speedups(means: SweepMeans, baseline: str) -> pd.DataFrame:
    """A row a policy and setting: speed-up by mean TPOT, lowest and highest of the draws; then those of the bound."""
    axes = list(means.axes)
    runs = _with_baseline(means.runs, means.runs[means.runs["policy"] == baseline], [*axes, "draw"])
    runs = runs.assign(ratio=runs["tpot_ms_base"] / runs["tpot_ms"])
    groups = runs.groupby([*axes, "policy", "kind"], sort=False)
    speedups = groups["ratio"].agg(lowest="min", highest="max")
    speedups = speedups.assign(speedup=groups["tpot_ms_base"].mean() / groups["tpot_ms"].mean()).reset_index()
    bounds = _with_baseline(means.bounds, means.rows[means.rows["policy"] == baseline], axes)
    bounds = bounds.assign(policy=BOUND, kind=PolicyKind.KEEPS, speedup=bounds["tpot_ms_base"] / bounds["tpot_ms"])
    columns = ["policy", "kind", *axes, "speedup", "lowest", "highest"]
    both: pd.DataFrame = pd.concat([speedups, bounds[[*axes, "policy", "kind", "speedup"]]], ignore_index=True)
    return both.reindex(columns=columns)


def _with_baseline(rows: pd.DataFrame, base: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Rows with the baseline's TPOT in their setting; those of settings in which it did not run are left out."""
    times = base[[*by, "tpot_ms"]].rename(columns={"tpot_ms": "tpot_ms_base"})
    return pd.merge(rows, times, on=list(by)) if by else pd.merge(rows, times, how="cross")


def _geometric(ratios: pd.Series) -> float:
    return float(np.exp(np.log(ratios).mean()))


def _order(speedups: pd.DataFrame, ranked: pd.DataFrame) -> list[str]:
    """Clairvoyant runs first, then policies from the fastest on, then those that did not run in all settings."""
    rows = speedups[speedups["policy"] != BOUND]
    means = rows.groupby(["kind", "policy"])["speedup"].agg(_geometric).reset_index()
    means = means.assign(real=~clairvoyant(means), some=~means["policy"].isin(ranked["policy"]))
    means = means.sort_values(["real", "some", "speedup"], ascending=[True, True, False], kind="stable")
    return means["policy"].tolist()


def _headline(speedups: pd.DataFrame, ranked: pd.DataFrame, baseline: str, over: int) -> str:
    """The best speed-up: a geometric mean over the settings, of the policies that ran in all of them."""
    real, others = _real(ranked, baseline), _real(speedups, baseline)
    if real.empty:
        return f"only {baseline} ran in all settings" if len(others) else f"what could be gained over {baseline}"
    best = real.groupby("policy")["speedup"].agg(_geometric).idxmax()
    mine = real[real["policy"] == best]
    low, high, mean = mine["speedup"].min(), mine["speedup"].max(), _geometric(mine["speedup"])
    name = marked(str(best), mine["kind"].iloc[0])
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
    return speedups[~speedups["policy"].isin([BOUND, baseline]) & ~clairvoyant(speedups)]


def _span(low: float, high: float) -> str:
    """One ratio, or two with "to" between them."""
    return " to ".join(dict.fromkeys(f"{ratio:.2f}x" for ratio in (low, high)))


def _below(means: SweepMeans, slower: Sequence[str], over: int) -> list[str]:
    """Marks and lines, and the slower policies."""
    whiskers = f"bars: geometric means over {over} settings; whiskers: lowest to highest setting" if over else ""
    if not over and (means.rows["draws"] > 1).any():
        whiskers = "whiskers: lowest to highest draw"
    lines = f"black line: what the lower bound of policies that keep the routing allows{', on average' if over else ''}"
    legend = "; ".join(filter(None, [*kinds_in_words(means.kinds), lines, whiskers]))
    return [legend, f"not drawn, slower: {', '.join(slower)}" if slower else ""]


def _some(speedups: pd.DataFrame, settings: int, over: int) -> str:
    """The policies that did not run in all settings, and in how many they did."""
    some = speedups[(speedups["settings"] < settings) & (speedups["policy"] != BOUND)].drop_duplicates("policy")
    named = ", ".join(f"{row['policy']} ({row['settings']})" for row in some.to_dict("records"))
    return f"not {'drawn' if over else 'ranked'}, did not run in all {settings} settings: {named}" if named else ""


def _draw(ax: Axes, rows: pd.DataFrame, order: Sequence[str], room: float) -> None:
    """The bars of one panel; the dotted line is the baseline, the black one the bound."""
    for bar in rows[rows["policy"].isin(order)].to_dict("records"):
        _bar(ax, order.index(bar["policy"]), bar)
    ax.axvline(1, color=WHISKER, linewidth=1, linestyle=":", zorder=4)
    for limit in rows.loc[rows["policy"] == BOUND, "speedup"]:
        ax.axvline(limit, color="black", linewidth=2, zorder=4)
        ax.axvspan(limit, room, color=IMPOSSIBLE, linewidth=0, zorder=0)
    ax.set_xlim(0, room)


def _bar(ax: Axes, place: int, bar: Mapping[Hashable, Any]) -> None:
    """One policy: its speed-up, the range of it, and the number."""
    foreseeing = bar["kind"] == PolicyKind.CLAIRVOYANT
    colour = look_of(bar["policy"], bar["kind"]).colour
    ax.barh(place, bar["speedup"], height=0.62, color=colour, alpha=0.3 if foreseeing else 1.0, linewidth=0, zorder=2)
    if bar["lowest"] != bar["highest"]:
        whisker(ax, place, bar["lowest"], bar["highest"])
    write_value(ax, place, f"{bar['speedup']:.2f}x", bold=not foreseeing)
