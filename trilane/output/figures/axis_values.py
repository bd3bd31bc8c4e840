"""Rows of a sweep with a value on every axis: text for null, parameters in short, and the choice of rows by value."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from trilane.common.names import unknown
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.words import null_text, numeric, parameters_text, value_text
from trilane.study.sweep.axes import PARAMETER, SCENARIO_KEYS

_PARAMETERS = "parameters"


def with_words(results: pd.DataFrame) -> pd.DataFrame:
    """The results with text for null on every axis other than parameters: null is a value too, such as the card's own
    memory. ``parameters`` keeps what differs between the runs of a policy, and is null where nothing does.
    """
    found = results.assign(**{_PARAMETERS: _in_short(results)})
    for name in results.attrs["axes"]:
        if not of_policies(name) and found[name].isna().any():
            found = filled(found, name)
    return found


def of_policies(name: str) -> bool:
    """Whether an axis is one that some policies have and others lack."""
    return name == _PARAMETERS or name.startswith(PARAMETER)


def takers(results: pd.DataFrame, name: str) -> set[str]:
    """The policies that have a value anywhere on an axis of parameters."""
    return set(results.loc[results[name].notna(), "policy"])


def values_of(column: pd.Series) -> list[Any]:
    """The values of a column: numbers ascending, then text in the table's order."""
    there = column.dropna().unique().tolist()
    return sorted(value for value in there if numeric([value])) + [value for value in there if not numeric([value])]


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
    """With text for null on an axis."""
    values = rows[name].astype(object).where(rows[name].notna(), null_text(name))
    return rows.assign(**{name: values.infer_objects()})


def _in_short(results: pd.DataFrame) -> pd.Series:
    """Parameters as "window=8": for each policy those that differ between its completed runs."""
    ran = results[results["error"] == ""]
    short: dict[tuple[str, str], str | None] = {}
    for policy, texts in ran.groupby("policy")[_PARAMETERS]:
        documents = {str(text): json.loads(str(text)) for text in texts.unique()}
        keys = dict.fromkeys(key for document in documents.values() for key in document)
        differ = [key for key in keys if len({json.dumps(each.get(key)) for each in documents.values()}) > 1]
        for text, document in documents.items():
            short[str(policy), text] = parameters_text({key: document.get(key) for key in differ}) or None
    pairs = zip(results["policy"], results[_PARAMETERS], strict=True)
    return pd.Series([short.get(pair) for pair in pairs], index=results.index, dtype=object)


# --- choosing rows ----------------------------------------------------------------------------------------------------


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
        there = values_of(column[~lacks])
        kept &= column.isin([value for text in texts for value in _named(name, text, there)]) | lacks
    return results[kept]


def _named(name: str, text: str, there: Sequence[Any]) -> list[Any]:
    """The values that a text names. Raises PictureError if there is none."""
    text = null_text(name) if text == "null" else text
    wanted = [value for value in there if text in (str(value), value_text(name, value)) or _number(text) == value]
    if not wanted:
        words = ", ".join(value_text(name, value) for value in there) or "none"
        raise PictureError(f"--where {name}={text}: expected one of the values in the table: {words}")
    return wanted


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
