"""What pictures of a sweep start from: means over draws, what varies, and what was left out."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from sim.pictures.axis_words import value_text
from sim.pictures.figure_files import PictureError
from sim.results.marks import mark
from sim.sweep.axes import SCENARIO_KEYS
from traces.names import unknown

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
    results: pd.DataFrame, where: Mapping[str, str] | None = None, policies: Collection[str] | None = None,
    asked: Collection[str] = (),
) -> SweepMeans:
    """Means of the rows for which ``where`` holds, of ``policies`` and the clairvoyant runs (default: all).

    ``asked``: columns that are axes though they may have a single value.

    A setting in which not all draws ran is left out, since its mean would be one of others. Raises PictureError if
    nothing is left, or for an unknown policy, key or value.
    """
    chosen = _where(results, where or {})
    ran = chosen[(chosen["error"] == "") & chosen["tpot_ms"].notna()]
    if ran.empty:
        raise PictureError(f"expected rows with decode steps to draw, got none of {len(chosen)}{_first_error(chosen)}")
    ran = ran.assign(mark=[mark(json.loads(labels)) for labels in ran["labels"]])
    axes = axes_of(ran, results.attrs["axes"], asked)
    placed = _on_axes(ran, axes)
    whole = _whole(placed, [*axes, "policy"])
    if whole.empty:
        raise PictureError(f"expected a setting in which all {ran['draw'].nunique()} draws ran, there is none")
    bounds = _bounds(whole, list(axes))
    kept = whole if policies is None else whole[whole["policy"].isin(_known(policies, whole)) | (whole["mark"] == " *")]
    rows = _means(kept, [*axes, "policy", "mark"])
    notes = tuple(_notes(chosen, len(placed) - len(whole), rows))
    axes = {name: [value for value in values if value in set(rows[name])] for name, values in axes.items()}
    return SweepMeans(rows, bounds, kept, axes, _about(whole, axes), notes)


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
    there = column.dropna().unique().tolist()
    return sorted(there) if pd.api.types.is_numeric_dtype(column) else there


def _where(results: pd.DataFrame, where: Mapping[str, str]) -> pd.DataFrame:
    """Rows whose values read as asked. Raises PictureError for a key or value that there is not."""
    keys = list(dict.fromkeys([*results.attrs["axes"], *SCENARIO_KEYS]))
    for name, text in where.items():
        if name not in keys:
            raise PictureError(f"--where: {unknown('key', name, keys)}")
        there = _values(results[name])
        wanted = [value for value in there if text in (str(value), value_text(name, value)) or _same(text, value)]
        if not wanted:
            words = ", ".join(value_text(name, value) for value in there) or "none"
            raise PictureError(f"--where {name}={text}: expected a value that is there: {words}")
        results = results[results[name].isin(wanted)]
    return results


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


def _on_axes(runs: pd.DataFrame, axes: Mapping[str, list[Any]]) -> pd.DataFrame:
    """Runs with a value on every axis. A policy that has none on an axis (no such parameter) is the same all along it;
    of one that has some, runs without a value belong to another question.
    """
    for name, values in axes.items():
        everywhere = runs[name].isna() & (runs.groupby("policy")[name].transform("count") == 0)
        copies = runs[everywhere].drop(columns=name).merge(pd.DataFrame({name: values}), how="cross")
        runs = pd.concat([runs[runs[name].notna()], copies[runs.columns]], ignore_index=True) if len(copies) else runs
        runs = runs[runs[name].notna()]
    return runs


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
        notes.append(f"left out: {failed} of {len(chosen)} runs, which ended with an error{_first_error(chosen)}")
    if unpaired:
        notes.append(f"left out: {unpaired} runs of settings in which not every draw ran")
    if not (rows["mark"] == " *").any():
        notes.append("these results hold no clairvoyant run, which would show how much is left to gain")
    return notes


def _first_error(chosen: pd.DataFrame) -> str:
    """The most frequent error, shortened."""
    errors = chosen.loc[chosen["error"] != "", "error"]
    if errors.empty:
        return ""
    text = str(errors.mode().iloc[0])
    return f" (such as {text if len(text) <= 90 else text[:87] + '...'})"


def _about(runs: pd.DataFrame, axes: Collection[str]) -> str:
    """What was run, in a line: of model, machine, memory, batch and trace, what does not vary."""
    fixed = {name: runs[name].iloc[0] for name in runs.columns if name in SCENARIO_KEYS and name not in axes}
    synthetic = any("synthetic trace" in json.loads(labels) for labels in runs["labels"])
    parts = [
        _machine(fixed), _memory(fixed, axes),
        f"batch {fixed['batch']:g}" if "batch" in fixed else "",
        f"routing of {fixed['trace']}" if "trace" in fixed else "",
        "synthetic trace" if synthetic else "",
        f"{draws} draws" if (draws := runs["draw"].nunique()) > 1 else "1 draw",
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _machine(fixed: Mapping[str, Any]) -> str:
    model, machine = fixed.get("model"), fixed.get("hardware")
    return " on ".join(str(part) for part in (model, machine) if isinstance(part, str))


def _memory(fixed: Mapping[str, Any], axes: Collection[str]) -> str:
    if {"cached_share", "gpu_memory_gb"} & set(axes):
        return ""
    if pd.notna(fixed["cached_share"]):
        return f"{fixed['cached_share']:.0%} of the experts cached"
    if pd.isna(fixed["gpu_memory_gb"]):
        return "the card's own memory"
    return f"{fixed['gpu_memory_gb']:g} GB of GPU memory"
