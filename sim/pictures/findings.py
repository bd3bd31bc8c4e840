"""What a sweep found, in words and by stated rules: who is fastest where, what that gains, where it hardly matters.

*Fastest*: the lowest mean TPOT. Along an axis, who was the fastest stays so while within 2 % of the fastest: less is no
finding. *The policy hardly matters* where half of the policies are within 10 % of the fastest, up to the axis' end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pandas as pd

from sim.pictures.axis_words import numeric, value_words

TIE = 0.02
NEAR = 0.10
_FEW = 3  # stretches of an axis, or policies, that one sentence names
THINGS = ("hardware", "model", "trace")  # axes whose values are things to choose from rather than steps of a scale


class Stretch(NamedTuple):
    """Neighbouring values of an axis with the same fastest policy."""

    policy: str
    values: tuple[Any, ...]


def times_table(rows: pd.DataFrame, axis: str, values: Sequence[Any]) -> pd.DataFrame:
    """Mean TPOT (ms): a row a value, in order, a column a policy with its mark; NaN where it could not run.

    ``rows`` as in ``SweepMeans``, of one setting of the other axes.
    """
    named = rows.groupby(rows["policy"] + rows["mark"], sort=False)
    columns = {str(name): mine.set_index(axis)["tpot_ms"] for name, mine in named}
    return pd.DataFrame(columns).reindex(pd.Index(list(values), name=axis)).dropna(how="all")


def stretches(table: pd.DataFrame) -> list[Stretch]:
    """Who is fastest along the axis."""
    winners: list[str] = []
    for _, times in table.iterrows():
        stays = bool(winners) and times[winners[-1]] <= (1 + TIE) * times.min()
        winners.append(winners[-1] if stays else str(times.idxmin()))
    found = groupby(zip(winners, table.index.tolist(), strict=True), key=lambda pair: pair[0])
    return [Stretch(policy, tuple(value for _, value in pairs)) for policy, pairs in found]


def settled_from(table: pd.DataFrame) -> Any | None:
    """The value from which on the policy hardly matters; None if it matters at the last one."""
    near = (table.median(axis=1) <= (1 + NEAR) * table.min(axis=1)).tolist()
    tail = next((count for count, value in enumerate(reversed(near)) if not value), len(near))
    return table.index[len(near) - tail] if tail and table.shape[1] > 2 else None


def who(table: pd.DataFrame, axis: str) -> str:
    """Who is fastest where along the axis, without a full stop."""
    found, values = stretches(table), table.index.tolist()
    first = f"{found[0].policy} is fastest"
    if len(values) == 1:
        leads = first if table.shape[1] > 1 else found[0].policy
        return f"{leads} at {value_words(axis, values[0])}: {table.min().min():.1f} ms per token"
    if len(found) == 1:
        if axis in THINGS:
            return f"{first} on each of them"
        times = table[found[0].policy].dropna()
        close = "" if _always(table, found[0].policy) else f" or within {TIE:.0%} of the fastest"
        leads = f"{first}{close} throughout" if table.shape[1] > 1 else found[0].policy
        return f"{leads}: {times.iloc[0]:.1f} to {times.iloc[-1]:.1f} ms per token"
    if not numeric(values):
        others = ", ".join(f"{part.policy} at {_listed(axis, part.values)}" for part in found[1:])
        return f"{first} at {_listed(axis, found[0].values)}, {others}"
    if len(found) <= _FEW:
        ends = [f"below {value_words(axis, after.values[0])}" for after in found[1:]] + ["from there on"]
        others = ", ".join(f"{part.policy} {end}" for part, end in zip(found[1:], ends[1:], strict=True))
        return f"{first} {ends[0]}, {others}"
    held = Counter[str]()
    for part in found:
        held[part.policy] += len(part.values)
    [(policy, count)] = held.most_common(1)
    often = f"at {count} of {len(values)} values"
    return f"the fastest policy changes {len(found) - 1} times; most often, {often}, it is {policy}"


def _always(table: pd.DataFrame, policy: str) -> bool:
    """Whether it is the very fastest at every value."""
    return bool((table[policy] <= table.min(axis=1)).all())


def along(table: pd.DataFrame, axis: str) -> str:
    """The finding of one axis as a headline: who is fastest where, and from where on it hardly matters."""
    settled = settled_from(table)
    if settled is None:
        return who(table, axis)
    everywhere = settled == table.index[0]
    if everywhere:
        return f"{who(table, axis)}, but the policy hardly matters"
    return f"{who(table, axis)}; from {value_words(axis, settled)} on the policy hardly matters"


def gain(table: pd.DataFrame, axis: str) -> str:
    """What the fastest gains from the first to the last value; of things to choose from, which is best."""
    best = table.min(axis=1)
    if axis in THINGS and len(best) > 1:
        return _ranked(best)
    first, last = best.iloc[0], best.iloc[-1]
    where = f"from {value_words(axis, best.index[0])} to {value_words(axis, best.index[-1])}"
    times = f"from {first:.1f} to {last:.1f} ms per token"
    if abs(first / last - 1) <= TIE:
        return f"{where} the fastest hardly changes, {times}"
    change = f"{first / last:.2f}x faster" if first > last else f"{last / first:.2f}x slower"
    return f"{where} the fastest goes {times}, {change}"


def gains_most(table: pd.DataFrame, axis: str) -> str:
    """Which of several policies the first to the last value of a scale helps most; nothing where it helps nobody."""
    if table.shape[1] < 2 or len(table) < 2 or axis in THINGS:
        return ""
    ratios = (table.iloc[0] / table.iloc[-1]).dropna()
    if ratios.empty or ratios.max() <= 1 + TIE:
        return ""
    first, last = table[ratios.idxmax()].iloc[[0, -1]]
    return f"{ratios.idxmax()} gains most: {first:.1f} to {last:.1f} ms per token"


def until_the_end(table: pd.DataFrame, axis: str) -> str:
    """From where on the policy hardly matters, or how much it still does at the last value; nothing for a few policies
    or for things to choose from.
    """
    if table.shape[1] < 3 or axis in THINGS or len(table) < 2:
        return ""
    settled = settled_from(table)
    if settled is not None:
        return f"from {value_words(axis, settled)} on the policy hardly matters: half of them are within {NEAR:.0%}"
    last = table.iloc[-1]
    behind = f"half of the policies take at least {last.median() / last.min() - 1:.0%} longer than the fastest"
    return f"the policy matters up to {value_words(axis, table.index[-1])}: {behind}"


def _ranked(best: pd.Series) -> str:
    """The best of several things, and how far the others are behind."""
    ranked = best.sort_values(kind="stable")
    lead = [(time / ranked.iloc[0], f"{thing} ({time:.1f})") for thing, time in ranked.items()][1:]
    others = ", ".join(f"{ratio:.2f}x faster than {thing}" for ratio, thing in lead)
    return f"{ranked.index[0]} is best: {ranked.iloc[0]:.1f} ms per token, {others}"


def _listed(axis: str, values: Sequence[Any]) -> str:
    return " and ".join(value_words(axis, value) for value in values)


def overall(rows: pd.DataFrame, best: Sequence[str]) -> str:
    """Who is fastest in how many settings, given the fastest of each; of one policy alone, its times in ``rows``."""
    if rows["policy"].nunique() > 1:
        return among(best)
    low, high = rows["tpot_ms"].min(), rows["tpot_ms"].max()
    return f"{rows['policy'].iloc[0]}: {low:.1f} to {high:.1f} ms per token over {len(best)} settings"


def among(best: Sequence[str]) -> str:
    """Who is fastest in how many settings, given the fastest of each."""
    counts = Counter(best).most_common()
    if len(counts) == 1:
        return f"{best[0]} is fastest in all {len(best)} settings"
    named = [f"{counts[0][0]} is fastest in {counts[0][1]} of {len(best)} settings"]
    named += [f"{policy} in {count}" for policy, count in counts[1:_FEW]]
    rest = f", others in {sum(count for _, count in counts[_FEW:])}" if len(counts) > _FEW else ""
    return ", ".join(named) + rest
