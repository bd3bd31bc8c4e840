"""The answer of ``trilane whatif``: a table, sentences that say what it shows, and what could not run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trilane.pages.output import heading, legend, table
from trilane.pages.reasons import reason_of

if TYPE_CHECKING:
    import pandas as pd

    from trilane.figures.sweep_means import SweepMeans

_TITLE = 12  # letters of a column's name, from where it is broken
_MEANINGS = {
    "TPOT": "time per output token after the first, ms; <: the fastest of its line",
    "lower bound": "no policy that keeps the routing can be faster on this machine",
    "tokens/s": "of the whole batch, with the fastest policy",
}


def page(means: SweepMeans, axes: Sequence[str]) -> list[Table | Text | str]:
    """The question, the table, and what its columns and marks mean."""
    if len(axes) == 1:
        return [heading(f"TPOT in ms: {means.about}"), *_by_policy(means, axes[0])]
    return [heading(f"fastest policy and its TPOT in ms: {means.about}"), *_by_cell(means, axes[0], axes[1])]


def _by_policy(means: SweepMeans, axis: str) -> list[Table | Text | str]:
    """A line a value, a column a policy, then the clairvoyant run, the bound, and tokens per second."""
    from trilane.figures.axis_words import value_text
    from trilane.figures.winners import times_table
    from trilane.study.sweep.axes import axis_label

    real = times_table(means.real, axis, means.axis(axis))
    seers = times_table(means.seers, axis, means.axis(axis)).reindex(real.index)
    bounds = means.bounds.set_index(axis)["tpot_ms"].reindex(real.index)
    batch = means.runs.groupby(axis)["batch"].first()
    lines = [
        [
            value_text(axis, value),
            *(_cell(time, real.loc[value].min()) for time in real.loc[value]),
            *(_cell(time) for time in seers.loc[value]),
            _cell(bounds[value]),
            f"{1000 * batch[value] / real.loc[value].min():,.1f}",
        ]
        for value in real.index
    ]
    columns = [axis_label(axis), *map(str, (*real.columns, *seers.columns)), "lower bound", "tokens/s"]
    return [table(_headers(columns), lines), legend({**_MEANINGS, **_marks(means.rows["mark"])})]


def _headers(columns: Sequence[str]) -> list[str]:
    """Names of columns, long ones on two lines; the last line of all names is at the foot of the header."""
    names = [_broken(name) for name in columns]
    tall = any("\n" in name for name in names)
    return [f"\n{name}" if tall and "\n" not in name else name for name in names]


def _broken(name: str) -> str:
    if len(name) < _TITLE:
        return name
    places = [match.end() for match in re.finditer(r"[ -]", name)] or [len(name)]
    place = min(places, key=lambda place: abs(place - len(name) / 2))
    return f"{name[:place].rstrip()}\n{name[place:]}"


def _cell(time: float, fastest: float | None = None) -> str:
    """A time, marked if it is the fastest; a dash where there is none."""
    text = "-" if time != time else f"{time:,.2f}"
    return text if fastest is None else f"{text} {'<' if time == fastest else ' '}"


def _by_cell(means: SweepMeans, rows: str, columns: str) -> list[Table | Text | str]:
    """A line a value of the first axis, a column a value of the second; below each time what is left to gain."""
    from trilane.figures.axis_words import value_text, value_words
    from trilane.figures.heat_map import fastest_cells, left_to_gain
    from trilane.study.sweep.axes import axis_label

    cells = fastest_cells(means).set_index([rows, columns])
    texts = {
        place: f"{cell['name']} {cell['tpot_ms']:,.2f}\n{left_to_gain(cell, ', ')}"
        for place, cell in zip(cells.index, cells.to_dict("records"), strict=True)
    }
    lines = [
        [value_text(rows, row), *(texts.get((row, column), "-") for column in means.axis(columns))]
        for row in means.axis(rows)
    ]
    header = [axis_label(rows), *(value_words(columns, value) for value in means.axis(columns))]
    meanings = _marks([*(name[-2:] for name in cells["name"]), *means.rows["mark"]])
    return [table(header, lines), legend({**meanings, "bound": _MEANINGS["lower bound"]})]


def _marks(marks: Iterable[str]) -> dict[str, str]:
    """The marks that are there, for the legend."""
    from trilane.figures.marks import MEANINGS

    there = {mark.strip() for mark in marks}
    return {sign: meaning for sign, meaning in MEANINGS.items() if sign in there}


def findings(means: SweepMeans, axes: Sequence[str]) -> list[str]:
    """What the table shows, by the rules of ``trilane.figures.winners``; of two axes, for each value of the second."""
    from trilane.figures.axis_words import setting_words
    from trilane.figures.heat_map import fastest_cells
    from trilane.figures.winners import gain, overall, times_table

    if len(axes) == 1:
        return _findings(times_table(means.real, axes[0], means.axis(axes[0])), axes[0])
    said = [_sentence(overall(means.real, fastest_cells(means)["name"].tolist()))]
    for value in means.axis(axes[1]):
        part = times_table(means.real[means.real[axes[1]] == value], axes[0], means.axis(axes[0]))
        if len(part):
            said.append(_sentence(f"{setting_words(axes[1], value)}: {gain(part, axes[0])}"))
    return said


def _findings(times: pd.DataFrame, axis: str) -> list[str]:
    """What is gained along the axis; who is fastest, also of those that keep the routing; how much that matters."""
    from trilane.figures.winners import gain, gains_most, stretches, until_the_end, who

    said = [gain(times, axis)] if len(times) > 1 else []
    if axis == "batch" and len(times) > 1:
        rates = [f"{1000 * batch / times.loc[batch].min():,.1f}" for batch in (times.index[0], times.index[-1])]
        said.append(f"the batch as a whole goes from {rates[0]} to {rates[1]} tokens/s")
    said += [gains_most(times, axis), who(times, axis)]
    exact = times[[name for name in times.columns if not str(name).endswith("~")]]
    if any(part.policy.endswith("~") for part in stretches(times)) and exact.shape[1]:
        said.append(f"of those that keep the routing, {who(exact.dropna(how='all'), axis)}")
    said.append(until_the_end(times, axis))
    return [_sentence(text) for text in said if text]


def _sentence(text: str) -> str:
    """With a full stop; names of policies keep their small letters."""
    first = text if text.split()[0] not in ("from", "of", "the", "what") else text[0].upper() + text[1:]
    return f"{first}."


def failures(results: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """What could not run, and why: a line a reason, with its values and policies; reasons that differ in numbers alone
    are one.
    """
    from trilane.figures.axis_words import value_words

    failed = results[results["error"] != ""]
    lines = []
    for _, rows in failed.groupby(failed["error"].map(reason_of), sort=False):
        told = []
        for axis in axes:
            values = list(dict.fromkeys(rows[axis]))
            told.append(", ".join(value_words(axis, value) for value in values))
        who = "" if set(rows["policy"]) == set(results["policy"]) else f" ({', '.join(dict.fromkeys(rows['policy']))})"
        reason = rows["error"].iloc[0].partition(": ")[2]
        lines.append(f"left out {' with '.join(told)}{who}: {reason}")
    return lines
