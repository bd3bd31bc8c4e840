"""The data of a sweep's pictures: means over draws, the axes that vary, and remarks on what was left out.

Every row has a value on every axis: null is text, and parameters are in short.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from policies.protocols import PolicyKind
from sim.runs.vocabulary import kind_of
from trilane.common.names import unknown
from trilane.common.quoting import quoted
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.marks import SIGNS
from trilane.output.figures.words import about, null_text, numeric, parameters_text, tuned, value_text
from trilane.study.policy_choice import policy_label
from trilane.study.sweep.axes import PARAMETER, SCENARIO_KEYS

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
        """Rows of a picture of TPOT: policies from the fastest on, then the lower bound; times in ms."""
        order = fastest_first(self.rows)
        rows = self.rows.sort_values("policy", key=lambda names: names.map(order.index), kind="stable")
        bounds = self.bounds.assign(kind=BOUND, policy=BOUND)
        columns = ["policy", "kind", *self.axes, "tpot_ms", "tpot_ms_min", "tpot_ms_max", "draws"]
        return pd.concat([rows, bounds], ignore_index=True)[columns].astype({"draws": "Int64"})

    @property
    def real(self) -> pd.DataFrame:
        """Rows without the clairvoyant runs, which no system can have."""
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
            others = ", ".join(self.axes) or "none"
            raise PictureError(f"expected an axis that varies, {quoted(name)} does not; others do: {others}")
        return self.axes[name]


def clairvoyant(rows: pd.DataFrame) -> pd.Series:
    """A column that is True for the rows of clairvoyant policies."""
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
    """The message where no run is left that a real system could have."""
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
    """The values of each axis that varies, other than policy and draw.

    Of the axes that the sweep ``varied``, those that still vary when policy, draw and the axes before them are fixed
    (the others follow from those); and ``parameters``, if one policy has several sets of them.
    """
    varying: list[str] = []
    for name in [name for name in (*varied, "parameters") if name != "policy"]:
        fixed = runs.groupby(["policy", "draw", *varying], dropna=False)[name]
        if (fixed.nunique(dropna=False) > 1).any():
            varying.append(name)
    known = (*varied, *SCENARIO_KEYS)
    varying += [name for name in asked if name in known and name not in varying and runs[name].notna().any()]
    return {name: values_of(runs[name]) for name in varying}


def policy_there(policy: str, rows: pd.DataFrame) -> str:
    """``policy``, if there are rows of it. Raises PictureError."""
    if policy not in (known := rows["policy"].unique().tolist()):
        raise PictureError(unknown("policy in these results", policy, known))
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
    """Remarks on what was left out, and on how far the results can be trusted."""
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


def fastest_cells(means: SweepMeans) -> pd.DataFrame:
    """A row a setting: the fastest policy, its kind and TPOT, the clairvoyant TPOT and the bound."""
    axes = list(means.axes)
    best = means.real.dropna(subset=axes).sort_values(["tpot_ms", "policy"], kind="stable").drop_duplicates(axes)
    best = best.sort_index()[[*axes, "policy", "kind", "tpot_ms"]]
    least = means.clairvoyant.groupby(axes, sort=False)["tpot_ms"].min().rename("clairvoyant_tpot_ms").reset_index()
    bounds = means.bounds.rename(columns={"tpot_ms": "lower_bound_tpot_ms"})
    return best.merge(least, on=axes, how="left").merge(bounds, on=axes, how="left")


def left_to_gain(cell: Mapping[Hashable, Any], between: str) -> str:
    """The clairvoyant run and the bound of a cell, in ms, where there are any."""
    columns = {SIGNS[PolicyKind.CLAIRVOYANT]: "clairvoyant_tpot_ms", "bound": "lower_bound_tpot_ms"}
    return between.join(f"{sign} {cell[key]:,.1f}" for sign, key in columns.items() if pd.notna(cell[key]))


# --- values on the axes -----------------------------------------------------------------------------------------------

_PARAMETERS = "parameters"


def with_words(results: pd.DataFrame) -> pd.DataFrame:
    """The results with text for null on every axis other than parameters: null is a value too, such as the card's own
    memory. ``parameters`` keeps what differs between the runs of a policy (``labelled``), and is null where nothing
    does.
    """
    results = labelled(results)
    rows = results.assign(**{_PARAMETERS: _in_short(results)})
    for name in results.attrs["axes"]:
        if not of_policies(name) and rows[name].isna().any():
            rows = filled(rows, name)
    return rows


def labelled(results: pd.DataFrame) -> pd.DataFrame:
    """The results with the parameters of a policy in its name, where the axis ``policy`` has it with several sets of
    them: ``dali{window: 8}`` next to ``dali{window: 4}``. What another axis varies stays out of the name.
    """
    varied = results.attrs["axes"]
    if "policy" not in varied or _PARAMETERS in varied:
        return results
    differ = _differing(results, [name for name in varied if name != "policy"])
    names = [
        policy_label(policy, {name: value for name, value in json.loads(text).items() if name in differ[policy]})
        if policy in differ else policy for policy, text in zip(results["policy"], results[_PARAMETERS], strict=True)
    ]
    return results.assign(policy=names)


def _differing(results: pd.DataFrame, axes: Sequence[str]) -> dict[str, set[str]]:
    """By policy, the parameters with several values in one setting of the other axes."""
    by = ["policy", "draw", *axes]
    several = results[results.groupby(by, dropna=False)[_PARAMETERS].transform("nunique") > 1]
    found: dict[str, set[str]] = {}
    for key, texts in several.groupby(by, dropna=False)[_PARAMETERS]:
        documents = [json.loads(str(text)) for text in texts.unique()]
        values = {name: {json.dumps(each.get(name)) for each in documents} for each in documents for name in each}
        found.setdefault(str(key[0]), set()).update(name for name, many in values.items() if len(many) > 1)
    return found


def of_policies(name: str) -> bool:
    """True for an axis that some policies have and others lack."""
    return name == _PARAMETERS or name.startswith(PARAMETER)


def takers(results: pd.DataFrame, name: str) -> set[str]:
    """The policies that have a value anywhere on an axis of parameters."""
    return set(results.loc[results[name].notna(), "policy"])


def values_of(column: pd.Series) -> list[Any]:
    """The values of a column: numbers ascending, then text in the table's order."""
    values = column.dropna().unique().tolist()
    return sorted(value for value in values if numeric([value])) + [value for value in values if not numeric([value])]


def on_axes(runs: pd.DataFrame, axes: Collection[str], results: pd.DataFrame) -> pd.DataFrame:
    """Runs with a value on every axis. A policy that lacks a parameter is repeated at every value that other policies
    were given in the same setting of the other axes; a policy that has it, but was given no value, used its default.

    ``results``: all rows, including failed and hidden ones, which say which policies have a parameter.
    """
    setting = [name for name in axes if not of_policies(name)]
    for name in filter(of_policies, axes):
        having = takers(results, name)
        has = runs["policy"].isin(having)
        values = _given(results[results["policy"].isin(having)], runs[has], [*setting, name])
        lacking = runs[~has].drop(columns=name)
        copies = lacking.merge(values, on=setting, how="left") if setting else lacking.merge(values, how="cross")
        runs = filled(pd.concat([runs[has].astype({name: object}), copies[runs.columns]], ignore_index=True), name)
    return runs


def _given(rows: pd.DataFrame, runs: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The values of a parameter by setting, of those in ``runs``; the `parameters` of failed runs are not known."""
    known = rows[rows["error"] == ""] if columns[-1] == _PARAMETERS else rows
    values = filled(known[columns], columns[-1]).drop_duplicates()
    return values[values[columns[-1]].isin(filled(runs, columns[-1])[columns[-1]])]


def filled(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows with text for null on an axis."""
    values = rows[name].astype(object).where(rows[name].notna(), null_text(name))
    return rows.assign(**{name: values.infer_objects()})


def _in_short(results: pd.DataFrame) -> pd.Series:
    """Parameters as "window=8": for each policy those that differ between its completed runs."""
    ran = results[results["error"] == ""]
    short: dict[tuple[str, str], str | None] = {}
    for policy, texts in ran.groupby("policy")[_PARAMETERS]:
        documents = {str(text): json.loads(str(text)) for text in texts.unique()}
        keys = dict.fromkeys(key for document in documents.values() for key in document)
        differ = [key for key in keys if len({json.dumps(document.get(key)) for document in documents.values()}) > 1]
        for text, document in documents.items():
            short[str(policy), text] = parameters_text({key: document.get(key) for key in differ}) or None
    pairs = zip(results["policy"], results[_PARAMETERS], strict=True)
    return pd.Series([short.get(pair) for pair in pairs], index=results.index, dtype=object)


def chosen(results: pd.DataFrame, where: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Rows that have one of the named values of every key; a policy that lacks a parameter has all of its values.

    Raises PictureError for an unknown key or value.
    """
    keys = list(dict.fromkeys([*results.attrs["axes"], *SCENARIO_KEYS]))
    kept = pd.Series(True, index=results.index)
    for name, texts in where.items():
        if name not in keys:
            raise PictureError(f"--where: {unknown('key', name, keys)}")
        column = filled(results, name)[name]
        lacks = ~results["policy"].isin(takers(results, name)) & of_policies(name)
        known = values_of(column[~lacks])
        kept &= column.isin([value for text in texts for value in _named(name, text, known)]) | lacks
    return results[kept]


def _named(name: str, text: str, known: Sequence[Any]) -> list[Any]:
    """The values that a text names. Raises PictureError if there is none."""
    text = null_text(name) if text == "null" else text
    wanted = [value for value in known if text in (str(value), value_text(name, value)) or _number(text) == value]
    if not wanted:
        words = ", ".join(value_text(name, value) for value in known) or "none"
        raise PictureError(f"--where {name}={text}: expected one of the values in the table: {words}")
    return wanted


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
