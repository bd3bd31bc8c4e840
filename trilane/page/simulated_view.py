"""*What if*, simulated: the policies of ``trilane fit`` on a machine whose numbers are turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from sim.runs.prepare import Prepared
from sim.simulate import play
from trilane.common.errors import TrilaneError
from trilane.engines.memory import host_memory_of
from trilane.engines.question import Question
from trilane.engines.tune.varied import VARIED, with_knobs
from trilane.fit.prepared_question import candidate_in, candidate_names, on_machine, percent_with_room, prepared_for
from trilane.output.figures.families import STEP_PARTS
from trilane.page.policies_views import SHARES, cannot, policy_record
from trilane.page.questions import Query, decimal, tune_question, whole
from trilane.page.records import Record
from trilane.page.view import Task, ViewPlan


def simulated(query: Query) -> ViewPlan:
    """Each policy's task, and the share of the experts, in percent, that the GPU has room for under all of them.

    ``share`` in the query: of the experts on the GPU, in percent, in place of what fits.
    """
    question = tune_question(query).fit
    turned = {name: value for name in VARIED if (value := decimal(query, name)) is not None}
    share, names = whole(query, "share", *SHARES), candidate_names(question)
    head = {"kind": "simulated", "count": len(names), "fits": percent_with_room(_moved(question, turned), names),
            "parts": [part._asdict() for part in STEP_PARTS]}
    return ViewPlan(head, tuple(Task(simulated_row, (question, turned, share, name)) for name in names))


def simulated_row(question: Question, turned: Mapping[str, float], share: int | None, name: str) -> Record:
    """One policy: its time per token and what it is made of; or why it cannot run."""
    moved = _moved(question, turned)
    if share is not None:
        moved = replace(moved, scenario=moved.scenario.with_(cached_share=float(f"{share}e-2")))
    try:
        candidate, _ = candidate_in(moved, name, host_memory_of(question, moved.hardware))
        return policy_record(name, play(candidate))
    except TrilaneError as error:
        return cannot(name, error)


def _moved(question: Question, turned: Mapping[str, float]) -> Prepared:
    prepared = _prepared(question)
    return on_machine(prepared, with_knobs(prepared.hardware, turned))


@lru_cache(maxsize=2)
def _prepared(question: Question) -> Prepared:
    """Kept: it is asked again with each change of a slider."""
    return prepared_for(question)
