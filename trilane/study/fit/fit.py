"""The answer to "what will this model do on that machine?": what fits, which policy, what times, what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sim.machine.hardware import load_hardware
from traces.models.catalogue import load_model
from trilane.common.gc_paused import gc_paused
from trilane.study.fit.asked import asked_of
from trilane.study.fit.candidates import candidates
from trilane.study.fit.caveats import traps_of
from trilane.study.fit.contest import play_all
from trilane.study.fit.evidence import Support, supports_of
from trilane.study.fit.llama_cpp_setting import LlamaCppSetting, llama_cpp_setting
from trilane.study.fit.memory_needed import Memory, check_fits, memory_of
from trilane.study.fit.policy_result import Answer, bounds_beside
from trilane.study.fit.question import Question
from trilane.study.fit.sensitivity import Gain, gains_of, limit_of, ranked
from trilane.study.fit.warm_window import yardstick
from trilane.study.pool import Each, shared

SHOWN = 4


@dataclass(frozen=True)
class Fit:
    """Everything on the page of ``trilane fit``. ``best`` is the least time until the last token of the answer."""

    question: Question
    model: str
    machine: str
    about: str
    routing: str
    runtime: str  # the question's, or "measured" on a profile's machine
    memory: Memory
    best: Answer
    bounds: Mapping[str, float]  # beside it: lower bound and null model, ms
    steps: int  # decode steps that were played; see trilane.study.fit.answer_steps
    runners_up: tuple[Answer, ...]
    beside: tuple[Answer, ...]  # keep the routing, too, but were not asked for
    changing: tuple[Answer, ...]  # faster or not, they change the routing; their prompts are short
    clairvoyant: Answer | None
    refused: Mapping[str, str]
    gains: tuple[Gain, ...]
    limited_by: str
    llama_cpp: LlamaCppSetting | None
    supports: tuple[Support, ...]
    traps: tuple[str, ...]

    @property
    def offloads(self) -> bool:
        """Are there experts that the GPU has no room for?"""
        return not self.memory.all_fits

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "offloads": self.offloads}


def fit(question: Question, jobs: int = 1) -> Fit:
    """Answer a question. ``jobs``: processes that share the work; see ``trilane.study.pool.shared``.

    Raises FitError for what cannot run, saying by how many GB, and what ``resolved`` raises for names that are none.
    """
    shape, hardware = load_model(question.shape), load_hardware(question.hardware)
    check_fits(shape, hardware, question)
    jobs = min(jobs, len(candidates(question, shape, hardware)))
    try:
        with shared(jobs) as each, gc_paused():
            each(_begin, [question] * (jobs - 1))  # the other processes resolve it while this one does
            return _answered(question, each)
    finally:
        asked_of.cache_clear()


def _begin(question: Question) -> None:
    asked_of(question)


def _answered(question: Question, each: Each) -> Fit:
    asked = asked_of(question)
    contest = play_all(question, each)
    played, *others = contest.exact[:SHOWN]
    found = gains_of(question, yardstick(asked, played), each)
    bounds = bounds_beside(asked, played)
    best, setting, gains = played.answer, asked.setting, ranked(found)
    return Fit(
        question=question,
        model=setting.shape.name,
        machine=setting.hardware.name,
        about=setting.hardware.about,
        routing=asked.routing,
        runtime="measured" if setting.hardware.measured else question.runtime,
        memory=memory_of(played.memory, setting.shape, best.host_bytes),
        best=best,
        bounds=bounds,
        steps=asked.steps,
        runners_up=tuple(other.answer for other in others),
        beside=tuple(other.answer for other in contest.beside),
        changing=tuple(other.answer for other in contest.changing),
        clairvoyant=next((other.answer for other in contest.clairvoyant), None),
        refused=contest.refused,
        gains=gains,
        limited_by=limit_of(gains),
        llama_cpp=llama_cpp_setting(asked, [*contest.exact, *contest.beside]),
        supports=supports_of(asked, gains),
        traps=traps_of(asked, best, gains),
    )
