"""What pictures of a sweep start from: means over draws, what varies, and what was left out."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from trilane.common.names import unknown
from trilane.figures.axis_values import filled, of_policies, on_axes, takers, with_words
from trilane.figures.axis_words import numeric, value_text
from trilane.figures.caption import about
from trilane.figures.figure_files import PictureError
from trilane.figures.marks import mark
from trilane.figures.null_words import null_text
from trilane.study.sweep.axes import SCENARIO_KEYS

_MEANS = ("tpot_ms", "decode_resident_hit_rate", "cache_share", "cache_bytes")
BOUND = "lower bound"


@dataclass(frozen=True)
class SweepMeans:
    """Rows of a sweep, a row a policy and setting.

    ``rows``: the axes, ``policy``, ``mark``, ``draws``, ``tpot_ms`` with ``tpot_ms_min`` and ``tpot_ms_max``, and means
    of hit rate and cache. ``bounds``: the axes and ``tpot_ms`` of the least lower bound of a setting. ``runs``: the
    rows of the sweep that they are made from. ``notes``: what was left out, in words.
    """

    rows: pd.DataFrame
    bounds: pd.DataFrame
    runs: pd.DataFrame
    axes: Mapping[str, list[Any]]
    about: str
    notes: tuple[str, ...]

    def frame(self) -> pd.DataFrame:
        """What pictures of TPOT draw: policies from the fastest on, then the lower bound; times in ms."""
        kinds = {" *": "clairvoyant", " ~": "changes the routing", "": "keeps the routing"}
        order = fastest_first(self.rows)
        rows = self.rows.assign(kind=self.rows["mark"].map(kinds)).sort_values(
            "policy", key=lambda names: names.map(order.index), kind="stable"
        )
        bounds = self.bounds.assign(kind=BOUND, policy=BOUND)
        columns = ["policy", "kind", *self.axes, "tpot_ms", "tpot_ms_min", "tpot_ms_max", "draws"]
        return pd.concat([rows, bounds], ignore_index=True)[columns].astype({"draws": "Int64"})

    @property
    def real(self) -> pd.DataFrame:
        """Without clairvoyant runs, which no system can have."""
        return self.rows[self.rows["mark"] != " *"]

    @cached_property
    def seers(self) -> pd.DataFrame:
        """The clairvoyant runs."""
        return self.rows[self.rows["mark"] == " *"]

    def axis(self, name: str) -> list[Any]:
        """The values of an axis that varies. Raises PictureError."""
        if not self.axes.get(name):
            there = ", ".join(self.axes) or "nothing"
            raise PictureError(f"expected an axis that varies, {name!r} does not; beside the policy there is {there}")
        return self.axes[name]


def means_of(
    results: pd.DataFrame, where: Mapping[str, Sequence[str]] | None = None,
    policies: Collection[str] | None = None, asked: Collection[str] = (),
) -> SweepMeans:
    """Means of the rows for which ``where`` holds, of ``policies`` and the clairvoyant runs (default: all).

    ``where``: by key, the values of which a row must have one. ``asked``: columns that are axes though they may have a
    single value.

    A setting in which not all draws ran is left out, since its mean would be one of others. Raises PictureError if
    nothing real is left, or for an unknown policy, key or value.
    """
    results = with_words(results)
    chosen = _where(results, where or {})
    ran = chosen[(chosen["error"] == "") & chosen["tpot_ms"].notna()]
    if ran.empty:
        raise PictureError(f"expected rows with decode steps to draw, got none of {len(chosen)}{_such_as(chosen)}")
    ran = ran.assign(mark=[mark(json.loads(labels)) for labels in ran["labels"]])
    wanted = set(chosen["policy"]) if policies is None else _known(policies, chosen)
    names = [name for name in axes_of(ran, results.attrs["axes"], asked) if _concerns(results, name, wanted)]
    placed = on_axes(ran, names, results)
    whole = _whole(placed, [*names, "policy"])
    if whole.empty:
        raise PictureError(f"expected a setting in which all {ran['draw'].nunique()} draws ran, there is none")
    kept = whole[whole["policy"].isin(wanted) | (whole["mark"] == " *")]
    if (kept["mark"] == " *").all():
        raise PictureError(_nothing_real(chosen[chosen["policy"].isin(wanted)]))
    rows = _means(kept, [*names, "policy", "mark"])
    notes = tuple(_notes(chosen, len(placed) - len(whole), rows))
    axes = {name: _values(rows[name]) for name in names}
    return SweepMeans(rows, _bounds(whole, names), kept, axes, about(whole, names), notes)


def _concerns(results: pd.DataFrame, name: str, policies: Collection[str]) -> bool:
    """Whether an axis is one of these policies: others' parameters do not vary for them."""
    return not of_policies(name) or bool(takers(results, name) & set(policies))


def _nothing_real(chosen: pd.DataFrame) -> str:
    """Why no run is left that a real system could have."""
    errors = chosen.loc[chosen["error"] != "", "error"]
    others = f"; the others ended with an error, the first: {errors.iloc[0]}" if len(errors) else ""
    return f"expected a policy that a system can have, only clairvoyant runs are left{others}"


def fastest_first(rows: pd.DataFrame) -> list[str]:
    """Policies by their TPOT over the fastest of each setting (geometric mean over those that they ran in)."""
    axes = list(rows.columns[: rows.columns.tolist().index("policy")])
    best = rows.groupby(axes)["tpot_ms"].transform("min") if axes else rows["tpot_ms"].min()
    behind = (rows["tpot_ms"] / best).map(math.log).groupby(rows["policy"]).mean()
    return [str(name) for name in behind.sort_values(kind="stable").index]


def axes_of(runs: pd.DataFrame, varied: Sequence[str], asked: Collection[str] = ()) -> dict[str, list[Any]]:
    """What varies beside policy and draw, and the values of each: numbers ascending, text in the table's order.

    Of the axes that the sweep ``varied``, those that still vary when policy, draw and the axes before them are fixed
    (the others follow from those); and ``parameters``, if one policy stands there with several.
    """
    found: list[str] = []
    for name in [name for name in (*varied, "parameters") if name != "policy"]:
        fixed = runs.groupby(["policy", "draw", *found], dropna=False)[name]
        if (fixed.nunique(dropna=False) > 1).any():
            found.append(name)
    known = (*varied, *SCENARIO_KEYS)
    found += [name for name in asked if name in known and name not in found and runs[name].notna().any()]
    return {name: _values(runs[name]) for name in found}


def _values(column: pd.Series) -> list[Any]:
    """Numbers ascending, then text in the table's order."""
    there = column.dropna().unique().tolist()
    return sorted(value for value in there if numeric([value])) + [value for value in there if not numeric([value])]


def _where(results: pd.DataFrame, where: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Rows whose values read as asked; a policy that lacks a parameter is there at all its values. Raises PictureError
    for a key or value that there is not.
    """
    keys = list(dict.fromkeys([*results.attrs["axes"], *SCENARIO_KEYS]))
    chosen = pd.Series(True, index=results.index)
    for name, texts in where.items():
        if name not in keys:
            raise PictureError(f"--where: {unknown('key', name, keys)}")
        column = filled(results, name)[name]
        lacks = ~results["policy"].isin(takers(results, name)) & of_policies(name)
        there = _values(column[~lacks])
        chosen &= column.isin([value for text in texts for value in _read(name, text, there)]) | lacks
    return results[chosen]


def _read(name: str, text: str, there: Sequence[Any]) -> list[Any]:
    """The values that a text names. Raises PictureError if there is none."""
    text = null_text(name) if text == "null" else text
    wanted = [value for value in there if text in (str(value), value_text(name, value)) or _same(text, value)]
    if not wanted:
        words = ", ".join(value_text(name, value) for value in there) or "none"
        raise PictureError(f"--where {name}={text}: expected a value that is there: {words}")
    return wanted


def _same(text: str, value: Any) -> bool:
    """Whether a text is a number in another way of writing."""
    try:
        return not isinstance(value, str) and float(text) == value
    except ValueError:
        return False


def _known(policies: Collection[str], runs: pd.DataFrame) -> Collection[str]:
    there = list(dict.fromkeys(runs["policy"]))
    for name in policies:
        if name not in there:
            raise PictureError(unknown("policy in these results", name, there))
    return policies


def _whole(ran: pd.DataFrame, setting: Sequence[str]) -> pd.DataFrame:
    """Runs of settings in which every draw ran."""
    draws = ran.groupby(list(setting))["draw"].transform("nunique")
    return ran[draws == ran["draw"].nunique()]


def _means(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    groups = runs.groupby(by, sort=False)
    rows = groups[[name for name in _MEANS if name in runs.columns]].mean()
    spread = {"tpot_ms_min": groups["tpot_ms"].min(), "tpot_ms_max": groups["tpot_ms"].max(), "draws": groups.size()}
    return rows.assign(**spread).reset_index()


def _bounds(runs: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """The least lower bound of each setting: that of the policy with most room in memory; means over draws."""
    least = runs.groupby([*axes, "draw"], sort=False)["lower_bound_tpot_ms"].min().dropna().reset_index()
    if not axes:
        return pd.DataFrame({"tpot_ms": [least["lower_bound_tpot_ms"].mean()]}).dropna()
    means = least.groupby(axes, sort=False)["lower_bound_tpot_ms"].mean()
    return means.rename("tpot_ms").reset_index()


def _notes(chosen: pd.DataFrame, unpaired: int, rows: pd.DataFrame) -> list[str]:
    """What a reader must know of what is not drawn."""
    failed = int((chosen["error"] != "").sum())
    notes = []
    if failed:
        notes.append(f"left out: {failed} of {len(chosen)} runs, which ended with an error{_such_as(chosen)}")
    if unpaired:
        notes.append(f"left out: {unpaired} runs of settings in which not every draw ran")
    if not (rows["mark"] == " *").any():
        notes.append("these results hold no clairvoyant run, which would show how much is left to gain")
    return notes


def _such_as(chosen: pd.DataFrame) -> str:
    """The most frequent error, shortened."""
    errors = chosen.loc[chosen["error"] != "", "error"]
    if errors.empty:
        return ""
    text = str(errors.mode().iloc[0])
    return f" (such as {text if len(text) <= 90 else text[:87] + '...'})"
