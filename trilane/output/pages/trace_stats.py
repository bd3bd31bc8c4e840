"""The pages of ``trilane trace stats``: one trace described, or several side by side, with published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from traces.models.catalogue import Published
from traces.statistics import one_sequence_statistics, trace_statistics
from traces.trace import Trace
from trilane.output.figures.words import short_name
from trilane.output.pages.output import Part, heading, markdown_table, number, pairs, percent, table
from trilane.output.pages.widths import Markdown
from trilane.study.cache_curve import CacheCurve

Statistics = Mapping[str, Any]


def description(name: str, values: Statistics) -> list[Part]:
    """The statistics of one trace."""
    means, lags = values["layer_means"], values["lag_profile"]
    facts = [(key.replace("_", " "), number(value, 3)) for key, value in means.items()]
    facts.append(("prefill decode similarity", number(values["prefill_decode_similarity"], 3)))
    rows = [[str(lag["lag"]), percent(lag["probability"], 1), percent(lag["chance"], 1)] for lag in lags[:8]]
    parts: list[Part] = [
        heading(f"trace {name}: {values['sequences']} sequences, {values['tokens']} tokens; means over layers"),
        pairs(facts),
        heading("\nchance that an expert used now is used again so many decode steps later"),
        table(["steps", "seen", "if steps were independent"], rows, text_columns=0),
    ]
    if values["forecasts"]:
        columns = ("accuracy_at_k", "recall_at_m")
        hits = [[kind, *(percent(hit[name], 1) for name in columns)] for kind, hit in values["forecasts"].items()]
        parts += [heading("\nforecasts of later layers"), table(["forecast", "accuracy@k", "recall@m"], hits)]
    return parts


# --- several traces ---------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """The label and the format of a quantity in the table."""

    label: str
    text: Callable[[float | None], str] = partial(percent, digits=1)


_GINI = partial(number, digits=2)
_LAGS = (1, 2, 4, 8, 16)
_ROWS: Mapping[str, _Row] = {
    "gini": _Row("popularity: Gini", _GINI),
    "top_10_percent_share": _Row("popularity: share of the top 10 %"),
    "entropy": _Row("popularity: entropy"),
    "one_sequence_gini": _Row("in one sequence: Gini", _GINI),
    "one_sequence_top_10_percent_share": _Row("in one sequence: share of the top 10 %"),
    "one_sequence_entropy": _Row("in one sequence: entropy"),
    "one_sequence_likeness": _Row("popularity in one sequence and in all: correlation", _GINI),
    **{f"overlap@{lag}": _Row(f"used again {lag} token{'s' if lag > 1 else ''} later") for lag in _LAGS},
    "chance": _Row("used again by chance"),
    "one_sequence_chance": _Row("used again by chance in one sequence"),
    "reuse_distance_p50": _Row("median reuse distance, tokens", number),
    "prefill_decode_similarity": _Row("prefill/decode similarity"),
    "layer_lru_hit_rate": _Row("hit rate, LRU per layer, 25 % cached"),
}  # and a row for each forecast, such as gate@1


def comparison(traces: Mapping[str, Statistics], figures: Sequence[Published], *, markdown: bool = False) -> list[Part]:
    """A table of traces by name, each with its ``comparable_statistics``, and of published figures, whose sources are
    numbered below it.
    """
    columns, rows, notes = _comparison(traces, figures)
    gap = [""] if notes else []
    if markdown:
        lines = (f"{place}. {note}" for place, note in enumerate(notes, 1))
        return [Markdown("\n".join([markdown_table(columns, rows, newline=", "), *gap, *lines]))]
    marked = (f"[{place}] {note}" for place, note in enumerate(notes, 1))
    return [table(columns, rows, wrap=bool(figures)), *gap, *marked]


def comparable_statistics(trace: Trace) -> dict[str, Any]:
    """``trace_statistics``, and two statistics by which traces of different lengths can be compared.

    ``one_sequence``: popularity within single sequences. ``layer_lru_hit_rate``: in decode, of an LRU cache that holds
    a quarter of every layer.
    """
    values = trace_statistics(trace)
    point = CacheCurve(trace).point("layer-lru", trace.shape.routed_bytes // 4)
    rate = point.hit_rate_decode if values["decode_tokens"] else None
    return {**values, "one_sequence": one_sequence_statistics(trace), "layer_lru_hit_rate": rate}


def _quantities(values: Statistics) -> dict[str, float | None]:
    """The quantities of the table, by the names of ``_ROWS``."""
    means, lags = values["layer_means"], values["lag_profile"]
    return {
        **{name: means[name] for name in ("gini", "top_10_percent_share", "entropy", "reuse_distance_p50")},
        **{f"one_sequence_{name}": value for name, value in values["one_sequence"].items()},
        **{f"overlap@{lag['lag']}": lag["probability"] for lag in lags if lag["lag"] in _LAGS},
        "chance": lags[0]["chance"],
        "prefill_decode_similarity": values["prefill_decode_similarity"],
        "layer_lru_hit_rate": values["layer_lru_hit_rate"],
        **{kind: forecast["accuracy_at_k"] for kind, forecast in values["forecasts"].items()},
    }


def _comparison(
    traces: Mapping[str, Statistics], figures: Sequence[Published]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Columns and rows of the table, and the notes to which its last column refers."""
    quantities = [_quantities(values) for values in traces.values()]
    named = {name for column in quantities for name in column} | {figure.quantity for figure in figures}
    rows = {**_ROWS, **{kind: _Row(f"accuracy@k of {kind}") for kind in sorted(named - set(_ROWS))}}
    figures = sorted(figures, key=lambda figure: list(rows).index(figure.quantity))
    cells = [
        ["sequences", *(str(values["sequences"]) for values in traces.values())],
        ["tokens", *(f"{values['tokens']:,}" for values in traces.values())],
        ["layers / experts / top-k", *("{layers} / {experts} / {top_k}".format(**v) for v in traces.values())],
        *([row.label, *(row.text(column.get(name)) for column in quantities)] for name, row in rows.items()),
    ]
    columns = ["", *(_column(name, values) for name, values in traces.items())]
    if figures:
        columns.append("published")
        cited: dict[str, list[str]] = {name: [] for name in rows}
        for place, figure in enumerate(figures, 1):
            value = " to ".join(map(rows[figure.quantity].text, figure.ends))
            cited[figure.quantity].append(f"{value} [{place}]")
        for line, texts in zip(cells, [[], [], [], *cited.values()], strict=True):
            line.append("\n".join(texts))
    return columns, cells, [f"{figure.model}: {figure.source}; {figure.note}" for figure in figures]


def _column(name: str, values: Statistics) -> str:
    """The heading of a trace's column, with a second line for a synthetic trace."""
    marked = values["synthetic"] and not name.startswith("synthetic:")
    return f"{short_name(name)}\n(synthetic)" if marked else short_name(name)
