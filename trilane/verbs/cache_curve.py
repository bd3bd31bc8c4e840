"""``trilane cache-curve``: hit rate against cache size, replayed from a trace."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from trilane.common.quoting import quoted
from trilane.output.pages.output import (
    JsonOption,
    check_targets,
    heading,
    note,
    percent,
    progress,
    report,
    table,
    working,
)
from trilane.verbs.inputs import policies_in, policy_files, read_any, trace_in_words
from trilane.verbs.options import OptionError

if TYPE_CHECKING:
    from trilane.study.cache_curve import CacheCurve, CurvePoint

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def cache_curve(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="Trace file, bundled trace, or a log to import.")],
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Cache policies. FILE.py or FILE.py:NAME loads a policy of your own, for its cache. Default: lru, "
            "lfu, random, layer-lru, belady, belady-bypass; the last two are clairvoyant.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(metavar="SIZE,SIZE", help="Cache sizes such as 500MiB (of 2^20 bytes) or 4GB (of 10^9 bytes). "
                                               "Default: 10 to 80 % of all experts."),
    ] = None,
    seed: Annotated[int, typer.Option(help="For the random policy.")] = 0,
    json: JsonOption = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the curve.")] = None,
) -> None:
    """Hit rate of one expert cache against its size.

    A logical replay without time: one sequence after the other, at batch 1; the cache stays warm in between.

    All experts of a layer are looked up together, and an expert counts once for a whole prompt.
    """
    from trilane.study.cache_curve import CURVE_POLICIES, CacheCurve, curve_policy

    names = list(CURVE_POLICIES) if policies is None else policies_in(policies)
    check_targets(json, picture=png, inputs=[trace, *policy_files()])
    for name in names:
        curve_policy(name)  # an unknown one is refused now
    with working("reading the trace"):
        curve = CacheCurve.prepared(read_any(trace), seed)
    points = [
        curve.point(name, size) for name, size in progress(list(product(names, _sizes(curve, pool))), "replaying")
    ]
    routing = f"routing of {trace_in_words(trace, curve.trace)}"
    counted = f"{points[0].lookups:,} lookups of prompts and answers, empty caches at first"
    title = heading(f"hit rate by cache size, {routing}, {counted}")
    rows = [point._asdict() for point in points]
    record = {"trace": trace, "synthetic": curve.trace.provenance.get("synthetic"), "points": rows}
    report(json, record, title, _table(curve, names, points), *_statistics(trace, curve))
    if png:
        from trilane.output.figures import plot_hit_rate_curve, save_figure
        from trilane.output.figures.words import short_name

        about = f"routing of {trace_in_words(short_name(trace), curve.trace)}"
        save_figure(plot_hit_rate_curve(rows, about), png)
        note(f"picture: {png}")


def _statistics(trace: str, curve: CacheCurve) -> list[str]:
    """Sentence on whose statistics made-up routing has."""
    from traces.synthesis.named import is_synthetic
    from traces.synthesis.spread import in_words

    return [f"\nstatistics of the routing: {in_words(curve.trace.shape, 0.25)}"] if is_synthetic(trace) else []


def _sizes(curve: CacheCurve, pool: str | None) -> list[int]:
    """Cache sizes in bytes, ascending."""
    if pool is None:
        from trilane.study.cache_curve import DEFAULT_SHARES

        return [max(curve.least_bytes, round(share * curve.trace.shape.routed_bytes)) for share in DEFAULT_SHARES]
    sizes = sorted({parse_size(text) for text in pool.split(",")})
    for size in sizes:
        curve.check(size)
    return sizes


def parse_size(text: str) -> int:
    """Bytes of a size such as ``500MiB`` or ``4GB``. Raises OptionError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise OptionError(f"expected a size such as 500MiB or 4GB, got {quoted(text)}")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def _table(curve: CacheCurve, names: list[str], points: list[CurvePoint]) -> Table:
    from trilane.study.cache_curve import unit_of

    whole = curve.trace.shape.routed_bytes
    sizes = sorted({point.capacity_bytes for point in points})
    rate = {(point.policy, point.capacity_bytes): point for point in points}
    unit, factor = unit_of(sizes[0])
    rows = [
        [
            f"{size / factor:,.{0 if size >= 1000 * factor else 1}f}",
            percent(size / whole),
            *(percent(rate[name, size].hit_rate, 1) for name in names),
        ]
        for size in sizes
    ]
    return table([f"\n{unit}", "of all\nexperts", *(f"\n{name}" for name in names)], rows, text_columns=0)
