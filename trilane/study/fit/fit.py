"""The answer to "what will this model do on that machine?": what fits, which policy, what times, what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sim.machine.hardware import load_hardware
from sim.runs.prepare import Prepared
from traces.models.catalogue import load_model
from trilane.common.gc_paused import gc_paused
from trilane.study.fit import candidates
from trilane.study.fit.caveats import caveats_of
from trilane.study.fit.evidence import Evidence, evidence_of
from trilane.study.fit.llama_cpp_setting import LlamaCppSetting, llama_cpp_setting
from trilane.study.fit.memory_needed import MemoryUse, check_fits, memory_use, need_of
from trilane.study.fit.policy_result import PolicyResult
from trilane.study.fit.prepared_question import prepared_for
from trilane.study.fit.question import Question
from trilane.study.fit.routing import routing_for
from trilane.study.fit.sensitivity import Gain, gains_of, limit_of, ranked
from trilane.study.fit.warm_window import warm_window
from trilane.study.pool import WorkerPool
from trilane.study.shared_policies import check_workers

SHOWN = 4


@dataclass(frozen=True)
class Fit:
    """Everything on the page of ``trilane fit``. ``best`` has the least time until the last token of the answer."""

    question: Question
    model: str
    machine: str
    about: str
    routing: str
    policy_engine: str  # of the policies; "measured" on a profile's machine
    memory: MemoryUse
    best: PolicyResult
    bounds: Mapping[str, float]  # of the best: lower bound and null model, ms
    steps: int  # decode steps that were played; see sim.runs.sampling
    runners_up: tuple[PolicyResult, ...]
    compared: tuple[PolicyResult, ...]  # keep the routing, too, but are not among those to choose from
    changing: tuple[PolicyResult, ...]  # change the routing; without a TTFT where the prompt is repeated
    clairvoyant: PolicyResult | None
    refused: Mapping[str, str]
    gains: tuple[Gain, ...]
    limited_by: str
    llama_cpp: LlamaCppSetting | None
    supports: tuple[Evidence, ...]
    traps: tuple[str, ...]

    @property
    def offloads(self) -> bool:
        """Whether there are experts that the GPU has no room for."""
        return not self.memory.all_fits

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "offloads": self.offloads}


def fit(question: Question, jobs: int = 1) -> Fit:
    """Answer a question. ``jobs``: processes that share the work; see ``trilane.study.pool.WorkerPool``.

    Raises FitError for what cannot run, saying by how many GB, what ``prepared_for`` raises, and ChoiceError for a
    policy that the other processes lack.
    """
    shape, hardware = load_model(question.shape), load_hardware(question.hardware)
    check_fits(shape, hardware, question)
    all_on_gpu = need_of(shape, hardware, question.batch, question.tokens).all_on_gpu
    policies = candidates.names(question, all_on_gpu)
    check_workers(policies, jobs)
    with WorkerPool(min(jobs, len(policies)), partial(prepared_for, question)) as pool, gc_paused():
        return _answered(question, policies, pool)


def _answered(question: Question, policies: tuple[str, ...], pool: WorkerPool[Prepared]) -> Fit:
    ranking = candidates.run(question, policies, pool)
    first, *others = ranking.exact[:SHOWN]
    best, prepared = first.result, pool.state.with_policy(first.result.policy)
    gains = ranked(gains_of(best.policy, warm_window(prepared, first), pool))
    shape, hardware = prepared.shape, prepared.hardware
    return Fit(
        question=question,
        model=shape.name,
        machine=hardware.name,
        about=hardware.about,
        routing=routing_for(question).about,
        policy_engine="measured" if hardware.measured else question.policy_engine,
        memory=memory_use(prepared.memory, shape, best.host_bytes),
        best=best,
        bounds=prepared.bounds,
        steps=sum(step.phase == "decode" for step in prepared.steps),
        runners_up=tuple(other.result for other in others),
        compared=tuple(other.result for other in ranking.compared),
        changing=tuple(other.result for other in ranking.changing),
        clairvoyant=next((other.result for other in ranking.clairvoyant), None),
        refused=ranking.refused,
        gains=gains,
        limited_by=limit_of(gains),
        llama_cpp=llama_cpp_setting(question, shape, [*ranking.exact, *ranking.compared]),
        supports=evidence_of(prepared, gains),
        traps=caveats_of(question, prepared, best, gains),
    )
