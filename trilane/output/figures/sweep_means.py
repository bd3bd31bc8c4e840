"""The data of a sweep's pictures: means over draws, the axes that vary, and remarks on what was left out."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from policies.protocols import PolicyKind
from sim.runs.vocabulary import kind_of
from trilane.common.names import unknown
from trilane.common.quoting import quoted
from trilane.output.figures.axis_values import chosen, of_policies, on_axes, takers, values_of, with_words
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.words import about, tuned
from trilane.study.sweep.axes import SCENARIO_KEYS

_MEANS = ("tpot_ms", "decode_resident_hit_rate", "cache_share", "cache_bytes")
_SHORT = 90  # letters of an error that is quoted
BOUND = "lower bound"


@dataclass(frozen=True)
class SweepMeans:
    """Rows of a sweep, a row a policy and setting.

    ``rows``: the axes, ``policy``, ``kind`` (a PolicyKind), ``draws``, ``tpot_ms`` with ``tpot_ms_min`` and
    ``tpot_ms_max``, and means of hit rate and cache. ``bounds``: the axes and ``tpot_ms`` of the lowest bound of a
    setting. ``runs``: the rows of the sweep that these are made from. ``about``: what was run. ``notes``: what was left
    out, and what else belongs under every picture.
    """

    rows: pd.DataFrame
    bounds: pd.DataFrame
    runs: pd.DataFrame
    axes: Mapping[str, list[Any]]
    about: str
    notes: tuple[str, ...]

    def frame(self) -> pd.DataFrame:
        """What pictures of TPOT draw: policies from the fastest on, then the lower bound; times in ms."""
        order = fastest_first(self.rows)
        rows = self.rows.sort_values("policy", key=lambda names: names.map(order.index), kind="stable")
        bounds = self.bounds.assign(kind=BOUND, policy=BOUND)
        columns = ["policy", "kind", *self.axes, "tpot_ms", "tpot_ms_min", "tpot_ms_max", "draws"]
        return pd.concat([rows, bounds], ignore_index=True)[columns].astype({"draws": "Int64"})

    @property
    def real(self) -> pd.DataFrame:
        """Without clairvoyant runs, which no system can have."""
        return self.rows[~clairvoyant(self.rows)]

    @property
    def clairvoyant(self) -> pd.DataFrame:
        """The clairvoyant runs alone."""
        return self.rows[clairvoyant(self.rows)]

    @property
    def tuned(self) -> str:
        """A remark on policies that were tuned on what was played (``words.tuned``)."""
        return _tuned(self.runs)

    @property
    def kinds(self) -> set[PolicyKind]:
        """The kinds of policies in the rows."""
        return set(self.rows["kind"])

    def axis(self, name: str) -> list[Any]:
        """The values of an axis that varies. Raises PictureError."""
        if not self.axes.get(name):
            there = ", ".join(self.axes) or "none"
            raise PictureError(f"expected an axis that varies, {quoted(name)} does not; others do: {there}")
        return self.axes[name]


def clairvoyant(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of clairvoyant policies."""
    return rows["kind"] == PolicyKind.CLAIRVOYANT


def means_of(
    results: pd.DataFrame,
    where: Mapping[str, Sequence[str]] | None = None,
    policies: Collection[str] | None = None,
    asked: Collection[str] = (),
) -> SweepMeans:
    """Means over the draws of a sweep's ``results``, as ``trilane.sweep`` and ``trilane.read_results`` return them.

    ``where``: by key, the values of which a row must have one. ``policies``: those to keep, in addition to the
    clairvoyant runs (default: all). ``asked``: columns that are axes even if they have a single value.

    A setting in which not all draws ran is left out, since its mean would be one over other draws. Raises PictureError
    if nothing but clairvoyant runs is left, or for an unknown policy, key or value.
    """
    results = with_words(results)
    rows = chosen(results, where or {})
    ran = rows[(rows["error"] == "") & rows["tpot_ms"].notna()]
    if ran.empty:
        raise PictureError(f"expected rows with decode steps to draw, got none of {len(rows)}{_such_as(rows)}")
    ran = ran.assign(kind=[kind_of(json.loads(labels)) for labels in ran["labels"]])
    wanted = set(rows["policy"]) if policies is None else {policy_there(name, rows) for name in policies}
    varying = axes_of(ran, results.attrs["axes"], asked)  # some of them parameters of other policies alone
    names = [name for name in varying if not of_policies(name) or takers(results, name) & wanted]
    placed = on_axes(ran, names, results)
    draws = placed.groupby([*names, "policy"])["draw"].transform("nunique")
    whole = placed[draws == placed["draw"].nunique()]
    if whole.empty:
        raise PictureError(f"expected a setting in which all {ran['draw'].nunique()} draws ran, there is none")
    kept = whole[whole["policy"].isin(wanted) | clairvoyant(whole)]
    if clairvoyant(kept).all():
        raise PictureError(_nothing_real(rows[rows["policy"].isin(wanted)]))
    means = _means(kept, [*names, "policy", "kind"])
    notes = tuple(_notes(rows, len(placed) - len(whole), kept))
    axes = {name: values_of(means[name]) for name in names}
    return SweepMeans(means, _bounds(whole, names), kept, axes, about(whole, names), notes)


def _nothing_real(rows: pd.DataFrame) -> str:
    """Why no run is left that a real system could have."""
    errors = rows.loc[rows["error"] != "", "error"]
    others = f"; the others ended with an error, the first: {errors.iloc[0]}" if len(errors) else ""
    return f"expected a policy that a system can have, only clairvoyant runs are left{others}"


def fastest_first(rows: pd.DataFrame) -> list[str]:
    """Policies by their TPOT over the lowest of each setting (geometric mean over the settings that they ran in)."""
    axes = list(rows.columns[: rows.columns.tolist().index("policy")])
    best = rows.groupby(axes)["tpot_ms"].transform("min") if axes else rows["tpot_ms"].min()
    behind = (rows["tpot_ms"] / best).map(math.log).groupby(rows["policy"]).mean()
    return [str(name) for name in behind.sort_values(kind="stable").index]


def axes_of(runs: pd.DataFrame, varied: Sequence[str], asked: Collection[str] = ()) -> dict[str, list[Any]]:
    """What varies other than policy and draw, and the values of each axis.

    Of the axes that the sweep ``varied``, those that still vary when policy, draw and the axes before them are fixed
    (the others follow from those); and ``parameters``, if one policy has several sets of them.
    """
    found: list[str] = []
    for name in [name for name in (*varied, "parameters") if name != "policy"]:
        fixed = runs.groupby(["policy", "draw", *found], dropna=False)[name]
        if (fixed.nunique(dropna=False) > 1).any():
            found.append(name)
    known = (*varied, *SCENARIO_KEYS)
    found += [name for name in asked if name in known and name not in found and runs[name].notna().any()]
    return {name: values_of(runs[name]) for name in found}


def policy_there(policy: str, rows: pd.DataFrame) -> str:
    """``policy``, if there are rows of it. Raises PictureError."""
    if policy not in (there := rows["policy"].unique().tolist()):
        raise PictureError(unknown("policy in these results", policy, there))
    return policy


def _means(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    groups = runs.groupby(by, sort=False)
    rows = groups[[name for name in _MEANS if name in runs.columns]].mean()
    spread = {"tpot_ms_min": groups["tpot_ms"].min(), "tpot_ms_max": groups["tpot_ms"].max(), "draws": groups.size()}
    return rows.assign(**spread).reset_index()


def _bounds(runs: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """The lowest lower bound of each setting, which is that of the policy with most memory; means over draws."""
    least = runs.groupby([*axes, "draw"], sort=False)["lower_bound_tpot_ms"].min().dropna().reset_index()
    if not axes:
        return pd.DataFrame({"tpot_ms": [least["lower_bound_tpot_ms"].mean()]}).dropna()
    means = least.groupby(axes, sort=False)["lower_bound_tpot_ms"].mean()
    return means.rename("tpot_ms").reset_index()


def _notes(rows: pd.DataFrame, incomplete: int, kept: pd.DataFrame) -> list[str]:
    """What was left out, and how far the results can be trusted."""
    failed = int((rows["error"] != "").sum())
    notes = {
        f"left out: {failed} of {len(rows)} runs, which ended with an error{_such_as(rows)}": failed > 0,
        f"left out: {incomplete} runs of settings in which not every draw ran": incomplete > 0,
        "these results hold no clairvoyant run, which would show how much is left to gain": not clairvoyant(kept).any(),
        (remark := _tuned(kept)): bool(remark),
    }
    return [note for note, holds in notes.items() if holds]


def _tuned(runs: pd.DataFrame) -> str:
    """``words.tuned`` of the first trace that it holds for."""
    by_trace = runs.groupby("trace", sort=False)
    played = ({n for text in mine["sequences"].dropna() for n in json.loads(text)} for _, mine in by_trace)
    remarks = (tuned(set(mine["policy"]), str(t), p) for (t, mine), p in zip(by_trace, played, strict=True))
    return next(filter(None, remarks), "")


def _such_as(rows: pd.DataFrame) -> str:
    """The most frequent error, shortened."""
    errors = rows.loc[rows["error"] != "", "error"]
    if errors.empty:
        return ""
    text = str(errors.mode().iloc[0])
    return f" (such as {text if len(text) <= _SHORT else f'{text[: _SHORT - 3]}...'})"
