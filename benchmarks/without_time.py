"""A policy on routing alone: every upload ends within its step, whatever it would take."""

from __future__ import annotations

from collections.abc import Iterator

from policies.mechanism.session import Session
from policies.mechanism.views import ExpertId, LayerInput, Routing
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from traces.library import load_trace
from traces.trace import Trace

TEXTS, ANSWER = 8, 64


def replayed(scenario: Scenario, prompt_tokens: int) -> dict[str, float]:
    """Hit rate and uploads a token in the answers to ``TEXTS`` prompts, one after the other, with one cache. Tokens of
    prompts, too, are steps of their own, so that the cache is warm when the first answer begins.
    """
    trace = load_trace(f"synthetic:{(scenario.model or '').partition('@')[0]}/{TEXTS}x{prompt_tokens}+{ANSWER}/none")
    session = prepare(scenario).session()
    hits = lookups = uploads = 0
    for step, token in enumerate(_in_order(trace)):
        answer, copied, served = bool(trace.phase[token]), 0, 0
        session.begin_step(step)
        for layer, ids in enumerate(trace.topk_ids[token].tolist()):
            plan = session.plan_layer(LayerInput(step, layer, "decode", Routing(tuple(sorted(ids)), (1,) * len(ids))))
            served += len(plan.gpu)
            session.end_layer()
            copied += len(list(_carried(session)))
        session.end_step()
        if answer:
            hits, lookups, uploads = hits + served, lookups + trace.topk_ids[token].size, uploads + copied
    return {"hit_rate": round(hits / lookups, 4), "uploads_per_token": round(uploads / (TEXTS * ANSWER), 2)}


def _in_order(trace: Trace) -> list[int]:
    """Rows by sequence and position."""
    return sorted(range(len(trace.sequence)), key=lambda row: (trace.sequence[row], trace.position[row]))


def _carried(session: Session) -> Iterator[ExpertId]:
    while (copy := session.next_copy()) is not None:
        session.copied(copy)
        yield copy.key
