"""The page of ``trilane quality --published``: losses of large models, and how far mini models and the curve tell them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trilane.output.figures.quality_words import nats
from trilane.output.pages.output import Part, heading, number, percent, table
from trilane.study.quality.curve import AgainstPublished, Curve, LeftOut, against_published, by_cause, points_of
from trilane.study.quality.published import PublishedQuality, published
from trilane.study.quality.summary import Quality
from trilane.study.quality.trends import Trend, trends

ENOUGH = 0.7  # of the published values inside the band, for the curve to be used for large models


def published_page(measured: Sequence[Quality], curve: Curve) -> list[Part]:
    """Trends by table, the curve with its error, and published values against its band."""
    return [
        *_trends(trends(measured)), "", *_curve(curve, by_cause(points_of(measured))), "",
        *_against(against_published(curve), curve), "", *_values(published()),
    ]


def _trends(found: Sequence[Trend]) -> list[Part]:
    models = list(dict.fromkeys(trend.model for trend in found))
    groups = dict.fromkeys(trend.group for trend in found)
    by_group = {group: {trend.model: trend for trend in found if trend.group == group} for group in groups}
    rows = [
        [group, str(max(t.points for t in own.values())),
         *(number(own[model].tau, 2) if model in own else "-" for model in models), _contradiction(own)]
        for group, own in by_group.items()
    ]
    about = "published against measured here: Kendall's tau (1: the same order, -1: the opposite order)"
    columns = ["table", "values", *models, "of the pairs that contradict (better, worse by the source)"]
    means = ["mean", "", *(number(float(np.mean([t.tau for t in found if t.model == m and t.tau is not None])), 2)
                           for m in models), ""]
    return [heading(about), table(columns, [*rows, means], (0, len(columns) - 1), wrap=True)]


def _contradiction(own: dict[str, Trend]) -> str:
    """The pair that most models rank in opposite order."""
    pairs = [pair for trend in own.values() for pair in trend.contradicts]
    if not pairs:
        return ""
    better, worse = max(dict.fromkeys(pairs), key=pairs.count)
    return f"{better}, {worse} ({len(set(pairs))} pairs)"


def _curve(curve: Curve, errors: Sequence[LeftOut]) -> list[Part]:
    rows = [
        [each.cause.replace("_", " "), str(each.policies), str(each.points), f"{each.median_factor:.2f}",
         f"{each.largest_factor:.1f}", nats(curve.nats(each.cause, 0.05)), nats(curve.nats(each.cause, 0.2))]
        for each in errors
    ]
    about = (f"from the weight that is moved: KL = c s^{curve.power:.2f}; of policies left out of the fit, 80 % lie "
             f"within x {curve.low:.2f} to x {curve.high:.2f}")
    columns = ["most is", "policies", "points", "left out:\nmedian factor", "\nlargest", "KL at 5 %\nmoved", "at 20 %"]
    return [heading(about), table(columns, rows)]


def _against(found: Sequence[AgainstPublished], curve: Curve) -> list[Part]:
    inside = sum(each.inside for each in found)
    verdict = "may be used, within that," if inside >= ENOUGH * len(found) else "cannot be used"
    rows = [
        [each.value.id, each.value.model, percent(each.value.moved), each.value.moved_kind, nats(each.nats),
         f"{nats(each.estimate.low)} to {nats(each.estimate.high)}", "yes" if each.inside else "no"]
        for each in found
    ]
    about = (f"large models inside the band, which is a factor of {curve.high / curve.low:.0f} wide: {inside} of "
             f"{len(found)} published values, so that the curve {verdict} for large models")
    return [heading(about), table(["value", "model", "moved", "of", "nats", "band", "inside"], rows, (0, 1, 3, 6))]


def _values(values: Sequence[PublishedQuality]) -> list[Part]:
    rows = [
        [each.model, each.method, each.setting, each.measure, f"{each.value:g}",
         "-" if each.baseline is None else f"{each.baseline:g}",
         "-" if not (each.tok_s and each.baseline_tok_s) else f"{each.tok_s / each.baseline_tok_s:.2f}x", each.source]
        for each in values if each.group[:4] not in ("smoe", "daop")
    ]
    papers = sum(each.group[:4] in ("smoe", "daop") for each in values)
    about = f"{len(values)} published values; {papers} of them are accuracies in tables of SMoE and DAOP, not listed"
    columns = ["model", "method", "setting", "measure", "value", "without", "speed", "source"]
    return [heading(about), table(columns, rows, (0, 1, 2, 3, 7), wrap=True, widest={"method": 34, "setting": 30})]
