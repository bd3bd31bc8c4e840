"""*Policies*: one scenario under several of them, as ``trilane compare`` plays its first draw; and one decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from policies.registry import policy_names, system
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from trilane.common.names import unknown
from trilane.output.figures.families import COLOURS, LANE_NAMES, STEP_PARTS, step_parts_ms
from trilane.output.figures.marks import kind_of_row, marked, meanings
from trilane.output.figures.perfetto import trace_events
from trilane.output.figures.step_words import change_record, span_text, wait_text
from trilane.output.pages.fit_engine import milliseconds
from trilane.output.pages.output import mebibytes, number, percent
from trilane.page.questions import PageError, Query, machine_asked, whole
from trilane.page.records import Record
from trilane.page.view import Task, ViewPlan
from trilane.study.draws import REFUSALS
from trilane.study.player import LastPrepared
from trilane.study.step_replay import GpuWait, StepReplay, StepSpan, checked_step, replayed

_USUAL = (  # the quickest to play first; those of ``make demo``
    "llama.cpp", "on-demand", "fiddler", "ktransformers", "mixtral-offloading", "dali", "hybrimoe", "best-exact",
    "daop", "moe-infinity", "smoe", "best-approx", "quasi-pf", "oracle",
)
SHARES = (5, 95)  # percent of the experts


class PolicySetting(NamedTuple):
    """A scenario to compare policies in."""

    title: str
    scenario: Mapping[str, object]


_SHORT = {"generated_tokens": 32}
SETTINGS = {
    "deepseek-v2-lite": PolicySetting(
        "DeepSeek-V2-Lite in bfloat16 on an RTX 3090, routing recorded from a small model", {}
    ),
    "gpt-oss-20b": PolicySetting(
        "gpt-oss-20b in a batch of 8 on an RTX 3060 Ti, its own routing",
        {"trace": "gpt-oss-20b", "model": "gpt-oss-20b@mxfp4", "hardware": "rtx-3060-ti+ddr4-3200", "batch": 8,
         **_SHORT},
    ),
    "small": PolicySetting(
        "a small model that was trained for this purpose", {"trace": "mini-moe", "model": None, **_SHORT}
    ),
}


def scenario_of(query: Query) -> Scenario:
    """The scenario that is asked for. Raises PageError, HardwareError."""
    name = query.get("setting") or next(iter(SETTINGS))
    if name not in SETTINGS:
        raise PageError(unknown("setting", name, SETTINGS))
    changes = dict(SETTINGS[name].scenario)
    if query.get("gpu"):
        changes["hardware"] = _hardware(query)
    batch, share = whole(query, "batch", 1, 16), whole(query, "share", *SHARES)
    changes |= {} if batch is None else {"batch": batch}
    changes |= {} if share is None else {"cached_share": float(f"{share}e-2")}
    return Scenario().with_(**changes)


def _hardware(query: Query) -> str:
    from trilane.engines.question import Question

    parts = machine_asked(query).parts
    names = ("gpu", "ram", "cpu", "cores", "channels", "pcie")
    return Question("gpt-oss-20b", **{name: parts[name] for name in names if name in parts}).hardware


def policies_of(query: Query, usual: Sequence[str]) -> list[str]:
    """The policies that are named, or the usual ones; never a file. Raises PageError."""
    known = policy_names()
    asked = [name for name in query.get("policies", "").split(",") if name] or list(usual)
    for name in asked:
        if name not in known:
            raise PageError(unknown("policy", name, known))
    return list(dict.fromkeys(asked))


# --- a comparison -----------------------------------------------------------------------------------------------------


def policies(query: Query) -> ViewPlan:
    """A scenario, then each policy in it."""
    scenario, names = scenario_of(query), policies_of(query, _USUAL)
    head = {
        "kind": "policies", "settings": {name: one.title for name, one in SETTINGS.items()}, "count": len(names),
        "known": {name: system(name).summary for name in policy_names()}, "chosen": names,
        "scenario": _about(scenario), "parts": [part._asdict() for part in STEP_PARTS],
    }
    return ViewPlan(head, tuple(Task(policy_row, (scenario, name)) for name in names))


def _about(scenario: Scenario) -> str:
    share = "what fits" if scenario.cached_share is None else f"{percent(scenario.cached_share)} of the experts"
    model = scenario.model or scenario.trace
    return f"{model} on {scenario.hardware}, batch {scenario.batch}, {share} cached, routing of {scenario.trace}"


def policy_row(scenario: Scenario, name: str) -> Record:
    """One policy: its time per token and what it is made of; or why it cannot run."""
    try:
        run = _played(scenario, name)
    except REFUSALS as error:
        return cannot(name, error)
    return policy_record(name, run)


def cannot(name: str, error: Exception) -> Record:
    """A policy that cannot run, and why."""
    return {"kind": "cannot", "policy": name, "reason": str(error)}


def policy_record(name: str, run: Run) -> Record:
    """A policy's time per token and what it is made of."""
    row = run.to_dict()
    marks = meanings({kind_of_row(row)})
    return {
        "kind": "policy", "policy": name, "marked": marked(name, kind_of_row(row)), "summary": system(name).summary,
        "mark": "; ".join(f"{sign} {text}" for sign, text in marks.items()), "tpot_ms": row["tpot_ms"],
        "tpot": milliseconds(row["tpot_ms"]), "tokens_per_s": number(row["tokens_per_s"]),
        "parts": [{"name": part.label, "colour": part.colour, "ms": ms, "text": milliseconds(ms)}
                  for part, ms in zip(STEP_PARTS, step_parts_ms(row), strict=True)],
        "bound": row.get("lower_bound_tpot_ms"), "hits": percent(row.get("decode_resident_hit_rate")),
        "copied": mebibytes(row.get("pcie_bytes_per_token")),
    }


@cache
def kept_setting() -> LastPrepared:
    """The setting that this process played last."""
    return LastPrepared()


def _played(scenario: Scenario, name: str) -> Run:
    return play(kept_setting().of(scenario).with_policy(name, {}))


# --- one decode step --------------------------------------------------------------------------------------------------


def timeline(query: Query) -> ViewPlan:
    """One decode step under each of two policies, on the same routing."""
    scenario, names = scenario_of(query), policies_of(query, ("on-demand", "mixtral-offloading"))[:2]
    head = {
        "kind": "timeline", "settings": {name: one.title for name, one in SETTINGS.items()}, "lanes": LANE_NAMES,
        "known": list(policy_names()), "chosen": names, "scenario": _about(scenario), "colours": COLOURS,
    }
    return ViewPlan(head, tuple(Task(step_record, (scenario, name, whole(query, "step", 0))) for name in names))


def step_record(scenario: Scenario, name: str, step: int | None) -> Record:
    """The step; by default the one in the middle of the answer."""
    try:
        run = _played(scenario, name)
    except REFUSALS as error:
        return cannot(name, error)
    shape, found = kept_setting().of(scenario).shape, replayed(run, checked_step(run, step))
    return {
        "kind": "step", "policy": name, "marked": marked(name, kind_of_row(run.to_dict())), "step": found.step,
        "ms": found.ms, "time": milliseconds(found.ms), "layers": shape.moe_layers, "experts": shape.experts,
        "spans": [_span(span) for span in found.spans], "waits": [_wait(wait) for wait in found.waits],
        "held": found.held, "changes": [change_record(change) for change in found.changes], "said": _said(found),
    }


def _span(span: StepSpan) -> list[object]:
    return [span.lane, span.kind, span.start_ms, span.end_ms, span.expert, span_text(span),
            span.layer if span.target_layer < 0 else span.target_layer]


def _wait(wait: GpuWait) -> list[object]:
    return [wait.start_ms, wait.end_ms, wait.lane, wait_text(wait)]


def _said(found: StepReplay) -> str:
    return (
        f"{found.resident_hits} experts were on the GPU when they were needed, {found.demand_loads} were copied while "
        f"the layer waited, the CPU computed {found.on_cpu}"
    )


def perfetto(query: Query) -> ViewPlan:
    """Events of the step under both policies, as ``--perfetto`` writes those of whole runs."""
    scenario, names = scenario_of(query), policies_of(query, ("on-demand", "mixtral-offloading"))[:2]
    tasks = (Task(events_of, (scenario, name, place, whole(query, "step", 0))) for place, name in enumerate(names, 1))
    return ViewPlan({"kind": "perfetto"}, tuple(tasks))


def events_of(scenario: Scenario, name: str, process: int, step: int | None) -> Record:
    """Events of the step that is shown."""
    run = _played(scenario, name)
    shown = run.spans[run.spans["step"] == checked_step(run, step)]
    return {"kind": "events", "events": list(trace_events(replace(run, spans=shown), process))}
