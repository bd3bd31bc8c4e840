"""*My machine*: all models on it, and one model opened; the answers of ``trilane recommend`` and ``tune``."""

from __future__ import annotations

from collections.abc import Iterable

from sim.machine.assembly import NO_GPU
from sim.machine.disks import disks
from sim.machine.parts import all_parts, gpu_names, part, unified_names
from traces.models.catalogue import model_names
from trilane.engines.accuracy.errors import regime_of
from trilane.engines.accuracy.near import MeasuredPoint, near
from trilane.engines.curves import SpeedAt, by_context, by_cpu_layers
from trilane.engines.model_formats import Bench, from_usual
from trilane.engines.recommend import PATIENCE_S, USES, RecommendQuestion, lacking, recommended, shapes_of
from trilane.engines.replaceable import no_upgrades
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import completed, started
from trilane.engines.upgrades import upgrades
from trilane.output.pages.caveats import limit_text, tune_caveats, tune_warnings
from trilane.output.pages.fit_engine import duration
from trilane.output.pages.output import number, signed_percent
from trilane.output.pages.tune import tune_facts
from trilane.output.pages.upgrades import NO_UPGRADES
from trilane.page.questions import Query, model_of, recommend_question, tune_question
from trilane.page.records import (
    Record,
    band_record,
    recommended_record,
    speed_record,
    unable_record,
    upgrade_record,
)
from trilane.page.view import Task, ViewPlan

# --- names to choose from ---------------------------------------------------------------------------------------------


def names(query: Query) -> ViewPlan:
    """All names that a question may hold."""
    parts = all_parts()
    return ViewPlan({
        "kind": "names",
        "gpu": [*_named((*gpu_names(), *unified_names())), {"name": NO_GPU, "title": "no GPU"}],
        "cpu": [{"name": one.name, "title": one.title} for one in parts if one.kind == "cpu"],
        "ram": [{"name": one.name, "title": one.title} for one in parts if one.kind == "memory"],
        "disk": [{"name": name, "title": one.title} for name, one in disks().items()],
        "model": [{"name": name, "title": name} for name in model_names()],
        "use": [{"name": name, "title": _lengths(*lengths)} for name, lengths in USES.items()],
    })


def _named(gpus: Iterable[str]) -> list[dict[str, str]]:
    return [{"name": name, "title": part("gpu", name).title} for name in gpus]


def _lengths(prompt: int, generated: int, window: int) -> str:
    return f"a prompt of {prompt:,} tokens and {generated:,} generated, in a window of {window:,}"


# --- all models -------------------------------------------------------------------------------------------------------


def machine(query: Query) -> ViewPlan:
    """A machine, then each model of the catalogue on it."""
    question, remarks = recommend_question(query)
    shapes = shapes_of(None)
    asked = question.of(next(iter(shapes)))
    head = {
        "kind": "machine", "machine": asked.hardware.name, "about": asked.hardware.about,
        "parts": {name: value for name, value in question.machine.items() if value is not None},
        "use": question.use, "lengths": _lengths(*USES[question.use]), "patience": f"{PATIENCE_S[question.use]} s",
        "models": len(shapes), "remarks": [*remarks, *asked.hardware.notes],
    }
    return ViewPlan(head, tuple(Task(model_row, (question, model, also)) for model, also in shapes.items()))


def model_row(question: RecommendQuestion, model: str, also: tuple[str, ...]) -> Record:
    """One model in its best format, or what it lacks."""
    best = question.best_format(model)
    if best is None:
        return unable_record(lacking(from_usual(question.benches(model)), model, also))
    return recommended_record(recommended(best, model, also), question)


# --- one model --------------------------------------------------------------------------------------------------------


def model(query: Query) -> ViewPlan:
    """A model on a machine: its answer, then curves, parts to buy, formats, and speeds that others measured."""
    question = tune_question(query)
    head = {"kind": "model", "model": question.fit.model, "weights": question.fit.weights, "machine":
            question.hardware.name, "about": question.hardware.about,
            "lengths": _lengths(question.fit.prompt_tokens, question.fit.generated, question.fit.tokens)}
    about_question = (answer, context_curve, cpu_layers_curve, measured_near, bought)
    return ViewPlan(head, (*(Task(task, (question,)) for task in about_question), Task(formats, (query,))))


def answer(question: TuneQuestion) -> Record:
    """The best setting, as ``trilane tune`` prints it."""
    tuning = completed(started(question))
    others = [
        {**speed_record(rival.tuned), "engine": rival.tuned.engine, "slower": signed_percent(rival.reason.slower)}
        for rival in tuning.others
    ]
    return {
        "kind": "answer", **speed_record(tuning.best), **band_record(tuning.error, tuning.best.tokens_per_s),
        "limit": limit_text(tuning.gains), "facts": [list(fact) for fact in tune_facts(tuning)],
        "notes": [*tune_warnings(tuning), *tune_caveats(tuning)], "others": others,
    }


def context_curve(question: TuneQuestion) -> Record:
    """Speed by the tokens of the prompt."""
    return {"kind": "context", "points": _points(by_context(Bench(question)))}


def cpu_layers_curve(question: TuneQuestion) -> Record:
    """Speed by the layers whose experts the CPU has."""
    return {"kind": "cpu layers", "points": _points(by_cpu_layers(started(question)))}


def _points(curve: Iterable[SpeedAt]) -> list[Record]:
    return [{"at": one.at, "tokens_per_s": one.tokens_per_s, "speed": number(one.tokens_per_s),
             "first": duration(one.ttft_ms)} for one in curve]


def measured_near(question: TuneQuestion) -> Record:
    """Speeds that other people measured, nearest first, with what was predicted for them."""
    start = started(question)
    speed = start.search.bench.speed(start.search.best)
    regime = regime_of(speed.shape, speed.hardware, speed.engine, speed.split)
    return {"kind": "measured", "points": [point_record(one) for one in near(speed.shape, speed.hardware, regime)]}


def point_record(point: MeasuredPoint) -> Record:
    """A measured row with its prediction; its other columns are the source and its words."""
    row = point.row
    return {
        "id": row.id, "model": row.model, "weights": row.weights, "machine": row.machine, "gpu": point.gpu,
        "engine": row.engine, "regime": point.regime, "source": row.source, "date": row.date, "setting": row.setting,
        "assumed": row.assumed, "fault": row.fault, "scored": row.scored,
        **{f"{side}_{name}": value for side in ("measured", "predicted")
           for name, value in getattr(point, side)._asdict().items()},
        **{f"{side}_{name}_text": number(value) for side in ("measured", "predicted")
           for name, value in getattr(point, side)._asdict().items()},
    }


def bought(question: TuneQuestion) -> Record:
    """Real parts, and what each gives."""
    none = no_upgrades(question.fit)
    if none is not None:
        return {"kind": "upgrades", "none": NO_UPGRADES[none], "rows": []}
    return {"kind": "upgrades", "none": "", "rows": [upgrade_record(one) for one in upgrades(question)]}


def formats(query: Query) -> Record:
    """All formats of a model, and what each gives on the machine."""
    question, _ = recommend_question(query)
    name = model_of(query)
    return {"kind": "formats", "rows": [_format(bench) for bench in question.benches(name)]}


def _format(bench: Bench) -> Record:
    tuned = bench.best if bench.runs else None
    return {
        "weights": bench.question.fit.weights or "as published", "bits": number(bench.shape.weight_bits),
        "speed": number(None if tuned is None else tuned.tokens_per_s),
        "first": "-" if tuned is None else duration(tuned.ttft_ms),
        "tokens_per_s": None if tuned is None else tuned.tokens_per_s,
    }
