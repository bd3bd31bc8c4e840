"""What a sweep found, in words and by stated rules: who is fastest where, what that gains, where it hardly matters.

*Fastest*: the lowest mean TPOT. Along an axis, who was the fastest stays so while within 2 % of the fastest: less is no
finding. *The policy hardly matters* where half of the policies are within 10 % of the fastest, up to the axis' end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pandas as pd

from trilane.figures.axis_words import is_null, numeric, value_words

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
    close = "" if all(_always(table, part) for part in found) else f" or within {TIE:.0%} of the fastest"
    first = f"{found[0].policy} is fastest{close}"
    if len(values) == 1:
        leads = first if table.shape[1] > 1 else found[0].policy
        return f"{leads} at {value_words(axis, values[0])}: {table.min().min():.1f} ms per token"
    if len(found) == 1:
        if are_things(axis, values):
            return f"{first} on each of them"
        times = table[found[0].policy].dropna()
        leads = f"{first} throughout" if table.shape[1] > 1 else found[0].policy
        return f"{leads}: {times.iloc[0]:.1f} to {times.iloc[-1]:.1f} ms per token"
    if not numeric(values):
        others = ", ".join(f"{part.policy} at {_listed(axis, part.values)}" for part in found[1:])
        return f"{first} at {_listed(axis, found[0].values)}, {others}"
    if len(found) <= _FEW:
        ends = [f"below {value_words(axis, after.values[0])}" for after in found[1:]] + ["from there on"]
        others = ", ".join(f"{part.policy} {end}" for part, end in zip(found[1:], ends[1:], strict=True))
        return f"{first} {ends[0]}, {others}"
    return _most_often(found, len(values), close)


def _most_often(found: Sequence[Stretch], values: int, close: str) -> str:
    """Of many stretches, how often the fastest changes and who it mostly is."""
    held = Counter[str]()
    for part in found:
        held[part.policy] += len(part.values)
    [(policy, count)] = held.most_common(1)
    changes = f"the fastest policy changes {len(found) - 1} times"
    return f"{changes}; most often, at {count} of {values} values, {policy} is fastest{close}"


def are_things(axis: str, values: Iterable[Any]) -> bool:
    """Whether values are things to choose from rather than steps of a scale, as null is beside numbers."""
    return axis in THINGS or any(is_null(axis, value) for value in values)


def _always(table: pd.DataFrame, part: Stretch) -> bool:
    """Whether a stretch's policy is the very fastest at each of its values."""
    times = table.loc[list(part.values)]
    return bool((times[part.policy] <= times.min(axis=1)).all())


def along(table: pd.DataFrame, axis: str) -> str:
    """The finding of one axis as a headline: who is fastest where, and from where on it hardly matters; of things to
    choose from, which is best.
    """
    if are_things(axis, table.index) and len(table) > 1:
        return gain(table, axis)
    settled = settled_from(table)
    if settled == table.index[0]:
        return f"{who(table, axis)}, but the policy hardly matters"
    if settled is None:
        return who(table, axis)
    return f"{who(table, axis)}; from {value_words(axis, settled)} on the policy hardly matters"


def gain(table: pd.DataFrame, axis: str) -> str:
    """What the fastest gains from the first to the last value; of things to choose from, which is best."""
    best = table.min(axis=1)
    if len(best) == 1:
        return who(table, axis)
    if are_things(axis, best.index):
        return _ranked(best, axis)
    first, last = best.iloc[0], best.iloc[-1]
    where = f"from {value_words(axis, best.index[0])} to {value_words(axis, best.index[-1])}"
    times = f"from {first:.1f} to {last:.1f} ms per token"
    if abs(first / last - 1) <= TIE:
        return f"{where} the fastest hardly changes, {times}"
    change = f"{first / last:.2f}x faster" if first > last else f"{last / first:.2f}x slower"
    return f"{where} the fastest goes {times}, {change}"


def gains_most(table: pd.DataFrame, axis: str) -> str:
    """Which of several policies the first to the last value of a scale helps most; nothing where it helps nobody."""
    if table.shape[1] < 2 or len(table) < 2 or are_things(axis, table.index):
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
    if table.shape[1] < 3 or are_things(axis, table.index) or len(table) < 2:
        return ""
    settled = settled_from(table)
    if settled is not None:
        return f"from {value_words(axis, settled)} on the policy hardly matters: half of them are within {NEAR:.0%}"
    last = table.iloc[-1]
    behind = f"half of the policies take at least {last.median() / last.min() - 1:.0%} longer than the fastest"
    return f"the policy matters up to {value_words(axis, table.index[-1])}: {behind}"


def _ranked(best: pd.Series, axis: str) -> str:
    """The best of several things, and how far the others are behind."""
    ranked = best.sort_values(kind="stable")
    first, *behind = [(value_words(axis, thing), time) for thing, time in ranked.items()]
    others = ", ".join(f"{_ahead(time / first[1])} {thing} ({time:.1f})" for thing, time in behind)
    return f"{first[0]} is best: {first[1]:.1f} ms per token, {others}"


def _ahead(ratio: float) -> str:
    return "as fast as" if ratio <= 1 + TIE else f"{ratio:.2f}x faster than"


def _listed(axis: str, values: Sequence[Any]) -> str:
    return " and ".join(value_words(axis, value) for value in values)


def overall(rows: pd.DataFrame, best: Sequence[str]) -> str:
    """Who is fastest in how many settings, given the fastest of each; of one policy alone, its times in ``rows``."""
    if rows["policy"].nunique() > 1:
        return among(best)
    low, high = rows["tpot_ms"].min(), rows["tpot_ms"].max()
    if len(best) == 1:
        return f"{rows['policy'].iloc[0]}: {low:.1f} ms per token"
    return f"{rows['policy'].iloc[0]}: {low:.1f} to {high:.1f} ms per token over {len(best)} settings"


def among(best: Sequence[str], does: str = "is fastest") -> str:
    """Who is fastest, or best at something else, in how many settings, given the best of each."""
    counts = Counter(best).most_common()
    if len(counts) == 1:
        return f"{best[0]} {does} in {f'all {len(best)} settings' if len(best) > 1 else 'the one setting'}"
    named = [f"{counts[0][0]} {does} in {counts[0][1]} of {len(best)} settings"]
    named += [f"{policy} in {count}" for policy, count in counts[1:_FEW]]
    rest = f", others in {sum(count for _, count in counts[_FEW:])}" if len(counts) > _FEW else ""
    return ", ".join(named) + rest
