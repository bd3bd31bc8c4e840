"""What a sweep found, in words and by stated rules: which policy is fastest, what is gained, where it hardly matters.

*Fastest*: the lowest mean TPOT. Along an axis the fastest policy stays the fastest as long as it is within 2 % of the
lowest TPOT, since less is within the noise. *The policy hardly matters* from the value on at which, and at all later
ones, half of the policies are within 10 % of the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from policies.protocols import PolicyKind
from trilane.output.figures.marks import marked
from trilane.output.figures.words import numeric, value_words

Policy: TypeAlias = tuple[str, PolicyKind]

TIE = 0.02
NEAR = 0.10
_FEW = 3  # intervals, or policies, that one sentence names


class Interval(NamedTuple):
    """Neighbouring values of an axis with the same fastest policy."""

    policy: Policy
    values: tuple[Any, ...]


def times_table(rows: pd.DataFrame, axis: str, values: Sequence[Any]) -> pd.DataFrame:
    """Mean TPOT (ms): a row a value of ``axis``, a column a (policy, kind); NaN where a policy could not run.

    ``rows`` are those of ``SweepMeans``, of one setting of the other axes.
    """
    columns = {key: mine.set_index(axis)["tpot_ms"] for key, mine in rows.groupby(["policy", "kind"], sort=False)}
    return pd.DataFrame(columns).reindex(pd.Index(list(values), name=axis)).dropna(how="all")


def best_of(times: pd.DataFrame) -> list[Policy]:
    """The very fastest policy at each value."""
    columns: list[Any] = times.idxmin(axis=1).tolist()
    return [(str(policy), PolicyKind(kind)) for policy, kind in columns]


def intervals(times: pd.DataFrame) -> list[Interval]:
    """The fastest policies along the axis."""
    winners: list[Policy] = []
    for best, (_, row) in zip(best_of(times), times.iterrows(), strict=True):
        stays = bool(winners) and row[winners[-1]] <= (1 + TIE) * row.min()
        winners.append(winners[-1] if stays else best)
    found = groupby(zip(winners, times.index.tolist(), strict=True), key=lambda pair: pair[0])
    return [Interval(policy, tuple(value for _, value in pairs)) for policy, pairs in found]


def settled_from(times: pd.DataFrame) -> Any | None:
    """The value from which on the policy hardly matters; None if it matters at the last one."""
    near = (times.median(axis=1) <= (1 + NEAR) * times.min(axis=1)).tolist()
    tail = next((count for count, value in enumerate(reversed(near)) if not value), len(near))
    return times.index[len(near) - tail] if tail and times.shape[1] > 2 else None


def fastest(times: pd.DataFrame) -> str:
    """Which policy is fastest where along the axis; of many intervals, in how many settings."""
    found, axis, lowest = intervals(times), str(times.index.name), times.min(axis=1)
    if len(found) > _FEW or (len(found) > 1 and not numeric(times.index.tolist())):
        return tally(part.policy for part in found for _ in part.values)
    tied = any((times.loc[list(part.values), part.policy] > lowest[list(part.values)]).any() for part in found)
    first = f"{marked(*found[0].policy)} is fastest{f' or within {TIE:.0%} of the fastest' if tied else ''}"
    if len(times) == 1:
        return f"{first} at {value_words(axis, times.index[0])}: {lowest.iloc[0]:.1f} ms per token"
    if len(found) == 1:
        return f"{first} throughout: {lowest.iloc[0]:.1f} to {lowest.iloc[-1]:.1f} ms per token"
    ends = [*(f"below {value_words(axis, after.values[0])}" for after in found[1:]), "from there on"]
    others = (f"{marked(*part.policy)} {end}" for part, end in zip(found[1:], ends[1:], strict=True))
    return ", ".join([f"{first} {ends[0]}", *others])


def gain(times: pd.DataFrame) -> str:
    """How the lowest TPOT changes from the first to the last value; empty for a single value."""
    if len(times) == 1:
        return ""
    lowest = times.min(axis=1)
    first, last = lowest.iloc[0], lowest.iloc[-1]
    where = " to ".join(value_words(str(times.index.name), value) for value in (times.index[0], times.index[-1]))
    if abs(first / last - 1) <= TIE:
        return f"from {where} the lowest time per token hardly changes, {first:.1f} to {last:.1f} ms"
    by = f"falls by {first / last:.2f}x" if first > last else f"rises by {last / first:.2f}x"
    return f"from {where} the lowest time per token {by}, from {first:.1f} to {last:.1f} ms"


def hardly_matters(times: pd.DataFrame) -> str:
    """From where on the policy hardly matters; empty where it still matters at the last value."""
    settled = settled_from(times)
    if settled is None:
        return ""
    where = f"from {value_words(str(times.index.name), settled)} on" if settled != times.index[0] else "throughout,"
    return f"{where} the policy hardly matters: half of the policies are within {NEAR:.0%} of the fastest"


def tally(best: Iterable[Policy], does: str = "is fastest") -> str:
    """The best policy of each setting, counted: "dali is fastest in 3 of 4 settings, smoe ~ in 1"."""
    counts = Counter(best).most_common()
    settings = sum(count for _, count in counts)
    if len(counts) == 1:
        return f"{marked(*counts[0][0])} {does} in {f'all {settings} settings' if settings > 1 else 'the one setting'}"
    named = [f"{marked(*policy)} in {count}" for policy, count in counts[1:_FEW]]
    rest = [f"others in {sum(count for _, count in counts[_FEW:])}"] if len(counts) > _FEW else []
    return ", ".join([f"{marked(*counts[0][0])} {does} in {counts[0][1]} of {settings} settings", *named, *rest])
