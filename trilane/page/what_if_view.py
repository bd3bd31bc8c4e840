"""*What if*: one model on a machine whose numbers are turned; with a cache of experts and drafts, where there are."""

from __future__ import annotations

from collections.abc import Iterator

from sim.machine.dials import DIALS
from trilane.engines.accuracy.errors import regime_of
from trilane.engines.gains import ranked
from trilane.engines.tune.drafts import draft_answer
from trilane.engines.tune.tune import TuneStart, best_cached
from trilane.engines.tune.varied import CPU_CORES, GPU_MEMORY, VARIED, Knob, knobs, started_on, with_knobs
from trilane.output.pages.caveats import limit_text
from trilane.output.pages.output import number, percent
from trilane.page.questions import Query, decimal, tune_question
from trilane.page.records import Record, band_record, speed_record
from trilane.page.view import ViewPlan

_LABELS = {GPU_MEMORY: "GPU memory (GB)", CPU_CORES: "CPU cores", **{name: dial.label for name, dial in DIALS.items()}}
_LENGTHS = ("prompt", "generated", "context", "batch", "ram_gb")


def what_if(query: Query) -> ViewPlan:
    """The answer on the machine as it is turned, and the ranges of its numbers."""
    question = tune_question(query)
    own = question.hardware
    turned = {name: value for name in VARIED if (value := decimal(query, name)) is not None}
    start = started_on(question, with_knobs(own, turned))
    fit = question.fit
    lengths = (fit.prompt_tokens, fit.generated, fit.tokens, fit.batch, fit.ram_gb)
    return ViewPlan({
        "kind": "what if", "model": fit.model, "weights": fit.weights, "machine": own.name, "about": own.about,
        "knobs": [_knob(knob, turned.get(knob.name, knob.own)) for knob in knobs(own)],
        "lengths": dict(zip(_LENGTHS, lengths, strict=True)), **_answer(start), "more": list(_more(start)),
        "drafts": _may_draft(start),
    })


def _knob(knob: Knob, value: float) -> Record:
    return {**knob._asdict(), "label": _LABELS[knob.name], "value": value, "text": f"{value:.4g}",
            "own_text": f"{knob.own:.4g}"}


def _answer(start: TuneStart) -> Record:
    speed = start.search.bench.speed(start.search.best)
    error = speed.error_to_expect(regime_of(speed.shape, speed.hardware, speed.engine, speed.split))
    band = band_record(error, start.best.tokens_per_s)
    return {**speed_record(start.best), **band, "limit": limit_text(ranked(speed.gains()))}


def _more(start: TuneStart) -> Iterator[Record]:
    """Yield the speeds of what may be added to the best setting."""
    if (rival := best_cached(start)) is not None:
        tuned = rival.tuned
        yield {
            "name": "with llama.cpp's own cache of experts (experimental)", "tokens_per_s": tuned.tokens_per_s,
            "speed": number(tuned.tokens_per_s),
            "about": f"{tuned.cache_mib:,} MiB (--moe-cache-mib): {percent(tuned.hit_rate)} hits",
        }
    drafts = draft_answer(start.question, start.search.bench, start.search.best) if _may_draft(start) else None
    for choice in () if drafts is None else drafts.choices:
        for acceptance, rate in choice.tokens_per_s.items():
            yield {"name": f"{choice.drafts} drafts a step, {percent(acceptance)} accepted", "tokens_per_s": rate,
                   "speed": number(rate), "about": "--spec-type draft-mtp"}


def _may_draft(start: TuneStart) -> bool:
    """True unless it is known that the model holds no layers that predict further tokens, or none can be used."""
    bench, fit = start.search.bench, start.question.fit
    usable = "drafts" in bench.engine.options and not bench.hardware.further and fit.batch == 1
    return usable and fit.model_shape.mtp_layers != 0
