"""The page of ``trilane whatif``: a table, sentences that say what it shows, and what could not run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from policies.protocols import PolicyKind
from trilane.output.figures.marks import marked, meanings
from trilane.output.figures.sweep_means import SweepMeans, fastest_cells, left_to_gain
from trilane.output.figures.words import (
    fastest,
    gain,
    hardly_matters,
    intervals,
    setting_words,
    tally,
    times_table,
    value_text,
    value_words,
)
from trilane.output.pages.output import Part, heading, legend, number, reason_of, table
from trilane.study.sweep.axes import axis_label

_TITLE = 12  # letters of a column's name, from which on it is broken
_MEANINGS = {
    "TPOT": "time per output token after the first, ms; <: the fastest of its line",
    "lower bound": "no policy that keeps the routing can be faster on this machine",
    "tokens/s": "of the whole batch, with the fastest policy",
}


def page(means: SweepMeans, axes: Sequence[str], own: Sequence[str] = ()) -> list[Part]:
    """The question, the table, and what its columns and marks mean. ``own``: policies that get a table of their own
    where that of two axes shows the fastest alone."""
    remark = [f"\n{means.tuned}"] if means.tuned else []
    if len(axes) == 1:
        return [heading(f"TPOT in ms: {means.about}"), *_by_policy(means, axes[0]), *remark]
    title = heading(f"fastest policy and its TPOT in ms: {means.about}")
    tables = [part for policy in own for part in _of_policy(means, policy, axes[0], axes[1])]
    return [title, *_by_cell(means, axes[0], axes[1]), *tables, *remark]


def _by_policy(means: SweepMeans, axis: str) -> list[Part]:
    """A line a value, a column a policy, then the clairvoyant run, the bound, and tokens per second."""
    real = times_table(means.real, axis, means.axis(axis))
    clairvoyant = times_table(means.clairvoyant, axis, means.axis(axis)).reindex(real.index)
    bounds = means.bounds.set_index(axis)["tpot_ms"].reindex(real.index)
    batch = means.runs.groupby(axis)["batch"].first()
    lines = [
        [
            value_text(axis, value),
            *(f"{number(time, 2)} {'<' if time == real.loc[value].min() else ' '}" for time in real.loc[value]),
            *(number(time, 2) for time in (*clairvoyant.loc[value], bounds[value])),
            f"{1000 * batch[value] / real.loc[value].min():,.1f}",
        ]
        for value in real.index
    ]
    names = [marked(*policy) for policy in (*real.columns, *clairvoyant.columns)]
    columns = [axis_label(axis), *names, "lower bound", "tokens/s"]
    return [table(list(map(_broken, columns)), lines), legend({**_MEANINGS, **meanings(means.kinds)})]


def _broken(name: str) -> str:
    """The name of a column, on two lines if it is long."""
    if len(name) < _TITLE:
        return name
    places = [match.end() for match in re.finditer(r"[ -]", name)] or [len(name)]
    place = min(places, key=lambda place: abs(place - len(name) / 2))
    return f"{name[:place].rstrip()}\n{name[place:]}"


def _by_cell(means: SweepMeans, rows: str, columns: str) -> list[Part]:
    """A line a value of the first axis, a column a value of the second; below each time what is left to gain."""
    cells = fastest_cells(means)
    texts = {
        (cell[rows], cell[columns]): f"{marked(cell['policy'], cell['kind'])} {cell['tpot_ms']:,.2f}\n"
        f"{left_to_gain(cell, ', ')}"
        for cell in cells.to_dict("records")
    }
    lines = [
        [value_text(rows, row), *(texts.get((row, column), "-") for column in means.axis(columns))]
        for row in means.axis(rows)
    ]
    header = [axis_label(rows), *(value_words(columns, value) for value in means.axis(columns))]
    kinds = {*cells["kind"], *means.clairvoyant["kind"]}
    return [table(header, lines), legend({**meanings(kinds), "bound": _MEANINGS["lower bound"]})]


def _of_policy(means: SweepMeans, policy: str, rows: str, columns: str) -> list[Part]:
    """The times of one policy, and what they are over those of the fastest."""
    fastest_ms: dict[Any, float] = {}
    mine: dict[Any, float] = {}
    for run in means.real.to_dict("records"):
        place, time = (run[rows], run[columns]), run["tpot_ms"]
        fastest_ms[place] = min(time, fastest_ms.get(place, time))
        if run["policy"] == policy:
            mine[place] = time
    texts = {place: f"{time:,.2f} {time / fastest_ms[place]:.2f}x" for place, time in mine.items()}
    lines = [
        [value_text(rows, row), *(texts.get((row, column), "-") for column in means.axis(columns))]
        for row in means.axis(rows)
    ]
    header = [axis_label(rows), *(value_words(columns, value) for value in means.axis(columns))]
    return ["", heading(f"TPOT of {policy} in ms, and over that of the fastest"), table(header, lines)]


def findings(means: SweepMeans, axes: Sequence[str]) -> list[str]:
    """Sentences about the table, by the rules of ``figures.words``; of two axes, for each value of the second."""
    if len(axes) == 1:
        return _findings(times_table(means.real, axes[0], means.axis(axes[0])))
    cells = fastest_cells(means)
    said = [tally(zip(cells["policy"], cells["kind"], strict=True))]
    for value in means.axis(axes[1]):
        part = times_table(means.real[means.real[axes[1]] == value], axes[0], means.axis(axes[0]))
        if len(part):
            said.append(f"{setting_words(axes[1], value)}: {gain(part) or fastest(part)}")
    return [_sentence(text) for text in said]


def _findings(times: pd.DataFrame) -> list[str]:
    """Sentences about the gain, the fastest policy, also of those that keep the routing, where it matters little."""
    exact = times[[policy for policy in times.columns if policy[1] == PolicyKind.KEEPS]]
    said = [gain(times), _throughput(times), fastest(times)]
    if any(part.policy[1] != PolicyKind.KEEPS for part in intervals(times)) and exact.shape[1]:
        said.append(f"of those that keep the routing, {fastest(exact.dropna(how='all'))}")
    said.append(hardly_matters(times))
    return [_sentence(text) for text in said if text]


def _throughput(times: pd.DataFrame) -> str:
    """Tokens per second of the smallest and the largest batch."""
    if times.index.name != "batch" or len(times) == 1:
        return ""
    rates = [f"{1000 * batch / times.loc[batch].min():,.1f}" for batch in (times.index[0], times.index[-1])]
    return f"the throughput of the whole batch goes from {rates[0]} to {rates[1]} tokens/s"


def _sentence(text: str) -> str:
    """With a capital and a full stop; names of policies keep their small letters."""
    first = text if text.split()[0] not in ("from", "of", "the", "throughout,") else text[0].upper() + text[1:]
    return f"{first}."


def failures(results: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """The runs that were refused, and why: a line a reason, with its values and policies."""
    failed = results[results["error"] != ""]
    lines = []
    for _, rows in failed.groupby(failed["error"].map(reason_of), sort=False):
        values = [", ".join(value_words(axis, value) for value in dict.fromkeys(rows[axis])) for axis in axes]
        some = "" if set(rows["policy"]) == set(results["policy"]) else f" ({', '.join(dict.fromkeys(rows['policy']))})"
        reason = rows["error"].iloc[0].partition(": ")[2]
        lines.append(f"left out {' with '.join(values)}{some}: {reason}")
    return lines
