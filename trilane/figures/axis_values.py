"""A value on every axis for every run of a sweep: words where there is none, parameters in short, and policies that
lack a parameter at each of its values.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pandas as pd

from trilane.figures.null_words import null_text
from trilane.study.sweep.axes import PARAMETER

_PARAMETERS = "parameters"


def with_words(results: pd.DataFrame) -> pd.DataFrame:
    """The results with words for null on every axis that is none of parameters: null is a value too, such as the card's
    own memory. Of ``parameters`` there is left what differs between the runs of a policy, and null where nothing does.
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


def on_axes(runs: pd.DataFrame, axes: Collection[str], results: pd.DataFrame) -> pd.DataFrame:
    """Runs with a value on every axis. A policy that lacks a parameter is the same at all values that others were asked
    to have in the same setting of what is no parameter; what then has no value played with the policy's default.

    ``results``: all rows, also of what failed or is not shown, which say who has a parameter.
    """
    setting = [name for name in axes if not of_policies(name)]
    for name in filter(of_policies, axes):
        having = takers(results, name)
        has = runs["policy"].isin(having)
        values = _asked(results[results["policy"].isin(having)], runs[has], [*setting, name])
        lacking = runs[~has].drop(columns=name)
        copies = lacking.merge(values, on=setting, how="left") if setting else lacking.merge(values, how="cross")
        runs = filled(pd.concat([runs[has].astype({name: object}), copies[runs.columns]], ignore_index=True), name)
    return runs


def _asked(rows: pd.DataFrame, runs: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The values of a parameter by setting, of those that ``runs`` have; of what failed, `parameters` are not known."""
    known = rows[rows["error"] == ""] if columns[-1] == _PARAMETERS else rows
    values = filled(known[columns], columns[-1]).drop_duplicates()
    return values[values[columns[-1]].isin(filled(runs, columns[-1])[columns[-1]])]


def filled(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """With words for null on an axis."""
    values = rows[name].astype(object).where(rows[name].notna(), null_text(name))
    return rows.assign(**{name: values.infer_objects()})


def _in_short(results: pd.DataFrame) -> pd.Series:
    """Parameters as "window=8": of each policy those that differ between the runs that it ended."""
    ran = results[results["error"] == ""]
    short: dict[tuple[str, str], str | None] = {}
    for policy, texts in ran.groupby("policy")[_PARAMETERS]:
        documents = {str(text): json.loads(str(text)) for text in texts.unique()}
        differ = _differing(list(documents.values()))
        for text, document in documents.items():
            short[str(policy), text] = ", ".join(f"{key}={_plain(document.get(key))}" for key in differ) or None
    pairs = zip(results["policy"], results[_PARAMETERS], strict=True)
    return pd.Series([short.get(pair) for pair in pairs], index=results.index, dtype=object)


def _differing(documents: list[dict[str, Any]]) -> list[str]:
    """Keys that not all have with the same value, in the order written."""
    keys = dict.fromkeys(key for document in documents for key in document)
    return [key for key in keys if len({json.dumps(document.get(key)) for document in documents}) > 1]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
